"""Locks that no process keeps alive: they are held for an owner, who takes them up later, perhaps elsewhere.

The steps are those of everything that no process renews: parked locks, the claims of `claims`, and edit locks.

A parked lock is an entry like any other whose process is `processes.NO_PROCESS`, so that the next who asks in the name
of its owner resumes it. It is not renewed: it lasts for as long as its lease says.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...exceptions import LockError, LockMisused
from ..protocol.procedures import TOMBSTONE_TTL
from ..protocol.processes import NO_PROCESS
from ..rule.document import Terms, entry, milliseconds
from ..rule.replies import Reply
from ..rule.step import Step
from ..store.base import Store
from .lock import MongoLock


def taking(new: dict[str, Any], former: str = "") -> Step:
    """Take the lock with this entry, if it is free; or from *former*, a grant whose place it takes."""
    step = Step(ask=new["grant"], add=new, trial=True)
    return replace(step, remove=(former,), force=True, resumes=True) if former else step


def keeping(grant: str, terms: Terms, beat: int = 0) -> Step:
    """Let a grant last for a whole lease from now."""
    lease, server_lease = milliseconds(terms.lease), milliseconds(terms.server_lease)
    return Step(ask=grant, renew=(grant,), lease=lease, server_lease=server_lease, beat=beat)


def leaving(grant: str, tombstone_ttl: int) -> Step:
    """See to it that a grant is gone, also one whose command is still on its way."""
    return Step(ask=grant, remove=(grant,), force=True, tombstone_ttl=tombstone_ttl)


@dataclass(frozen=True, slots=True)
class Parked:
    """A lock that waits for its owner."""

    store: Store
    key: str
    grant: str
    terms: Terms

    def keep(self, lease: float, timeout: float = 5.0) -> bool:
        """Let it last *lease* seconds from now; return whether it was still there. Raises LockBackendFailed.

        By the server's clock alone: no process believes to hold what is parked.
        """
        step = keeping(self.grant, replace(self.terms, lease=lease), beat=1)
        return self.store.apply(self.key, step, timeout).held

    def give_up(self, timeout: float = 5.0) -> None:
        """See to it that it is gone. Raises LockBackendFailed: then it ends with its lease."""
        self.store.apply(self.key, leaving(self.grant, TOMBSTONE_TTL), timeout)


def park(
    store: Store, key: str, terms: Terms, facts: Mapping[str, str | int], *, former: str = "", timeout: float = 5.0
) -> Parked | Reply:
    """Take the lock for the owner of *terms*, if it is free now; if it is not, return what is known of it.

    former: a grant whose place it takes. Raises LockBackendFailed; what was taken then ends with its lease.
    """
    if terms.owner is None:
        raise ValueError("a detached lock needs an owner, and the terms name none")
    session = secrets.token_hex(6)
    new = entry(f"{session}.1", session, terms, facts, process=NO_PROCESS)
    parked = Parked(store, key, new["grant"], terms)
    reply = store.apply(key, taking(new, former), timeout)
    return parked if reply.held else reply


def park_held(lock: MongoLock, terms: Terms, facts: Mapping[str, str | int]) -> Parked | None:
    """Park what this lock holds, in one command, so that no other grant gets it in between; the lock is then released.

    None if it had been lost before, or was taken away. Raises LockBackendFailed; the lock is then released as well.
    """
    own = lock._own
    session, grants = own.session, own.grants
    if session is None or len(grants) != 1:
        raise LockMisused("only a lock on one key that is acquired can be detached")
    (grant,) = grants
    if not lock.held:  # lost, or a parent's, which is not ours to park
        lock.release()
        return None
    try:
        parked = park(session.store, grant.key, terms, facts, former=grant.id, timeout=session.command_timeout)
    except LockError:
        lock.release()
        raise
    if not isinstance(parked, Parked):
        lock.release()
        return None
    own.hand_over(session)
    return parked
