"""Tasks that come back: `on_contention="retry"`, and a message that is delivered again while its task runs.

A task comes back as a new message under its own id, with a countdown, so it occupies no child of the pool while it
waits. A run sends itself at most once, at its end. The header of the message carries a `Note`.

A second delivery is ignored only with a proof that a run returned or raised by itself. The process of a run that Celery
has reported as a success or a failure leaves that proof in the documents of its locks, as a tombstone with the id of
the task and the name of the delivery. Without the proof, the second delivery runs.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NoReturn, cast

from celery import current_task, states
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import before_task_publish, task_postrun, task_retry

from ...backends import get_backend
from ...conf import get_settings
from ...context import MESSAGE, RETURNED, is_redelivered, task_owner, task_run
from ...decorator.policies import AGAIN, CallFacts, Policy, Unlocked
from ...engine import clock
from ...engine.lock import detached
from ...engine.logs import INFO, WARNING, log
from ...engine.protocol.processes import fate
from ...engine.rule.options import Unset
from ...engine.session.lanes import REQUEST
from ...engine.store.mongo import MongoStore
from ...exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired, LockReentry

#: Attributes of the request of a running task for its note, its locks, and the message by which it comes back.
NOTE, LOCKS, UNSENT = "mongolock_note", "mongolock_locks", "mongolock_unsent"
#: Bounds of the time until a task comes back, in seconds. It doubles from one time to the next.
SHORTEST, LONGEST = 0.25, 5.0
#: The same while MongoDB does not answer, and for a message whose task runs already.
LONGEST_AWAY, LONGEST_FORMER = 15.0, 60.0
#: The number of looks for a proof after the first run has gone, because the run may be about to leave one, and the
#: longest pause between two looks in seconds.
LOOKS, LONGEST_LOOK = 2, 2.0
#: The seconds between two attempts to send a message, and the seconds of attempts for a message that can be given back.
PAUSE, GIVE_BACK = 1.0, 15.0
#: A run leaves a proof with its latest locks, among those made at least this many seconds before its end.
LONG_ENOUGH, MOST_PROOFS = 1.0, 10


@dataclass(frozen=True, slots=True)
class Note:
    """The memory of a message.

    - waits: for each lock, by alias and key, the number of returns for it, and the moment of the first missing answer
      of MongoDB in seconds since 1970.
    - again: name of the delivery that the broker repeated, if this message came of such a one.
    - former: key and alias of the lock with which another run was found at work, and the number of looks for its proof
      since that run has gone.
    """

    waits: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)
    again: str | None = None
    former: tuple[str, str | None, int] | None = None

    @classmethod
    def of(cls, request: Any) -> Note:
        """Return the note of a running task, or an empty one for a header of another program.

        The note is taken off the message, so that a retry of the task's own does not carry it.
        """
        if (taken := getattr(request, NOTE, None)) is not None:
            return cast("Note", taken)
        delivery = task_run(request)["delivery"]  # it reads the headers
        headers = request.headers or {}
        note = cls()
        match headers.get(RETURNED):
            case {"waits": dict(waits), "again": str() | None as again, "former": [_, _, int()] | None as former}:
                note = cls(waits, again, former)
        if note.again is None and is_redelivered():
            note = replace(note, again=delivery)
        request.headers = {name: value for name, value in headers.items() if name != RETURNED}
        setattr(request, NOTE, note)
        return note


@before_task_publish.connect(weak=False, dispatch_uid="django_mongolock.message")
def _name_message(headers: dict[str, Any], **kwargs: object) -> None:
    """Give each message an id of its own, by which a second delivery is told from a second message."""
    headers[MESSAGE] = secrets.token_hex(8)


def retry_current_task(error: LockError) -> NoReturn:
    """Send the running task again, with a countdown, and end this run.

    The number of its retries does not change: neither a busy lock nor an outage of MongoDB is a failure of the task.
    The message is sent when the task has ended with the Retry that this raises, so the next run meets no lock of this
    one. Raises *error* instead:

    - for a task that is called directly or runs eagerly, because it cannot come back
    - for a LockReentry, which is a mistake in the code
    - once MongoDB has not answered for MONGOLOCK["RETRY_OUTAGE"] seconds.
    """
    _retry(error, _name(None, (getattr(error, "key", None) or "",)))


def _retry(error: LockError, lock: str) -> NoReturn:
    """See retry_current_task().

    - lock: name of the lock in the note.
    """
    task: Any = current_task
    if not _can_come_back(task) or isinstance(error, LockReentry):
        raise error
    if isinstance(error, LockNotAcquired):
        _come_back(error, min(LONGEST, max(SHORTEST, error.retry_after)), lock)
    since = Note.of(task.request).waits.get(lock, (0, None))[1] or time.time()
    is_final = time.time() >= since + get_settings().RETRY_OUTAGE
    if is_final or not (isinstance(error, LockBackendFailed) and error.passing):
        raise error
    _come_back(error, LONGEST_AWAY, lock, since=since)


def _name(using: str | None, keys: Sequence[str]) -> str:
    """Return the name of a lock in a note."""
    return f"{using or get_settings().DATABASE} {' '.join(keys)}"


def _can_come_back(task: Any) -> bool:
    return bool(task) and not (task.request.called_directly or task.request.is_eager)


class InTask(Policy):
    """The policy of a call in a task of Celery.

    If another run of the task holds the lock, the task comes back, whatever the policy is. With "retry" and without
    wait=, it waits in the pool of its worker only for a lock that is held for a moment, and that no other waits for.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.first_wait, self.gives_up = policy.first_wait, policy.gives_up  # type: ignore[method-assign]

    def tries_first(self, call: CallFacts) -> bool:
        """Return whether a try comes before any wait. A second delivery does not wait for its own earlier run."""
        return self._waits_elsewhere(call) or is_redelivered() or self.policy.tries_first(call)

    def begin(self, call: CallFacts) -> None:
        """Wait for another run of this task by coming back, if one was found at work. Raises LockBackendFailed.

        This comes before the wait for any lock.
        """
        request: Any = current_task.request
        if not request.is_eager and (former := Note.of(request).former) is not None:
            _yield_to_other_run(*former)
            setattr(request, NOTE, replace(Note.of(request), former=None))

    def made(self, call: CallFacts) -> None:
        """Note the lock. A second delivery looks for other runs before it asks for its first lock."""
        request: Any = current_task.request
        locks = getattr(request, LOCKS, ())
        if not locks and not request.is_eager:
            with suppress(LockError):
                _yield_to_other_run(call.lock_keys[0], call.options.using)
        setattr(request, LOCKS, (*locks, (clock.now(), call.options.using, call.lock_keys)))

    def refused(self, error: Unlocked, call: CallFacts) -> Any:
        """See Policy.refused()."""
        if not isinstance(error, (LockReentry, LockKeyInvalid)):
            _meet_other_run(error, call.options.using)
            if self.policy.comes_back(error) and _can_come_back(current_task):
                if not call.trial or (self._waits_elsewhere(call) and not _is_brief(error)):
                    _retry(error, _name(call.options.using, call.lock_keys))
                return AGAIN
            if call.trial and not self.policy.tries_first(call):
                return AGAIN
        return self.policy.refused(error, call)

    def _waits_elsewhere(self, call: CallFacts) -> bool:
        """Return whether the call waits for a busy lock as a message, and not in the pool."""
        return (self.policy.name == "retry" or self.policy.tries_first(call)) and isinstance(call.options.wait, Unset)


