"""Tasks that come back: `on_contention="retry"`, and a message that is delivered again while its task runs.

A task comes back as a new message under its own id, with a countdown, which takes no place in the pool. Its header says
what must be remembered from one delivery to the next.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from time import time
from typing import Any, Final, NoReturn, Self

from celery import current_task
from celery.exceptions import Ignore, Reject, Retry

from ...backends.base import get_backend
from ...conf import get_settings
from ...context import running_celery_task, task_owner
from ...engine.logs import INFO, log
from ...engine.mongo_store import MongoStore
from ...engine.processes import fate
from ...exceptions import LockBackendFailed, LockError, LockNotAcquired

#: The header of a message that came back: a `Note`.
HEADER: Final = "mongolock_retry"
#: The attribute in which the request of a running task keeps the note that it came with.
NOTE: Final = "mongolock_note"
#: Bounds of the time until a task comes back, in seconds. It doubles from one to the next.
SHORTEST, LONGEST = 0.25, 5.0
#: The same while MongoDB does not answer, and for a message whose task runs already.
LONGEST_AWAY, LONGEST_FORMER = 15.0, 60.0


@dataclass(frozen=True, slots=True)
class Note:
    """What a message remembers.

    times: how often it came back. away_since: when MongoDB did not answer for the first time, in seconds since 1970.
    former: the key of the lock with which an earlier delivery of it was found at work, and how many grants of that key
    had expired by then.
    """

    times: int = 0
    away_since: float | None = None
    former: tuple[str, int] | None = None

    @classmethod
    def of(cls, request: Any) -> Self:
        """The note of a running task; an empty one for what this library did not write."""
        match (getattr(request, "headers", None) or {}).get(HEADER):
            case [int(times), (int() | float() | None) as away_since, None]:
                return cls(times, away_since)
            case [int(times), (int() | float() | None) as away_since, [str(key), int(expired)]]:
                return cls(times, away_since, (key, expired))
        return cls()

    def header(self) -> dict[str, Any]:
        """What a message carries."""
        return {HEADER: [self.times, self.away_since, self.former]}


def retry_current_task(error: LockError) -> NoReturn:
    """Send the running task again, with a countdown, and end this run.

    The number of its retries does not change: neither a busy lock nor an outage of MongoDB is a failure of the task.
    Raises Retry for Celery, or *error*: for a task that is called directly or runs eagerly, which cannot come back, and
    once MongoDB has not answered for MONGOLOCK["RETRY_OUTAGE"] seconds.
    """
    task: Any = current_task
    if not task or task.request.called_directly or task.request.is_eager:
        raise error
    note = _note(task.request)
    if isinstance(error, LockNotAcquired):
        _come_back(task, error, replace(note, away_since=None), min(LONGEST, max(SHORTEST, error.retry_after)))
    since = note.away_since or time()
    if not (isinstance(error, LockBackendFailed) and error.passing) or time() >= since + get_settings().RETRY_OUTAGE:
        raise error
    _come_back(task, error, replace(note, away_since=since), LONGEST_AWAY)


def begin_delivery(using: str | None) -> None:
    """If an earlier delivery of this message was found at work, end this run, unless that run has died.

    Raises Ignore if that run has ended by itself, as it has reported its result; Retry while it is at work. If it died,
    its lock has expired or can be resumed, and this run goes on. Raises LockBackendFailed.
    """
    task = running_celery_task()
    if task is None or (former := _take_note(task.request).former) is None:
        return
    key, expired = former
    found = _Found.read(key, using, task)
    if found.left is not None:
        _come_back_later(task, LockNotAcquired(key, holder="an earlier delivery", retry_after=found.left), former)
    if not found.runs and found.expired == expired:
        _ignore(task, key)


def refuse_second_delivery(error: LockError, using: str | None) -> None:
    """If another run of this very task holds the lock, come back, whatever the policy is.

    Its message was delivered twice: Redis does that with a task that runs longer than the visibility timeout. To drop
    this delivery would lose the task if its first run dies, since both acknowledge the same message. Or this is a retry
    that the other run has sent, which is about to end.
    """
    task, owner = running_celery_task(), task_owner()
    if task is None or task.request.is_eager or not isinstance(error, LockNotAcquired):
        return
    if f" owner {owner}," not in f" {error.holder},":
        return
    try:
        found = _Found.read(error.key, using, task)
    except LockError:
        return
    if found.left is not None:
        log(INFO, "a second delivery of a task that runs", key=error.key, task=task.request.id)
        _come_back_later(task, error, (error.key, found.expired))
    if found.has_just_ended:
        _ignore(task, error.key)
    _come_back(task, error, _note(task.request), SHORTEST)


def _ignore(task: Any, key: str) -> NoReturn:
    log(INFO, "a second delivery of a task whose run has ended", key=key, task=task.request.id)
    raise Ignore("the run that was delivered before has ended")


@dataclass(frozen=True, slots=True)
class _Found:
    """What the document of a key says about other runs of a task, with the same number of retries.

    runs: whether one is among the holders. left: the seconds that are left of its lease, unless it is proven dead or
    the lease is over. has_just_ended: whether the last grant that ended was one of them, and was released.
    """

    runs: bool = False
    left: float | None = None
    has_just_ended: bool = False
    expired: int = 0

    @classmethod
    def read(cls, key: str, using: str | None, task: Any) -> Self:
        """Read the document. Raises LockBackendFailed."""
        store = get_backend(using).session().store
        if not isinstance(store, MongoStore):
            return cls()
        fields = {f"{entry}.{name}": 1 for entry in ("holders", "last_holder") for name in _ENTRY}
        with store.bounded(get_settings().COMMAND_TIMEOUT):
            document = store.latest.find_one({"_id": {"$eq": key}}, {"expired": 1, "now": "$$NOW", **fields})
        return cls() if document is None else cls._of(document, task)

    @classmethod
    def _of(cls, document: Mapping[str, Any], task: Any) -> Self:
        now, owner, retries = document["now"], task_owner(), task.request.retries
        holders, last = document.get("holders"), document.get("last_holder")
        entries = [*(holders if isinstance(holders, list) else ()), last]
        *mine, ended = [_left(entry, now, owner, retries) for entry in entries]
        runs = [each for each in mine if each is not None]
        lives = [left for left, process in runs if left > 0 and fate(process) != "gone"]
        return cls(bool(runs), max(lives, default=None), ended is not None and ended[0] > 0, int(document["expired"]))


#: What is read of an entry.
_ENTRY: Final = ("owner", "retries", "process", "until", "released")


def _left(entry: Any, now: datetime, owner: str | None, retries: int) -> tuple[float, str] | None:
    """How many seconds the lease of a run has left, and its process; None if it is not a run that is looked for, or is
    only kept for its minimum hold."""
    match entry:
        case {"owner": str(name), "retries": int(number), "process": str(process), "until": datetime() as until}:
            if (name, number) == (owner, retries) and "released" not in entry:
                return (until - now).total_seconds(), process
    return None


def _take_note(request: Any) -> Note:
    """Take the note off the message, so that a retry of the task's own does not carry it. A second call in one run, for
    another lock, finds none: it is another wait."""
    note = Note.of(request)
    request.headers = {name: value for name, value in (request.headers or {}).items() if name != HEADER}
    setattr(request, NOTE, note)
    return note


def _note(request: Any) -> Note:
    taken: Note | None = getattr(request, NOTE, None)
    return taken if taken is not None else Note.of(request)


def _come_back_later(task: Any, error: LockNotAcquired, former: tuple[str, int]) -> NoReturn:
    """Come back when the run of an earlier delivery may have ended."""
    note = replace(_note(task.request), former=former)
    _come_back(task, error, note, min(LONGEST_FORMER, max(LONGEST, error.retry_after)))


def _come_back(task: Any, error: LockError, note: Note, longest: float) -> NoReturn:
    """Send *task* again, with *note*, in at most *longest* seconds, and end this run."""
    countdown = _jittered(min(longest, SHORTEST * 2 ** min(note.times, 16), half_of_visibility(task)))
    again = task.signature_from_request(task.request, countdown=countdown, retries=task.request.retries)
    headers = {**(again.options.get("headers") or {}), **replace(note, times=note.times + 1).header()}
    try:
        again.set(headers=headers).apply_async()
    except Exception as failure:
        if not task.acks_late:  # this message is acknowledged: rejecting it would end the task without a word
            raise
        # The broker does not answer: have it deliver this message again, so that the task is not lost.
        raise Reject(failure, requeue=True) from failure
    outcome: Exception = Retry(str(error), error, countdown, sig=again)  # type: ignore[arg-type]
    raise outcome


def half_of_visibility(task: Any) -> float:
    """A message that waits in a worker for longer than the visibility timeout would be delivered twice."""
    timeout = (task.app.conf.broker_transport_options or {}).get("visibility_timeout")
    return timeout / 2 if isinstance(timeout, (int, float)) and timeout > 0 else float("inf")


def _jittered(seconds: float) -> float:
    """A time between half of *seconds* and *seconds*, so that tasks that wait for one lock do not all come at once."""
    return random.uniform(0.5, 1.0) * seconds  # noqa: S311 - spreads load
