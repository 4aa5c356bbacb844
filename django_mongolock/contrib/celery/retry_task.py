"""Tasks that come back: `on_contention="retry"`, and a message that is delivered again while its task runs.

A task comes back as a new message under its own id, with a countdown, which takes no place in the pool. Its header says
what must be remembered from one delivery to the next.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final, NoReturn, Self, cast

from celery import current_task
from celery.exceptions import Ignore, Reject, Retry

from ...backends import get_backend
from ...conf import get_settings
from ...context import RETURNED, is_redelivered, task_owner, task_run
from ...decorator.policies import AGAIN, CallFacts, Policy, Unlocked
from ...decorator.policies import Retry as RetryPolicy
from ...engine.logs import INFO, WARNING, log
from ...engine.protocol.processes import fate
from ...engine.rule.options import Unset
from ...engine.store.mongo import MongoStore
from ...exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired, LockReentry

#: Attributes of the request of a running task: the note that it came with; whether a locked call of it runs, and what
#: is to be sent when that has been left.
NOTE, INSIDE, UNSENT = "mongolock_note", "mongolock_inside", "mongolock_unsent"
#: Bounds of the time until a task comes back, in seconds. It doubles from one to the next.
SHORTEST, LONGEST = 0.25, 5.0
#: The same while MongoDB does not answer, and for a message whose task runs already.
LONGEST_AWAY, LONGEST_FORMER = 15.0, 60.0
#: Bounds of the pause after the broker has refused a message, in seconds, and for how long it is asked again before a
#: message that is not acknowledged is given back.
SHORTEST_REFUSED, LONGEST_REFUSED, GIVE_BACK = 0.5, 5.0, 15.0


@dataclass(frozen=True, slots=True)
class Note:
    """What a message remembers.

    number: that of the delivery, larger than that of the one before. sender: the id of the run that sent it. times: how
    often it came back for the lock that it waits for. away_since: when MongoDB did not answer for the first time, in
    seconds since 1970. former: the key of the lock with which another run for the same delivery was found at work, that
    delivery, and how many grants of that key had expired by then.
    """

    number: int = 0
    sender: str = ""
    times: int = 0
    away_since: float | None = None
    former: Sequence[Any] | None = None


class GivenBack(Reject, Ignore):
    """The message is given back to the broker. As it is an Ignore, too, no ``autoretry_for`` catches it."""


def retry_current_task(error: LockError) -> NoReturn:
    """Send the running task again, with a countdown, and end this run.

    The number of its retries does not change: neither a busy lock nor an outage of MongoDB is a failure of the task.
    Inside a locked call, the message is sent when the outermost one has been left. Raises Retry for Celery, or *error*:
    for a task that is called directly or runs eagerly, which cannot come back, for a LockReentry, which is a mistake in
    the code, and once MongoDB has not answered for MONGOLOCK["RETRY_OUTAGE"] seconds.
    """
    task: Any = current_task
    if not task or task.request.called_directly or task.request.is_eager or isinstance(error, LockReentry):
        raise error
    if isinstance(error, LockNotAcquired):
        _come_back_soon(task, error)
    note = _note(task.request)
    since = note.away_since or time.time()
    final = time.time() >= since + get_settings().RETRY_OUTAGE
    if final or not (isinstance(error, LockBackendFailed) and error.passing):
        raise error
    _come_back(task, error, replace(note, away_since=since), LONGEST_AWAY)


class ComeBack(RetryPolicy):
    """The task is sent again."""

    def answer(self, error: LockError, call: CallFacts) -> NoReturn:
        """See retry_current_task()."""
        retry_current_task(error)


class InTask(Policy):
    """The policy of a call in a task of Celery.

    If another run of the task holds the lock, it comes back, whatever the policy is. With "retry" and without wait=, it
    waits in the pool of its worker only for a lock that is held for a moment, and that no other waits for: it takes the
    lock over at once, and of each key, one task waits in the pools.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = ComeBack() if policy.name == "retry" else policy
        self.first_wait, self.gives_up = self.policy.first_wait, self.policy.gives_up  # type: ignore[method-assign]

    @contextmanager
    def around(self) -> Iterator[None]:
        """When the outermost locked call of a task has been left, send what is to be sent.

        So the next run meets no lock of this one.
        """
        task: Any = current_task
        request = task.request
        if getattr(request, INSIDE, False):
            yield
            return
        setattr(request, INSIDE, True)
        try:
            yield
        except Retry as outcome:
            unsent = getattr(request, UNSENT, None)
            if unsent is not None and unsent is getattr(outcome, "sig", None):
                _send(task, unsent)
            raise
        finally:
            setattr(request, INSIDE, False)

    def tries_first(self, call: CallFacts) -> bool:
        """So that a task that was delivered before meets its own earlier run, rather than waits for it."""
        return self._comes_back(call) or is_redelivered()

    def begin(self, call: CallFacts) -> None:
        """If an earlier run for this delivery was found at work, end this one, unless that has died.

        Raises Ignore if that run has ended by itself, as it has reported its result; Retry while it is at work. If it
        died, its lock has expired or can be resumed, and this run goes on. Raises LockBackendFailed.
        """
        task: Any = current_task
        if (former := _take_note(task.request).former) is None:
            return
        key, delivery, expired = former
        found = _Found.read(key, call.options.using, {"owner": str(task_owner()), "delivery": delivery})
        if found.left is not None:
            _come_back_later(task, LockNotAcquired(key, holder="an earlier delivery", retry_after=found.left), former)
        if found.run is None and found.expired == expired:
            _ignore(task, key)

    def refused(self, error: Unlocked, call: CallFacts) -> Any:
        """See Policy.refused()."""
        if not isinstance(error, (LockReentry, LockKeyInvalid)):
            refuse_second_delivery(error, call.options.using)
            if call.trial and (not self._comes_back(call) or _is_brief(error)):
                return AGAIN
        return self.policy.refused(error, call)

    def _comes_back(self, call: CallFacts) -> bool:
        return isinstance(self.policy, ComeBack) and isinstance(call.options.wait, Unset)