def _is_brief(error: Unlocked) -> bool:
    """Return whether the lock is held for a moment, and no other waits for it."""
    return isinstance(error, LockNotAcquired) and not error.waiting and error.held_for < get_settings().SHORT_WAIT


def _meet_other_run(error: Unlocked, using: str | None) -> None:
    """If another run of this very task holds the lock, come back, whatever the policy is."""
    request: Any = current_task.request
    if request.is_eager or not isinstance(error, LockNotAcquired) or error.owner != task_owner():
        return
    with suppress(LockError):
        _yield_to_other_run(error.key, using, 0)
        # A run for an earlier delivery has sent this message, or its sender, and is about to end.
        if _other_runs(error.key, using)[0].keys() - {task_run(request)["delivery"]}:
            _come_back(error, max(SHORTEST, min(LONGEST, error.retry_after)), _name(using, (error.key,)))


def _yield_to_other_run(key: str, using: str | None, looks: int = LOOKS) -> None:
    """If this message was delivered before, leave the task to the other run. Come back while that run is at work.

    Raises Ignore if that run has ended by itself, because it has reported its result. If the run is gone without a
    proof, some further *looks* follow, because it may be about to leave one. After that, this returns. Dropping the
    message would lose the task, since both deliveries acknowledge the same message. Raises LockBackendFailed.

    Redis delivers the message of a task that runs longer than the visibility timeout twice. A message counts as
    delivered before only if the broker says so. Two messages with one id are two tasks.
    """
    task: Any = current_task
    if (own := Note.of(task.request).again) is None:
        return
    at_work, ended = _other_runs(key, using)
    if own in ended:
        log(INFO, "a second delivery of a task whose run has ended", key=key, task=task.request.id)
        raise Ignore("the run that was delivered before has ended")
    left = at_work.get(own)
    if left is None and looks >= LOOKS:
        return
    log(INFO, "a second delivery of a task", key=key, task=task.request.id)
    error = LockNotAcquired(key, holder="an earlier delivery", retry_after=left or 0.0)
    longest = LONGEST_LOOK if left is None else min(LONGEST_FORMER, max(LONGEST, left))
    _come_back(error, longest, _name(using, (key,)), former=(key, using, looks + 1 if left is None else 0))


