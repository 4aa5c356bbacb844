"""Locks that no process keeps alive. Their owner takes them up later, perhaps in another process.

There are three kinds, namely the lock of a task with a message in the queue (`Parked`), claims (`claims`), and edit
locks. `Detached` is their common base.

A parked lock is an entry like any other, with `processes.NO_PROCESS` as its process. The next request in the name of
its owner therefore resumes it. A parked lock is not renewed, and ends with its lease.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ...exceptions import LockBackendFailed, LockError, LockMisused
from .. import clock
from ..protocol import actions
from ..protocol.actions import Answer, Apply, Protocol, Read
from ..protocol.procedures import TOMBSTONE_TTL
from ..protocol.processes import NO_PROCESS, fate
from ..rule.document import Step, Terms, entry, milliseconds
from ..rule.replies import Reply
from ..session.ending import EndReason
from ..session.grant import Grant
from ..session.lanes import REQUEST
from ..session.session import Session
from .lock import MongoLock

#: The seconds before each try to release a parked lock. The last pause is repeated.
RELEASE_PAUSES: Final = (0.0, 1.0, 5.0, 15.0, 60.0)


@dataclass(frozen=True, slots=True)
class Belief:
    """The time for which this process knows that the lock is held, by the local clock. True until that time.

    The time is one lease, counted from before a command was sent that is known to have taken or renewed the lock. A
    mere read does not make it longer.
    """

    until: float = 0.0
    now: Callable[[], float] = clock.now
    pid: int = 0

    def __bool__(self) -> bool:
        return self.remaining > 0

    @property
    def remaining(self) -> float:
        """Seconds until the end of the belief."""
        return max(0.0, self.until - self.now()) if self.pid == os.getpid() else 0.0


class Detached:
    """A lock that no process keeps alive, and the belief that the answers to its steps justify.

    Make one for each request. In a forked child, an object of the parent sends nothing.

    - find: function that returns the session of this process.
    """

    def __init__(self, key: str, find: Callable[[], Session] | None = None) -> None:
        self._stored = key
        self._find = find
        self._pid = os.getpid()
        self._belief = Belief()

    def taking(self, new: Mapping[str, Any], former: str = "", tombstone_ttl: int = 0) -> Protocol[Reply]:
        """Take the lock with this entry, if the lock is free, or take the place of the grant *former*."""
        step = Step(ask=new["grant"], add=dict(new), trial=True)
        if former:
            step = replace(step, remove=(former,), force=True, resumes=True, tombstone_ttl=tombstone_ttl)
        return self._apply(step, new["lease"] / 1000)

    def keeping(self, grant: str, terms: Terms, beat: int = 0) -> Protocol[Reply]:
        """Let a grant last for a whole lease from now."""
        lease, server_lease = milliseconds(terms.lease), milliseconds(terms.server_lease)
        step = Step(ask=grant, renew=(grant,), lease=lease, server_lease=server_lease, beat=beat)
        return self._apply(step, terms.lease)

    def leaving(self, grant: str, tombstone_ttl: int, given: str = "") -> Protocol[Reply]:
        """Remove a grant for good, even if its command is still on its way. With *given*, only while that is there."""
        step = Step(remove=(grant,), force=True, tombstone_ttl=tombstone_ttl, given=given)
        answer: Answer = yield Apply(self._stored, step)
        return answer.reply

    def looking(self, grant: str = "") -> Protocol[Reply]:
        """Read the state of the lock. A read does not lengthen the belief."""
        answer: Answer = yield Read(self._stored, grant)
        return answer.reply

    def _apply(self, step: Step, lease: float) -> Protocol[Reply]:
        answer: Answer = yield Apply(self._stored, step)
        # Only a command that has itself taken or renewed the lock justifies a belief.
        if answer.whole and answer.reply.held:
            self._belief = Belief(answer.sent + lease, self._session().now, self._pid)
        return answer.reply

    def _session(self) -> Session:
        if self._find is None or self._pid != os.getpid():
            raise LockBackendFailed("a forked child cannot use what its parent has made", self._stored, passing=False)
        return self._find()


class Parked(Detached):
    """A lock that waits for its owner. Only the server's clock counts, because no process believes to hold it.

    - timeout: seconds that a command may take. Default: the timeout of the session.
    """

    def __init__(self, session: Session, key: str, grant: str, terms: Terms, timeout: float | None = None) -> None:
        super().__init__(key, lambda: session)
        self.grant = grant
        self.terms = terms
        self.timeout = session.commands.timeout if timeout is None else timeout

    def keep(self, lease: float, timeout: float | None = None) -> bool:
        """Let the lock last *lease* seconds from now. Return whether it was still there. Raise LockBackendFailed."""
        self.timeout = self.timeout if timeout is None else timeout
        # The beat differs from that of `taking`, 0. An entry that still has 0 was not renewed.
        return self.send(self.keeping(self.grant, replace(self.terms, lease=lease), beat=1)).held

    def give_up(self) -> None:
        """Remove the lock for good. After LockBackendFailed, the lock ends with its lease."""
        self.send(self.leaving(self.grant, TOMBSTONE_TTL))

    def send(self, steps: Protocol[Reply]) -> Reply:
        """Run steps without the commands of the session, because these would believe in grants that they renew."""
        return actions.run(steps, self._perform)

    def _perform(self, action: Any) -> Answer:
        session = self._session()
        call = (
            functools.partial(session.store.read, self._stored, action.grant)
            if isinstance(action, Read)
            else functools.partial(session.store.apply, self._stored, action.step)
        )
        return Answer(session.threads.off_main_thread(call, self.timeout, priority=REQUEST), 0.0, 0.0)


def leave_tombstone(session: Session, key: str, name: str) -> None:
    """Leave a tombstone with this *name* in the document of a key, in the background. No grant can have that name."""
    parked = Parked(session, key, name, Terms())

    def leave() -> bool:
        parked.send(parked.leaving(name, TOMBSTONE_TTL))
        return True

    session.background.repeat(leave, RELEASE_PAUSES)


def release_parked(session: Session, key: str, owner: str, lease: float) -> None:
    """Release the lock parked for *owner*, in the background, until there is an answer or *lease* seconds are over.

    A grant whose process has certainly ended counts as parked.
    """
    parked = Parked(session, key, "", Terms())

    def release() -> bool:
        holder = parked.send(parked.looking()).theirs
        if holder is not None and holder.get("owner") == owner and fate(str(holder.get("process"))) == "gone":
            parked.send(parked.leaving(holder["grant"], TOMBSTONE_TTL))
        return True

    session.background.repeat(release, RELEASE_PAUSES, lease)


def park(
    session: Session,
    key: str,
    terms: Terms,
    facts: Mapping[str, str | int],
    *,
    former: Grant | None = None,
    timeout: float | None = None,
) -> Parked | Reply:
    """Take the lock for the owner of *terms*, if the lock is free now. If not, return the answer about it.

    - former: grant whose place the new one takes.

    After LockBackendFailed, a lock that was taken ends with its lease.
    """
    if terms.owner is None:
        raise ValueError("a detached lock needs an owner, and the terms name none")
    name = secrets.token_hex(6)
    parked = Parked(session, key, f"{name}.1", terms, timeout)
    new = entry(parked.grant, name, terms, facts, process=NO_PROCESS)
    ttl = TOMBSTONE_TTL if former is not None and former.needs_tombstone() else 0
    try:
        reply = parked.send(parked.taking(new, "" if former is None else former.id, ttl))
    except LockError:
        raise
    except BaseException:  # a signal, after which the caller never gets the lock
        with contextlib.suppress(LockError):
            parked.give_up()
        raise
    return parked if reply.held else reply


def park_held(lock: MongoLock, terms: Terms, facts: Mapping[str, str | int]) -> Parked | None:
    """Park the grant of this lock, in one command, so that no other grant gets the lock in between. Release the lock.

    Return None if the lock had been lost before, or was taken away. After LockBackendFailed, the lock is released too.
    """
    own = lock._own
    session, grants = own.session, own.grants
    if session is None or len(grants) != 1:
        raise LockMisused("only a lock on one key that is acquired can be detached")
    (grant,) = grants
    # Mark it released first. From now on it is no loss if a renewal does not find the grant.
    if not (lock.held and grant.mark_released()):  # lost, or held by the parent of this forked child
        lock.release()
        return None
    try:
        parked = park(session, grant.key, terms, facts, former=grant)
        if isinstance(parked, Parked):
            session.ending.end(grant, EndReason.REPLACED)
        else:
            session.ending.not_found(grant, by_release=True)
    except BaseException:
        session.ending.end(grant, EndReason.ABANDONED, stays=True)
        raise
    finally:
        own.clear(grants)
    return parked if isinstance(parked, Parked) else None