def _is_brief(error: LockError) -> bool:
    """Whether the lock is held for a moment, and no other waits for it."""
    return isinstance(error, LockNotAcquired) and not error.waiting and error.held_for < get_settings().SHORT_WAIT


def refuse_second_delivery(error: LockError, using: str | None) -> None:
    """If another run of this very task holds the lock, come back, whatever the policy is.

    A run for the same delivery: the message was delivered twice. Redis does that with a task that runs longer than the
    visibility timeout. To drop this delivery would lose the task if that run dies, since both acknowledge the same
    message. A run for another delivery has sent this one, or what sent it, and is about to end: it is no reason to drop
    anything. What this run itself holds, or a run that has ended keeps for its minimum hold, is left to the policy.
    """
    task: Any = current_task
    owner = str(task_owner())
    if task.request.is_eager or not isinstance(error, LockNotAcquired) or error.owner not in {owner, None}:
        return
    delivery = task_run(task.request)["delivery"]
    try:
        found = _Found.read(error.key, using, {"owner": owner, "delivery": delivery})
    except LockError:
        return
    if found.left is not None:
        log(INFO, "a second delivery of a task that runs", key=error.key, task=task.request.id)
        _come_back_later(task, error, (error.key, delivery, found.expired))
    if found.stays or not (found.others or error.owner == owner):
        return
    if error.owner == owner and found.has_just_ended:
        _ignore(task, error.key)
    _come_back_soon(task, error)


def _ignore(task: Any, key: str) -> NoReturn:
    log(INFO, "a second delivery of a task whose run has ended", key=key, task=task.request.id)
    raise Ignore("the run that was delivered before has ended")


@dataclass(frozen=True, slots=True)
class _Found:
    """What the document of a key says about another run of the task that runs here.

    run: its id, if it is among the holders. left: the seconds that are left of its lease, unless it is proven dead or
    the lease is over. has_just_ended: whether the last grant that ended was such a run's, and was released. others: how
    many runs of the task hold the key, whatever their delivery. stays: how often the task has it otherwise: by the run
    that reads this, or for a minimum hold.
    """

    run: str | None = None
    left: float | None = None
    has_just_ended: bool = False
    expired: int = 0
    others: int = 0
    stays: int = 0

    @classmethod
    def read(cls, key: str, using: str | None, which: Mapping[str, str]) -> Self:
        """Read the document. which: the fields of the run. Raises LockBackendFailed."""
        session = get_backend(using).session()
        if not isinstance(store := session.store, MongoStore):
            return cls()
        fields = {f"{entry}.{name}": 1 for entry in ("holders", "last_holder") for name in _ENTRY}

        def find(left: float) -> dict[str, Any] | None:
            with store.bounded(left):
                return store.latest.find_one({"_id": {"$eq": key}}, {"expired": 1, "now": "$$NOW", **fields})

        document = session.errands.send(find, get_settings().COMMAND_TIMEOUT)
        if document is None:
            return cls()
        found, last, own = document.get("holders"), document.get("last_holder") or {}, task_run(current_task.request)
        holders = [each for each in (found if isinstance(found, list) else ()) if isinstance(each, dict)]
        mine = [each for each in holders if each.get("owner") == which["owner"]]
        others = [each for each in mine if each.get("run") != own["run"] and "released" not in each]
        runs = {str(each["run"]): _left(each, document["now"]) for each in others if _is(each, which)}
        run, left = max(runs.items(), key=lambda each: each[1] or 0.0, default=(None, None))
        has_just_ended = _is(last, which) and last["run"] != own["run"] and last["until"] > document["now"]
        return cls(run, left, has_just_ended, int(document["expired"]), len(others), len(mine) - len(others))