def _other_runs(key: str, using: str | None) -> tuple[dict[str, float], set[str]]:
    """Return the other runs of the task that runs here, as the document of a key shows them.

    The first ones hold the key, and are not proven dead: their deliveries, and the seconds of their leases. The second
    ones are the deliveries whose runs have left a proof of their end. Raises LockBackendFailed.
    """
    session = get_backend(using).session()
    if not isinstance(store := session.store, MongoStore):
        return {}, set()
    entries = {f"holders.{name}": 1 for name in ("owner", "run", "delivery", "process", "until", "released")}

    def find(left: float) -> dict[str, Any] | None:
        with store.bounded(left):
            return store.latest.find_one({"_id": {"$eq": key}}, {"tombstones": 1, "now": "$$NOW", **entries})

    document = session.threads.off_main_thread(find, get_settings().COMMAND_TIMEOUT, priority=REQUEST) or {}
    own, owner, now = task_run(current_task.request)["run"], task_owner(), document.get("now", datetime.now(UTC))
    at_work = dict[str, float]()
    for entry in document.get("holders") or ():
        match entry:
            case {"owner": of, "run": run, "delivery": str(number), "until": datetime() as until} if run != own:
                left = (until - now).total_seconds()
                is_held = of == owner and "released" not in entry and left > 0
                if is_held and fate(str(entry.get("process"))) != "gone":
                    at_work[number] = left
    names = [str(each.get("grant")) for each in document.get("tombstones") or () if isinstance(each, dict)]
    proof = _proof("")
    return at_work, {name.removeprefix(proof) for name in names if name.startswith(proof)}


def _proof(delivery: str) -> str:
    """Return the name of the tombstone by which a run of this task proves that it has ended."""
    return f"ended:{task_owner()}:{delivery}"


@task_postrun.connect(weak=False, dispatch_uid="django_mongolock.ended")
def _prove_end(task: Any, state: str | None = None, **kwargs: object) -> None:
    """Leave the proof that a run has ended by itself, if the broker may deliver its message again."""
    request = task.request
    if state not in {states.SUCCESS, states.FAILURE} or not task.acks_late or request.is_eager:
        return
    long_ago, proof = clock.now() - LONG_ENOUGH, _proof(task_run(request)["delivery"])
    locks = {(using, key) for made, using, keys in getattr(request, LOCKS, []) if made <= long_ago for key in keys}
    for using, key in list(locks)[-MOST_PROOFS:]:
        detached.leave_tombstone(get_backend(using).session(), key, proof)


def _come_back(
    error: LockError, longest: float, lock: str, *, since: float | None = None, former: Any = None
) -> NoReturn:
    """End this run, and have its task sent again in at most *longest* seconds. The rest goes into the note."""
    task: Any = current_task
    request = task.request
    if (unsent := getattr(request, UNSENT, None)) is None:
        note = Note.of(request)
        times = note.waits.get(lock, (0, None))[0]
        countdown = min(longest, SHORTEST * 2 ** min(times, 16), _half_of_visibility(task))
        countdown *= random.uniform(0.5, 1.0)  # noqa: S311 - tasks that wait for one lock must not all come at once
        unsent = task.signature_from_request(request, countdown=countdown, retries=request.retries)
        # This run has acquired the other locks that it has tried. The waits for them are over.
        tried = {_name(using, keys) for _, using, keys in getattr(request, LOCKS, ())}
        waits = {name: wait for name, wait in note.waits.items() if name not in tried}
        sent = Note({**waits, lock: (times + 1, since)}, note.again, former)
        unsent.set(headers={**(unsent.options.get("headers") or {}), RETURNED: asdict(sent)})
        setattr(request, UNSENT, unsent)
    raise Retry(str(error), error, unsent.options["countdown"], sig=unsent)


@task_retry.connect(weak=False, dispatch_uid="django_mongolock.come_back")
def _send(sender: Any, request: Any, reason: Any, einfo: Any, **kwargs: object) -> None:
    """Send the message of a task that comes back, with retries while the broker cannot be reached.

    After a while, a message that is not acknowledged is given back to the broker. An acknowledged message would be
    lost, so it is tried for MONGOLOCK["RETRY_OUTAGE"] seconds. After that, the task fails.
    """
    message: Any = getattr(request, UNSENT, None)
    if message is None or reason.sig is not message:
        return
    seconds = GIVE_BACK if sender.acks_late else get_settings().RETRY_OUTAGE
    policy = {"max_retries": math.ceil(seconds / PAUSE), "interval_start": PAUSE, "interval_step": 0}
    try:
        message.apply_async(retry=True, retry_policy=policy)
    except Exception as failure:  # noqa: BLE001 - the worker gets it
        log(WARNING, "the broker refuses a task that comes back", task=request.id, error=failure)
        # The worker acts on this exception as if the task had raised it.
        einfo.exception = Reject(failure, requeue=True) if sender.acks_late else failure


def _half_of_visibility(task: Any) -> float:
    """Return half the visibility timeout. A message that waits longer than the timeout in a worker would be delivered
    twice.
    """
    timeout = (task.app.conf.broker_transport_options or {}).get("visibility_timeout")
    return timeout / 2 if isinstance(timeout, (int, float)) and timeout > 0 else float("inf")
