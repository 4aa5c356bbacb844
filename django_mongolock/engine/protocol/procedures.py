"""The protocol of one grant, as generators that decide what to send when.

A protocol only decides. No protocol waits, reads a clock, or does I/O. A protocol yields the actions of `actions`, and
`run` there sends the outcome back or throws the error. For that reason the same lines serve threads and coroutines, and
their tests need no server. The model is psycopg (``generators.py``, ``transaction.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...exceptions import LockBackendFailed, LockCancelled, LockDeadlock, LockMisused, LockNotAcquired, LockQueueFull
from ..clock import backoff
from ..rule.deadlock import Cycle
from ..rule.document import Step
from ..rule.replies import News, Reply
from .actions import (
    FOREVER,
    Acquisition,
    Answer,
    Apply,
    FindDeadlock,
    Granted,
    Pause,
    Protocol,
    QueueNext,
    Read,
    ReleaseUncontended,
    Turn,
    WaitResult,
)
from .processes import NO_PROCESS

#: How long a tombstone stays, in milliseconds. Longer than any network delays a command that may still arrive.
TOMBSTONE_TTL: Final = 600_000
#: Seconds between the end of a dead holder's lease and the request of the head of the queue for the lock.
SLACK: Final = 0.005
#: Seconds that a holder waits for another lock before it looks for a deadlock. Doubled for each further look.
DEADLOCK_CHECK_AFTER: Final = 1.0
#: A failure within this many seconds may be a broken connection. After a longer time, the server does not answer.
PROMPT: Final = 2.0
#: Seconds that the next in line waits for a hand-over of the lock within the process.
LOCAL_HANDOVER_GRACE: Final = 0.5
#: Seconds between two checks of a waiter whether a former run of the same owner has died.
DEAD_OWNER_CHECK: Final = 0.5


@dataclass(slots=True)
class WaitSchedule:
    """The schedule of a wait since *started*. Times are in seconds.

    - dead_owner_check: time until the next check whether a former run has died.
    """

    started: float
    deadlock_check_at: float = FOREVER
    dead_owner_check: float = FOREVER
    deadlock_check_after: float = DEADLOCK_CHECK_AFTER

    def is_deadlock_check_due(self, now: float) -> bool:
        """Return whether it is time to look for a deadlock. If it is, double the time until the next look."""
        if now < self.deadlock_check_at:
            return False
        self.deadlock_check_after *= 2
        self.deadlock_check_at = now + self.deadlock_check_after
        return True


def acquire(
    acquisition: Acquisition,
    deadline: float,
    now: float,
    *,
    since: float | None = None,
    trial: bool = False,
    answer: Answer | None = None,
) -> Protocol[Granted]:
    """Queue for the grant, and wait for it until *deadline* at most.

    - now: present time.
    - since: moment when the wait began.
    - trial: whether to make a single try, without queueing.
    - answer: answer to the command that has queued the grant.

    If the lock was not granted in time, the grant leaves the queue, and LockNotAcquired is raised. After any other
    error, or a LockNotAcquired with a cause, the outcome is unknown. Send `removal_for_good` then.
    """
    schedule = WaitSchedule(
        now if since is None else since, now + DEADLOCK_CHECK_AFTER if acquisition.nested else FOREVER
    )
    # The error of a single try does not count the time of its one command as a wait.
    single = now - schedule.started if trial else None
    # In the loop, *trial* is whether this is the last try. *answer* is an answer without a command of this grant: first
    # the caller's, and later an answer to another grant's command that came during a pause.
    action: Apply | Read = acquisition.enter(trial)
    last_token = 0  # the largest of all answers, because an answer to another grant's command may be older
    while True:
        if answer is None:
            answer = yield from _persistently(action, acquisition, now, deadline)
        reply, now = answer.reply, answer.now
        # Unless there is a pause, the next command must do something that this one cannot. Nothing checks the deadline.
        step = action.step if isinstance(action, Apply) else Step()
        last_token = max(last_token, reply.last_token)
        _refuse_other_capacity(acquisition, reply)
        if reply.held:
            granted = _granted(reply, answer, acquisition)
            if granted is not None:
                return granted
            if step.renew:
                raise LockBackendFailed("the answer took longer than the lease that it grants", acquisition.key)
            # Another command granted the lock, or a mere read saw the grant. A renewal gives it a whole lease.
            action, answer = acquisition.confirm(), None
            continue
        if reply.former is not None and answer.former == "gone" and reply.former.grant not in step.remove:
            # The command of a parked lock has been answered, and no copy of it is on its way.
            tombstone_ttl = 0 if reply.former.process == NO_PROCESS else TOMBSTONE_TTL
            action, answer = acquisition.resume(reply.former.grant, trial, tombstone_ttl), None
            continue
        _refuse_the_rest(action, reply, now - schedule.started if single is None else single)
        schedule.dead_owner_check = DEAD_OWNER_CHECK if answer.former == "alive" else FOREVER
        if step.add is None and (reply.place is None or reply.first_end is None or reply.first_end <= 0):
            # The grant is out of the queue, or the lock has no holder. An update prunes and grants.
            action, answer = acquisition.enter(trial), None
            continue
        result = yield from _wait_for_news(acquisition, reply, deadline, now, schedule)
        last_token = max(last_token, result.last_token)
        now, (news, answer) = result.now, _newer(result, last_token)
        if news is not None:
            if result.queued_until - now >= acquisition.enough:
                return Granted(news.token, news.acquired_at, result.queued_until, now)
            action = acquisition.confirm()
        else:
            trial = answer is None and now >= deadline
            asks = trial or answer is not None or result.place_gone
            action = acquisition.enter(trial) if asks else acquisition.read()


def _newer(result: WaitResult, last_token: int) -> tuple[News | None, Answer | None]:
    """Return the news and the answer in *result* that are newer than the answer that showed the grant waiting.

    The grant may have been granted before, its process may have slept through that, and have queued it again. Bells
    come late, and twice.
    """
    news, answer = result.news, result.answer
    if news is not None and news.token <= last_token:
        news = None
    if answer is not None and answer.reply.held and answer.reply.token <= last_token:
        answer = None
    return news, answer


def _refuse_other_capacity(acquisition: Acquisition, reply: Reply) -> None:
    """Raise LockMisused if the first of the holders gives the semaphore another number of permits."""
    terms, theirs = acquisition.terms, reply.theirs
    if terms.resize or terms.mode != "semaphore" or theirs is None or theirs["mode"] != "semaphore":
        return
    if theirs["capacity"] != terms.capacity:
        raise LockMisused(
            f"lock {acquisition.key!r} has {theirs['capacity']} permits where it is held, and {terms.capacity} here: "
            "give the same number wherever it is used, or pass resize=True to change it while it is in use"
        )


def _refuse_the_rest(action: Apply | Read, reply: Reply, waited: float) -> None:
    """Raise LockNotAcquired for a grant that is neither granted nor queued."""
    if isinstance(action, Apply) and action.step.trial:
        error = LockNotAcquired(action.key, waited, reply.holder, max(0.0, reply.first_end or 0.0))
        error.held_for, error.waiting = reply.held_for, reply.waiting
        error.owner = str((reply.theirs or {}).get("owner", ""))
        error.kept = "released" in (reply.theirs or {})
        raise error
    if isinstance(action, Apply) and action.step.add and reply.place is None:
        raise LockQueueFull(action.key, waited, reply.holder)


def _wait_for_news(
    acquisition: Acquisition, reply: Reply, deadline: float, now: float, schedule: WaitSchedule
) -> Protocol[WaitResult]:
    """Wait in the queue of the document, at the place in *reply*. Raise LockDeadlock or LockCancelled."""
    place = reply.place or 0
    if schedule.is_deadlock_check_due(now):
        yield from _refuse_deadlock(acquisition, now - schedule.started)
    end = max(0.0, reply.first_end or 0.0) + SLACK if place == 0 else FOREVER
    timer = max(0.0, min(deadline - now, schedule.deadlock_check_at - now, end, schedule.dead_owner_check))
    result: WaitResult = yield Pause(acquisition.grant, timer, in_queue=True)
    if result.cancelled:
        failure = yield from leave(acquisition)
        raise LockCancelled(acquisition.key, result.now - schedule.started, reply.holder) from failure
    if result.now >= deadline and result.news is None and result.answer is None:
        yield from _queue_next(acquisition)  # the last try, after which this grant leaves the queue
    return result


def _refuse_deadlock(acquisition: Acquisition, waited: float) -> Protocol[None]:
    """Raise LockDeadlock if *acquisition* is the youngest in a cycle of waits."""
    try:
        cycle: Cycle | None = yield FindDeadlock(acquisition.key, acquisition.grant)
    except LockBackendFailed:
        return
    if cycle is not None and cycle.victim.grant == acquisition.grant:
        failure = yield from leave(acquisition)
        raise LockDeadlock(acquisition.key, waited, str(cycle), cycle.keys) from failure


def _granted(reply: Reply, answer: Answer, acquisition: Acquisition) -> Granted | None:
    """Return the grant in *answer*, if its command gave it a whole lease, and the lease is not over yet."""
    until = answer.sent + acquisition.terms.lease
    if not answer.whole or reply.acquired_at is None or until <= answer.now:
        return None
    uncontended = reply.waiting == 0 and acquisition.terms.mode == "exclusive" and not acquisition.terms.min_hold
    return Granted(reply.token, reply.acquired_at, until, answer.now, uncontended)


def _persistently(action: Apply | Read, acquisition: Acquisition, now: float, deadline: float) -> Protocol[Answer]:
    """Send *action*, and repeat it until *deadline* while that may help.

    After a failure that came at once, try once more, even after the deadline.
    """
    failures, started = 0, now
    while True:
        try:
            answer: Answer = yield action
        except LockBackendFailed as error:  # kept in no variable, because its frames keep the lock object alive
            failures += 1
            if not error.passing or (failures > 1 and now >= deadline):
                raise
            # The pause takes no longer than the time left before the action. The action may have used up all of it.
            pause = min(backoff(failures + 1), max(0.1, deadline - now))
            result: WaitResult = yield Pause(acquisition.grant, pause)
            began, now = now, result.now
            if result.answer is not None:  # the answer to a command of another grant of this process
                return result.answer
            if result.cancelled:
                raise LockCancelled(acquisition.key, now - started) from error.with_traceback(None)
            if now >= deadline and now - began > PROMPT:
                raise
        else:
            return answer


def wait_in_line(acquisition: Acquisition, turn: Turn, deadline: float, now: float) -> Protocol[WaitResult]:
    """Wait for the turn among the waiters of this process. Send nothing to the server.

    The next in line waits a moment for the hand-over within the process, because that needs no command of its own.
    After that, it joins the queue of the document, where every process sees it. The wait ends at the deadline at the
    latest.
    """
    started, next_since = now, now if turn == "next" else None
    while True:
        until = deadline if next_since is None else min(deadline, next_since + LOCAL_HANDOVER_GRACE)
        result: WaitResult = yield Pause(acquisition.grant, max(0.0, until - now))
        now = result.now
        # An answer comes first, because it has the place in the queue, or the lock.
        if result.answer is not None:
            return result
        if result.cancelled:
            raise LockCancelled(acquisition.key, now - started)
        if now >= deadline and result.turn == "behind":
            raise LockNotAcquired(acquisition.key, now - started, result.holder)
        if result.turn == "now" or now >= deadline:
            return result
        if result.turn == "next":
            if next_since is not None and now >= next_since + LOCAL_HANDOVER_GRACE:
                return result
            next_since = now if next_since is None else next_since


def leave(acquisition: Acquisition) -> Protocol[LockBackendFailed | None]:
    """Take the grant out of the queue, or release it if it was granted meanwhile. Return the error if that failed."""
    yield from _queue_next(acquisition)
    try:
        yield acquisition.give_up()
    except LockBackendFailed as error:
        return error.with_traceback(None)  # its frames would keep the lock object alive
    return None


def _queue_next(acquisition: Acquisition) -> Protocol[None]:
    """Queue the next waiter of this process. If that fails, the waiter does so by itself."""
    with contextlib.suppress(LockBackendFailed):
        yield QueueNext(acquisition.key, acquisition.grant)


def release(
    key: str,
    grant: str,
    heir: Acquisition | None = None,
    *,
    uncontended: bool = False,
    stays: bool = False,
    leave_tombstone: bool = False,
) -> Protocol[tuple[bool, Answer | None]]:
    """Release the grant. Return whether it was there, and the answer to the command.

    - heir: waiter to be queued in the same command. If the grant was not there, nothing is done, and no answer
      returned.
    - uncontended: whether to try first the much cheaper command for a lock without a waiter. Only for an exclusive
      grant without a minimum hold.
    - stays, leave_tombstone: see `releasing`.
    """
    if uncontended and heir is None and not leave_tombstone and not (yield ReleaseUncontended((key,), (grant,))):
        return True, None
    answer: Answer = yield releasing(key, grant, heir, stays=stays, leave_tombstone=leave_tombstone)
    return answer.reply.found, answer if answer.reply.found else None


def releasing(
    key: str, grant: str, heir: Acquisition | None = None, *, stays: bool = False, leave_tombstone: bool = False
) -> Apply:
    """Return the command that releases the grant, and queues *heir*.

    - stays: whether the grant may have a minimum hold. The command for a grant without one is shorter.
    - leave_tombstone: whether a copy of the command that acquired the grant may still arrive.
    """
    others: dict[str, Any] = {} if heir is None else {"ask": heir.grant, "add": heir.entry}
    return Apply(key, _removal(grant, stays=stays, leave_tombstone=leave_tombstone, given=grant, **others))


def _removal(grant: str, *, stays: bool = False, leave_tombstone: bool = False, **others: Any) -> Step:
    return Step(remove=(grant,), force=not stays, tombstone_ttl=TOMBSTONE_TTL if leave_tombstone else 0, **others)


def removal(grants: Sequence[str], *, stays: bool) -> Step:
    """Return the step that removes holders and waiters from the documents of many keys. See `releasing` for *stays*."""
    return Step(remove=tuple(grants), force=not stays)


def downgrade(
    acquisition: Acquisition, former: str, deadline: float, now: float, *, leave_tombstone: bool = False
) -> Protocol[Granted | None]:
    """Take the place of the exclusive grant *former*, and let in the readers at the head of the queue, in one command.

    Return None if *former* was not there any more. Only the first copy of the command finds *former*. When a later copy
    finds nothing, the majority knows the first one, because a command that changes nothing waits for all before it. See
    `releasing` for *leave_tombstone*.
    """
    others: dict[str, Any] = {"ask": acquisition.grant, "add": acquisition.entry, "given": former}
    step = _removal(former, leave_tombstone=leave_tombstone, resumes=True, trial=True, **others)
    answer = yield from _persistently(Apply(acquisition.key, step), acquisition, now, deadline)
    if not (answer.reply.held and answer.whole):
        answer = yield from _persistently(acquisition.confirm(), acquisition, answer.now, deadline)
    return _granted(answer.reply, answer, acquisition) if answer.reply.held else None


def removal_for_good(key: str, grant: str, *, stays: bool = False) -> Apply:
    """Return the command that removes the grant for good, whatever became of the commands that were sent for it.

    - stays: whether the grant was held, and its minimum hold has to last.
    """
    return Apply(key, _removal(grant, stays=stays, leave_tombstone=True, ask=grant))