#: What is read of an entry.
_ENTRY: Final = ("owner", "run", "delivery", "process", "until", "released")


def _is(entry: Any, which: Mapping[str, str]) -> bool:
    """Whether an entry is that of a run with these fields, and not only kept for its minimum hold."""
    match entry:
        case {"run": str(), "process": str(), "until": datetime()} if "released" not in entry:
            return all(entry.get(name) == value for name, value in which.items())
    return False


def _left(entry: Mapping[str, Any], now: datetime) -> float | None:
    """How many seconds the lease of a run has left; None if that is over, or the run is proven dead."""
    left: float = (entry["until"] - now).total_seconds()
    return left if left > 0 and fate(entry["process"]) != "gone" else None


def _take_note(request: Any) -> Note:
    """Take the note off the message, so that a retry of the task's own does not carry it. A second call in one run, for
    another lock, finds none: it is another wait."""
    note = _note(request)
    headers = request.headers or {}
    if RETURNED not in headers:
        note = Note(note.number)
    task_run(request)  # it reads the number
    request.headers = {name: value for name, value in headers.items() if name != RETURNED}
    setattr(request, NOTE, note)
    return note


def _note(request: Any) -> Note:
    """Return the note of a running task; an empty one for what this library did not write."""
    if (taken := getattr(request, NOTE, None)) is not None:
        return cast("Note", taken)
    try:
        return Note(**(request.headers or {})[RETURNED])
    except (KeyError, TypeError):
        return Note()


def _come_back_soon(task: Any, error: LockNotAcquired) -> NoReturn:
    """Come back for a busy lock."""
    note = replace(_note(task.request), away_since=None)
    _come_back(task, error, note, min(LONGEST, max(SHORTEST, error.retry_after)))


def _come_back_later(task: Any, error: LockNotAcquired, former: Sequence[Any]) -> NoReturn:
    """Come back when the other run for this delivery may have ended."""
    note = replace(_note(task.request), former=former)
    _come_back(task, error, note, min(LONGEST_FORMER, max(LONGEST, error.retry_after)))


def _come_back(task: Any, error: LockError, note: Note, longest: float) -> NoReturn:
    """Send *task* again, with *note*, in at most *longest* seconds, and end this run."""
    request = task.request
    countdown = min(longest, SHORTEST * 2 ** min(note.times, 16), _half_of_visibility(task))
    countdown *= random.uniform(0.5, 1.0)  # noqa: S311 - so that tasks that wait for one lock do not all come at once
    again = task.signature_from_request(request, countdown=countdown, retries=request.retries)
    sent = replace(note, number=note.number + 1, sender=task_run(request)["run"], times=note.times + 1)
    again.set(headers={**(again.options.get("headers") or {}), RETURNED: asdict(sent)})
    if getattr(request, INSIDE, False):
        setattr(request, UNSENT, again)
    else:
        _send(task, again)
    raise Retry(str(error), error, countdown, sig=again)


def _send(task: Any, again: Any) -> None:
    """Send a message, and pause while the broker refuses it.

    After a while, a message that is not acknowledged is given back, which keeps the task. One that is acknowledged
    would be lost, so it is tried for MONGOLOCK["RETRY_OUTAGE"] seconds.
    """
    begun, pause = time.monotonic(), SHORTEST_REFUSED
    end = begun + (GIVE_BACK if task.acks_late else get_settings().RETRY_OUTAGE)
    while True:
        try:
            again.apply_async()
        except Exception as failure:
            if time.monotonic() + pause > end:
                if not task.acks_late:
                    raise
                raise GivenBack(failure, requeue=True) from failure
            log(WARNING, "the broker refuses a task that comes back", task=task.request.id, error=failure)
            time.sleep(pause)
            pause = min(LONGEST_REFUSED, 2 * pause)
        else:
            return


def _half_of_visibility(task: Any) -> float:
    """A message that waits in a worker for longer than the visibility timeout would be delivered twice."""
    timeout = (task.app.conf.broker_transport_options or {}).get("visibility_timeout")
    return timeout / 2 if isinstance(timeout, (int, float)) and timeout > 0 else float("inf")
