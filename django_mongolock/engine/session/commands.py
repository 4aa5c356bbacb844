"""The commands of a session. Each is sent in bounded time, and each reply becomes an `Answer`."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Final

from ...exceptions import LockBackendFailed, LockError, LockMisused
from ..logs import DEBUG, log
from ..protocol.actions import (
    FOREVER,
    Action,
    Answer,
    Apply,
    Command,
    FindDeadlock,
    Pause,
    QueueNext,
    Read,
    ReleaseUncontended,
)
from ..rule.document import Step, milliseconds
from ..rule.replies import Reply
from .background import SHORTEST_COMMAND
from .core import SessionCore
from .grant import Grant, State
from .lanes import BACKGROUND, RELEASE, REQUEST
from .releases import KeyGuesses, Releases, UnconfirmedRelease
from .waits import Waits

#: The seconds of waiting below which a step carries no waiting time. The arrival of the command decides the place then.
JUST_CAME: Final = 0.05
#: The most seconds that a release gets after a wait. Keys that remain are released in the background.
GIVE_BACK_LIMIT: Final = 0.5


class Commands:
    """The executor of protocol actions. It sends commands to the store, and waits. May be used from any thread.

    - timeout: most seconds that a command may take.
    - numbers: source of command numbers. The number in an entry shows that the command took effect.
    """

    def __init__(self, session: SessionCore, waits: Waits, timeout: float) -> None:
        self.timeout = timeout
        self.numbers = itertools.count(1)
        self.releases = Releases()
        self.guesses = KeyGuesses()
        self._session = session
        self._waits = waits
        self._closed = False

    def perform(self, action: Action) -> Any:
        """Carry out *action*, blocking.

        The main thread has another thread send its commands, see `worker_threads`. So does any thread while two
        commands of the key are under way.
        """
        threads, is_main = self._session.threads, threading.current_thread() is threading.main_thread()
        if is_main or isinstance(action, Pause) or not threads.begin_own(action.key):
            return self.call(action)
        try:
            return self.send(action)
        finally:
            threads.end_own(action.key)

    def call(self, action: Action) -> Any:
        """Have another thread send *action*, and wait for it."""
        if isinstance(action, Pause):
            return self._waits.pause(action)
        return self._session.threads.call(functools.partial(self.send, action), **self._how_to_call(action))

    def aperform(self, action: Action) -> Awaitable[Any]:
        """See perform(). A coroutine holds a thread only while its command is on its way."""
        if isinstance(action, Pause):
            return self._waits.apause(action)
        return self._session.threads.acall(functools.partial(self.send, action), **self._how_to_call(action))

    def _how_to_call(self, action: Command) -> dict[str, Any]:
        """Return the options of the call that sends *action*.

        Only a first command shares the answer of another one. A later command may have to take its grant out of the
        queue.
        """
        adds = action.step.ask if isinstance(action, Apply) and action.step.add else ""
        grant = self._session.registry.grants.get(adds)
        if first := grant is not None and not grant.waiting.sent:
            grant.waiting.sent = True  # the command may be on its way from now on
        return {
            "timeout": self._seconds_for(action),
            "priority": _priority(action, grant),
            "key": action.key,
            "same": _question(action) if first else None,
            "on_withdrawn": functools.partial(setattr, grant.waiting, "sent", False) if grant and first else None,
            "on_overdue": functools.partial(setattr, grant, "outcome_unknown", True) if grant else None,
        }

    def close(self, timeout: float) -> None:
        """Give each later command at most *timeout* seconds, and stop remembering releases."""
        self.releases.close()
        self.timeout = min(self.timeout, timeout)
        self._closed = True

    def _seconds_for(self, action: Action) -> float:
        """Return the seconds that *action* may take.

        A waiter must be back within its wait and the time of one command.
        """
        match action:
            case Apply(_, step) if not step.given:
                grant = self._session.queue.waiting.get(step.ask)
            case ReleaseUncontended(after=True):
                return min(self.timeout, GIVE_BACK_LIMIT)
            case Read(_, grant_id) | QueueNext(_, grant_id) | FindDeadlock(_, grant_id):
                grant = self._session.queue.waiting.get(grant_id)
            case _:
                grant = None
        left = FOREVER if grant is None else max(SHORTEST_COMMAND, grant.waiting.back_by - self._session.now())
        return min(left, self.timeout / (4 if isinstance(action, QueueNext) else 1))

    # What is sent

    def send(self, action: Action, left: float = FOREVER, *, known: Answer | None = None) -> Any:
        """Carry out *action* in at most *left* seconds. Return its outcome as `protocol.actions` defines it.

        - known: answer to a command that asked the same and was sent later than this action was entered. If given,
          this action is not sent.
        """
        self._refuse_if_closed(action)
        try:
            return self._send(action, min(left, self._seconds_for(action)), known)
        except LockBackendFailed:
            self._refuse_if_closed(action)  # close() has closed the client under this command
            raise

    def _refuse_if_closed(self, action: Action) -> None:
        """Raise LockMisused if the session was closed and *action* asks for a lock. Releases are still sent."""
        if not self._closed or isinstance(action, ReleaseUncontended):
            return
        if not isinstance(action, Apply) or (action.step.add and (not action.step.remove or action.step.resumes)):
            raise LockMisused("the session was closed before the lock was granted")

    def _send(self, action: Action, timeout: float, known: Answer | None) -> Any:
        """Send the command of *action*."""
        match action:
            case Apply(key, step):
                return self._apply(key, step, timeout, known)
            case ReleaseUncontended(keys, grants):
                return self._release(keys, grants, timeout)
            case QueueNext(key, grant_id):
                return self._queue_next(grant_id, timeout)
            case FindDeadlock(key, grant_id):
                return self._session.store.deadlock(key, grant_id, timeout)
            case Read(key, grant_id, owner):
                sent = self._session.now()
                return self.answer(grant_id, self._session.store.read(key, grant_id, timeout, owner), sent)
        raise TypeError(f"not a command: {action!r}")

    def _release(self, keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        """Release the grants, and remember releases that only the primary has confirmed. An election may undo those."""
        left = self._session.store.release_uncontended(keys, grants, timeout)
        for key, grant_id in zip(keys, grants, strict=True):
            if key not in left:
                self.guesses.released(key)
                made = UnconfirmedRelease(key, grant_id, self._session.store.sent_to(), self._session.now())
                if self.releases.made(made):
                    self._session.heartbeat.schedule(self.releases.look_at)
        return left

    def _apply(self, key: str, step: Step, timeout: float, known: Answer | None) -> Answer:
        """Send a step with a number of its own. Only an entry with that number was written by this command."""
        if known is not None:
            return self.answer(step.ask, known.reply, known.sent)
        if self._closed and step.add is not None:
            step = replace(step, add=None)  # the release is still sent, but hands the key to nobody
        grant, sent = self._session.registry.grants.get(step.ask), self._session.now()
        step = replace(step, beat=next(self.numbers))
        if step.add is not None and grant is not None:
            grant.waiting.sent = True
        step = self.with_arrival(step, grant, sent)
        try:
            reply = self._send_step(key, step, timeout, grant)
        except LockBackendFailed:
            if step.add is not None and grant is not None:
                grant.outcome_unknown = True
            raise
        self.releases.confirmed(self._session.store.sent_to(), sent)
        if step.given and reply.bells:
            self.guesses.handed_over(key)
        elif step.given and reply.found and reply.first_end is None:
            self.guesses.released(key)
        return self.answer(step.ask, reply, sent, step.beat)

    def with_arrival(self, step: Step, grant: Grant | None, now: float) -> Step:
        """Return the step with the time that *grant* has waited, and the number of local waiters behind it.

        The step is returned unchanged if it does not add *grant*.
        """
        if (entry := step.add) is None or grant is None:
            return step
        waiting = grant.waiting
        if now - waiting.began >= JUST_CAME:
            step = replace(step, waited=milliseconds(now - waiting.began))
        if waiting.behind:
            step = replace(step, add={**entry, "behind": waiting.behind})
        return step

    def _send_step(self, key: str, step: Step, timeout: float, grant: Grant | None) -> Reply:
        """Apply the step. If the key is probably free, try the form that is short for the server first."""
        if step.only_adds and self.guesses.is_free(key):
            started = self._session.now()
            if (reply := self._session.store.take_free(key, step, timeout)) is not None:
                return reply
            self.guesses.was_wrong(key)
            timeout = max(SHORTEST_COMMAND, timeout - (self._session.now() - started))
            step = self.with_arrival(step, grant, self._session.now())
        return self._session.store.apply(key, step, timeout)

    def _queue_next(self, grant_id: str, timeout: float) -> None:
        """See protocol.actions.QueueNext."""
        grant = self._session.queue.waiting.get(grant_id)
        next_waiter = None if grant is None else self._session.queue.reserve_handover(grant)
        if next_waiter is None:
            return
        answer = None
        try:
            answer = self.send(next_waiter.acquisition.enter(False), timeout)
        except LockError as error:
            log(DEBUG, "the next in line was not queued", key=next_waiter.key, error=error)
        finally:
            self._session.queue.finish_handover(next_waiter, answer)

    # What comes back

    def answer(self, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        """Make the answer to command *number*, and update the grant's deadline.

        Rule: a deadline is derived from this process's own last command and from local time only. If the number of the
        command stands in the entry, the command has given a whole place in the queue or a whole lease. The deadline is
        then that length, counted from before the command was *sent*. A read has no number and moves no deadline. A bell
        that reports the grant moves no deadline either.
        """
        former = None if reply.former is None else self._session.fate(reply.former.process)
        answer = Answer(reply, sent, self._session.now(), reply.beat == number, former)
        grant = self._session.registry.grants.get(grant_id)
        if grant is None:
            return answer
        if grant.state is State.WAITING and not reply.held:
            grant.reporting.busy, grant.reporting.held_by = True, reply.holder or grant.reporting.held_by
        if reply.place is None:
            return answer
        grant.waiting.at_head, grant.waiting.seen_at = reply.last_token if reply.place == 0 else -1, answer.now
        if grant.state is not State.WAITING:
            return answer
        was_gone, grant.waiting.place_gone = grant.waiting.place_gone, False
        if answer.whole:
            grant.waiting.last_token = max(grant.waiting.last_token, reply.last_token)
            grant.renewed(sent + grant.lease.waiter_length, answer.now)
        elif was_gone:
            grant.lease.renew_at = answer.now  # an earlier command has queued it again, for an unknown time
        if was_gone:
            self._session.registry.schedule(grant)
        return answer


def _priority(action: Action, grant: Grant | None) -> int:
    """Return the priority of a command that adds *grant*. Releases go first, since they unblock other callers.

    A waiter that has lost its place goes last. Thousands of them may ask again at the same time.
    """
    if isinstance(action, ReleaseUncontended) or (isinstance(action, Apply) and action.step.remove):
        return RELEASE
    is_again = grant is not None and grant.waiting.place_gone and isinstance(action, Apply) and not action.step.trial
    return BACKGROUND if is_again else REQUEST


def _question(action: Action) -> object:
    """Return what a single try asks, or None for any other action."""
    if not (isinstance(action, Apply) and action.step.trial and action.step.only_adds and action.step.add):
        return None
    return tuple(action.step.add.get(name) for name in ("mode", "capacity", "more_permits", "owner"))
