"""The end of a grant. `Ending.end` is the one function that ends grants.

The reasons, who reports each, and what may remain in the document:

- REFUSED: reported by the caller, who stops waiting. Nothing remains. If that is uncertain, ABANDONED comes first.
- RELEASED: reported by the caller. The caller's command has removed the grant. Nothing remains unless an election
  undoes the removal, see `releases`.
- REPLACED: reported by the caller. The caller's command has put another grant in its place (a downgrade, a parked
  lock).
- ABANDONED: reported by the caller, or by the heartbeat if no caller is left. The outcome is unknown. The grant may be
  in the document, or a command that adds the grant may be on its way. `Cleanup` removes it in the background.
- LOST: reported by the first reader of `Grant.held` after the deadline, at the latest by the heartbeat, or by a command
  that should have found the grant. If the grant was taken away, only a copy of its own command may remain. Otherwise
  the grant itself may remain. `Cleanup` removes either.

An end may be reported again, also after one with another reason. Only the first report counts. When the process ends,
`Session.close` removes the remaining grants in bulk. A grant without an answer in time stays until its lease ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..logs import DEBUG, WARNING, log
from ..protocol import procedures
from ..protocol.actions import FOREVER
from .background import Task
from .commands import Commands
from .core import SessionCore
from .grant import NOT_FOUND, Grant, OwnerRef, State
from .grant_registry import ForeignThread

#: Seconds before each attempt to remove a leftover.
REMOVAL_PAUSES: Final = (0.0, 1.0)


class EndReason(Enum):
    """The reason for the end of a grant: see the table of this module."""

    REFUSED = "refused"
    RELEASED = "released"
    REPLACED = "replaced"
    ABANDONED = "abandoned"
    LOST = "lost"


@dataclass(slots=True, eq=False, kw_only=True)
class Leftover(Task):
    """A grant that may still be in the document of its key.

    - stays: whether its minimum hold has to last.
    - was_granted: whether this process has held the grant.
    """

    key: str
    grant: str
    stays: bool
    was_granted: bool


class Cleanup:
    """The removal of leftovers from documents, in the background and repeated until it succeeds.

    A leftover is a grant whose command got no answer, a grant of an interrupted caller, a grant whose release an
    election has undone, or a grant at the end of the process.
    """

    def __init__(self, session: SessionCore, commands: Commands) -> None:
        self._session = session
        self._commands = commands
        #: The grants that the end of the process removes.
        self._at_exit: set[str] = set()

    def ensure_removed(self, grant: Grant, *, stays: bool = False, at_exit: bool = False) -> None:
        """Remove *grant*, whatever the outcome of its commands was.

        If a command that adds the grant may still arrive, the removal needs a tombstone, and thus a command of its own.
        """
        if grant.id in self._at_exit:
            return
        if at_exit:
            self._at_exit.add(grant.id)
        was_granted = grant.token > 0
        in_bulk = (was_granted or (at_exit and grant.lease.until > 0)) and not grant.in_doubt
        stays = stays and grant.terms.min_hold > 0
        give_up = grant.terms.server_lease + procedures.TOMBSTONE_TTL / 1000
        self._add(grant.key, grant.id, give_up, stays=stays, was_granted=was_granted, in_bulk=in_bulk)

    def _add(
        self, key: str, grant: str, seconds: float, *, stays: bool = False, was_granted: bool = True, in_bulk: bool
    ) -> None:
        """Have a leftover removed. Give it up after that number of seconds without an answer."""
        now = self._session.now()
        leftover = Leftover(
            attempt=self._remove,
            pauses=REMOVAL_PAUSES,
            give_up=now + seconds,
            due=now,
            group=("removal", stays, was_granted) if in_bulk else None,
            key=key,
            grant=grant,
            stays=stays,
            was_granted=was_granted,
        )
        self._session.background.add(leftover)

    def next_due(self) -> float:
        """Return the time of the next look for an election."""
        return self._commands.releases.look_at

    def do_due(self, now: float) -> None:
        """See `PeriodicTask`."""
        if self._commands.releases.look_at <= now:
            self.repeat_releases()

    def repeat_releases(self) -> None:
        """Release again what an election may have undone."""
        for release in self._commands.releases.undone(self._session.store.primary(), self._session.now()):
            log(DEBUG, "released again after a failover", key=release.key)
            self._add(release.key, release.grant, procedures.TOMBSTONE_TTL / 1000, in_bulk=True)

    def _remove(self, leftovers: Sequence[Leftover], limit: float) -> Collection[Leftover]:
        """Remove leftovers of one group in at most *limit* seconds."""
        left = self._with_others(leftovers, limit)
        if len(left) == 1:
            self._commands.send(procedures.removal_for_good(left[0].key, left[0].grant, stays=left[0].stays), limit)
        elif left:
            step = procedures.removal([each.grant for each in left], stays=left[0].stays)
            self._session.store.renew(sorted({each.key for each in left}), step, min(limit, self._commands.timeout))
        if self._session.background.end == FOREVER:
            # A hand-over without a receiver may have granted a key to a waiter of this process. No hand-over can follow
            # this removal.
            self._session.queue.wake_first_of({each.key for each in leftovers})
        return ()

    def _with_others(self, leftovers: Sequence[Leftover], limit: float) -> Sequence[Leftover]:
        """Release the grants without another holder or waiter by the short command. Return the other grants.

        An election may undo these releases. This is only done at exit, where the time is short.
        """
        first = leftovers[0]
        if self._session.background.end == FOREVER or first.group is None or first.stays or not first.was_granted:
            return leftovers
        keys, ids = [each.key for each in leftovers], [each.grant for each in leftovers]
        left = self._session.store.release_uncontended(keys, ids, limit)
        return [each for each in leftovers if each.key in left]

    def finish(self) -> None:
        """Wait for the removals of `Background.begin_to_finish`, and report those that have not succeeded."""
        background = self._session.background
        background.finish()
        left = [task.key for task in background.pending.copy() if isinstance(task, Leftover) and task.was_granted]
        if left:
            log(WARNING, "not released at exit, the leases end by themselves", key=left[0], grants=len(left))
        background.pending.clear()


class Ending:
    """The ends of the grants of a session. May be called from any thread."""

    def __init__(self, session: SessionCore, cleanup: Cleanup) -> None:
        self._session = session
        self._cleanup = cleanup

    def end(
        self, grant: Grant, how: EndReason, *, stays: bool = False, noticed: bool = False, reason: str = ""
    ) -> None:
        """End *grant*. Stop its renewals, remove what may remain of it, and report the end once.

        - stays: whether an abandoned grant was held and its minimum hold has to last.
        - noticed: whether the session has noticed the end, rather than the caller.
        - reason: why a refused grant is no longer asked for.
        """
        if how is EndReason.LOST and grant.state is not State.LOST:
            return  # another thread has just released the grant, and ends it
        if how is EndReason.ABANDONED:
            grant.mark_released()
        was_known = self.forget(grant)
        # Only a copy of its command can remain of a grant that was taken away. The copy must not bring the grant back.
        may_remain = was_known and (grant.reason != NOT_FOUND or grant.in_doubt)
        if how is EndReason.ABANDONED or (how is EndReason.LOST and may_remain):
            if self._session.pid != os.getpid():
                return
            self._cleanup.ensure_removed(grant, stays=stays)
        grant.owner_ref = None
        if how is EndReason.REFUSED:
            self._session.notifications.report_not_acquired(grant, reason, self._session.now() - grant.waiting.began)
        else:
            self._session.notifications.report_end(grant, noticed=noticed)

    def forget(self, grant: Grant) -> bool:
        """Stop the renewals of *grant*, and let the next of its line ask. Return whether it was renewed until now."""
        was_held = self._session.registry.by_line.get(grant.line) is grant
        known = self._session.registry.remove(grant)
        if was_held and grant.line in self._session.queue.lines:
            self._session.queue.wake_first(grant.line)
        return known

    def not_found(self, grant: Grant, *, by_release: bool = False, noticed: bool = False) -> bool:
        """End a *grant* that a command should have found in its document. Return whether the loss is news.

        - by_release: whether the command was the release of the grant. If so, the grant is not held any more.
        """
        if is_news := grant.mark_lost(NOT_FOUND, by_release=by_release):
            self.end(grant, EndReason.LOST, noticed=noticed)
        return is_news


class Orphans:
    """The detection and release of grants that no code can release any more.

    These are the grants of lock objects that were garbage-collected, of threads that have ended, and those whose
    clean-up a signal interrupted. No lock object has a `__del__`, because Python swallows exceptions of signal handlers
    there and a task would outlive its soft time limit.
    """

    def __init__(self, session: SessionCore, ending: Ending) -> None:
        self._session = session
        self._ending = ending

    def adopt(self, owner_ref: OwnerRef) -> None:
        """Release the grant whose owner is gone. Called by the heartbeat."""
        if (grant := getattr(owner_ref, "grant", None)) is not None:  # a signal may strike before the attribute is set
            self._clean_up(grant)

    def next_due(self) -> float:
        """See PeriodicTask. Orphans have no time of their own, and are looked for whenever another task is due."""
        return float("inf")

    def do_due(self, now: float) -> None:
        """Find the orphans that no reference has reported."""
        for grant in list(self._session.registry.grants.values()):
            if (owner_ref := grant.owner_ref) is not None and owner_ref() is None:
                self._clean_up(grant)
            elif (grant.held and _has_ended(grant.worker)) or _has_ended(grant.releaser):
                self._release(grant, "its thread or event loop has ended")
        for grant in list(self._session.queue.waiting.values()):
            if _has_ended(grant.worker):
                self._session.queue.leave(grant)
                self._ending.end(grant, EndReason.ABANDONED)

    def _clean_up(self, grant: Grant) -> None:
        """Do the clean-up in which a signal interrupted the caller."""
        if grant.owner_ref is None:
            return
        self._session.queue.leave(grant)
        was_held = grant.state is State.HELD
        if was_held:
            self._release(grant, "its lock object is gone")
        else:
            self._ending.end(grant, EndReason.ABANDONED, stays=grant.state is State.RELEASED, noticed=True)
        # The caller may have left the line without waking the next.
        self._session.queue.wake_first(grant.line)
        if was_held:
            text = f"the lock {grant.key!r}, acquired at {grant.acquired_from}, was not released, and no code can now"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _release(self, grant: Grant, why: str) -> None:
        log(WARNING, f"lock released, {why}", key=grant.key, acquired=grant.acquired_from)
        self._ending.end(grant, EndReason.ABANDONED, stays=True, noticed=True)


def _has_ended(worker: object) -> bool:
    """Return whether *worker* is a thread that has ended, or a task whose event loop is closed.

    The main thread counts as running. When the interpreter exits and the main thread ends, `close` releases.
    """
    if isinstance(worker, ForeignThread):
        return worker() is None
    if isinstance(worker, weakref.ref):
        task = worker()
        return isinstance(task, asyncio.Task) and task.get_loop().is_closed()
    return isinstance(worker, threading.Thread) and worker is not threading.main_thread() and not worker.is_alive()
