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
`Session.close` releases the remaining grants in bulk. A grant without an answer in time stays until its lease ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ...exceptions import LockError
from ..logs import DEBUG, WARNING, log
from ..protocol import procedures
from ..protocol.actions import FOREVER, Apply
from .bulk import batches, parts_of
from .commands import SHORTEST_COMMAND, Commands
from .core import BACKGROUND, RELEASE, SessionCore
from .grant import NOT_FOUND, Grant, OwnerRef, State
from .grant_registry import ForeignThread

#: Seconds until a failed removal is tried again.
TRY_AGAIN_AFTER: Final = 1.0
#: Seconds at exit until a failed batch is sent again unchanged.
AT_EXIT_PAUSE: Final = 0.05
#: The longest time for which an exit waits for a server that goes on answering, in seconds.
LONGEST_EXIT: Final = 30.0


class How(Enum):
    """The reason for the end of a grant: see the table of this module."""

    REFUSED = "refused"
    RELEASED = "released"
    REPLACED = "replaced"
    ABANDONED = "abandoned"
    LOST = "lost"


@dataclass(slots=True)
class Removal:
    """A grant that may still be in the document of its key, and the command that removes it.

    Times are by the session's clock.

    - was_granted: whether this process has held the grant.
    """

    action: Apply
    give_up: float
    try_at: float
    was_granted: bool = True


class Cleanup:
    """The removal of leftovers from documents, in the background and repeated until it succeeds.

    A leftover is a grant whose command got no answer, a grant of an interrupted caller, or a grant whose release an
    election has undone.

    - pending: removals that are not known to have succeeded, by grant id.
    """

    def __init__(self, session: SessionCore, commands: Commands) -> None:
        self.pending: dict[str, Removal] = {}
        self._session = session
        self._commands = commands
        #: The end of the time for all removals, set when the session is closed, and the latest end.
        self._end = self._latest = FOREVER
        #: The seconds by which a batch that is removed puts the end off.
        self._patience = 0.0
        #: The batches of `begin_to_finish` that may not be removed yet.
        self._unfinished: list[Sequence[Grant]] = []
        self._mutex = threading.Lock()

    def ensure_removed(self, grant: Grant, *, stays: bool = False) -> None:
        """Remove *grant*, whatever the outcome of its commands was. For *stays* see `procedures.removal_for_good`."""
        give_up = self._session.now() + grant.terms.server_lease + procedures.TOMBSTONE_TTL / 1000
        action = procedures.removal_for_good(grant.key, grant.id, stays=stays)
        self._add(grant.id, action, give_up, was_granted=grant.token > 0)
        self._session.heartbeat.see_to(self._session.now())

    def next_due(self) -> float:
        """Return the time of the next removal, or of the next look for an election."""
        times = [removal.try_at for removal in list(self.pending.values())]
        return min([*times, self._commands.releases.look_at])

    def do_due(self, now: float) -> None:
        """Have other threads make the removals that are due."""
        self._remove_due(now, BACKGROUND)
        if self._commands.releases.look_at <= now:
            self.repeat_releases()

    def _remove_due(self, now: float, priority: int) -> None:
        # copied in one operation: list() of items lets other threads in
        for grant_id, removal in self.pending.copy().items():
            if removal.try_at <= now:
                removal.try_at = FOREVER
                remove = functools.partial(self.remove, grant_id)
                if not self._session.threads.submit(remove, priority=priority, key=removal.action.key):
                    remove()

    def repeat_releases(self) -> None:
        """Release again what an election may have undone."""
        now = self._session.now()
        for release in self._commands.releases.undone(self._session.store.primary(), now):
            log(DEBUG, "released again after a failover", key=release.again.key)
            self._add(release.again.step.remove[0], release.again, now + procedures.TOMBSTONE_TTL / 1000)

    def remove(self, grant_id: str) -> None:
        """Try once to remove a grant."""
        removal = self.pending.get(grant_id)
        if removal is None:
            return
        key = removal.action.key
        try:
            self._commands.send(removal.action, self._for_one_command())
        except Exception as error:  # noqa: BLE001 - it is logged, and nothing else tries again
            if self._session.now() < removal.give_up:
                log(DEBUG, "removal postponed", key=key, error=error)
                removal.try_at = self._session.now() + TRY_AGAIN_AFTER
                self._session.heartbeat.see_to(removal.try_at)
                return
            log(WARNING, "removal given up, the lease ends by itself", key=key, error=error)
        # A hand-over without a receiver may have granted the key to a waiter of this process. No hand-over can follow
        # this removal.
        self._session.queue.wake_first_of(key)
        with self._mutex:
            if self.pending.get(grant_id) is removal:
                del self.pending[grant_id]

    def begin_to_finish(self, grants: Sequence[Grant], end: float) -> None:
        """Remove *grants*, holders and waiters, in bulk, and the pending removals beside them, until *end*.

        Each batch that is removed puts the end off, because a server that answers is worth waiting for.
        """
        now = self._session.now()
        self._end, self._patience, self._latest = end, end - now, now + LONGEST_EXIT
        for removal in list(self.pending.values()):
            removal.try_at = self._session.now()  # background calls wait behind the releases sent here
        for stays in (False, True):
            for batch in batches([grant for grant in grants if _stays(grant) is stays]):
                self._have_removed(batch)

    def finish(self) -> None:
        """Wait until all removals are done, or until the end that was set."""
        while (self._unfinished or self.pending) and (now := self._session.now()) < self._end:
            self._remove_due(now, RELEASE)
            time.sleep(0.005)
        left = [grant.key for batch in list(self._unfinished) for grant in batch if grant.token]
        left += [removal.action.key for removal in list(self.pending.values()) if removal.was_granted]
        if left:
            log(WARNING, "not released at exit, the leases end by themselves", key=left[0], grants=len(left))
        self.pending.clear()

    def _for_one_command(self) -> float:
        """Return the seconds that a command may take.

        At the end, that is a part of the time left. The command keeps a thread from others, and its document may be
        stuck.
        """
        return max(SHORTEST_COMMAND, (self._end - self._session.now()) / 4)

    def _for_batch(self, batch: Sequence[Grant]) -> float:
        """Return the seconds that the command for a batch may take: half of the patience, as long as it is large."""
        return self._for_one_command() if len(batch) == 1 else max(SHORTEST_COMMAND, self._patience / 2)

    def _have_removed(self, batch: Sequence[Grant]) -> None:
        """Have another thread remove a batch."""
        self._unfinished.append(batch)
        remove = functools.partial(self._remove_all, batch)
        if not self._session.threads.submit(remove, priority=RELEASE):
            remove()

    def _remove_all(self, batch: Sequence[Grant]) -> None:
        """Remove a batch. If that fails, send its parts or the same batch again, see `bulk`."""
        store, again = self._session.store, list[Sequence[Grant]]()
        primary = store.primary()
        try:
            left = self._with_others(batch)
            if left:
                step = procedures.removal([grant.id for grant in left], stays=_stays(left[0]))
                store.renew(sorted({grant.key for grant in left}), step, self._for_batch(left))
        except LockError as error:
            log(DEBUG, "release at exit failed", grants=len(batch), error=error)
            if self._session.now() >= self._end:
                return
            if not (again := parts_of(batch, store, primary)):
                time.sleep(AT_EXIT_PAUSE)
                again = [batch]
        else:
            self._end = max(self._end, min(self._latest, self._session.now() + self._patience))
        for each in again:
            self._have_removed(each)
        self._unfinished.remove(batch)

    def _with_others(self, batch: Sequence[Grant]) -> Sequence[Grant]:
        """Release the grants without another holder or waiter by the short command. Return the other grants."""
        alone = [grant for grant in batch if grant.token and not _stays(grant)]
        if not alone:
            return batch
        keys, ids = [grant.key for grant in alone], [grant.id for grant in alone]
        left = self._session.store.release_uncontended(keys, ids, self._for_batch(alone))
        return [grant for grant in batch if not grant.token or _stays(grant) or grant.key in left]

    def _add(self, grant_id: str, action: Apply, give_up: float, *, was_granted: bool = True) -> None:
        with self._mutex:
            self.pending[grant_id] = Removal(action, give_up, self._session.now(), was_granted)


class Ending:
    """The ends of the grants of a session. May be called from any thread."""

    def __init__(self, session: SessionCore, cleanup: Cleanup) -> None:
        self._session = session
        self._cleanup = cleanup

    def end(self, grant: Grant, how: How, *, stays: bool = False, noticed: bool = False, reason: str = "") -> None:
        """End *grant*. Stop its renewals, remove what may remain of it, and report the end once.

        - stays: whether an abandoned grant was held and its minimum hold has to last.
        - noticed: whether the session has noticed the end, rather than the caller.
        - reason: why a refused grant is no longer asked for.
        """
        if how is How.LOST and grant.state is not State.LOST:
            return  # another thread has just released the grant, and ends it
        if how is How.ABANDONED:
            grant.mark_released()
        was_known = self.forget(grant)
        # Only a copy of its command can remain of a grant that was taken away. The copy must not bring the grant back.
        if how is How.ABANDONED or (how is How.LOST and was_known and (grant.reason != NOT_FOUND or grant.in_doubt)):
            if self._session.pid != os.getpid():
                return
            self._cleanup.ensure_removed(grant, stays=stays)
        grant.owner_ref = None
        if how is How.REFUSED:
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
            self.end(grant, How.LOST, noticed=noticed)
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
        """See Chore. Orphans have no time of their own. The session looks for them whenever another task is due."""
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
                self._ending.end(grant, How.ABANDONED)

    def _clean_up(self, grant: Grant) -> None:
        """Do the clean-up in which a signal interrupted the caller."""
        if grant.owner_ref is None:
            return
        self._session.queue.leave(grant)
        was_held = grant.state is State.HELD
        if was_held:
            self._release(grant, "its lock object is gone")
        else:
            self._ending.end(grant, How.ABANDONED, stays=grant.state is State.RELEASED, noticed=True)
        # The caller may have left the line without waking the next.
        self._session.queue.wake_first(grant.line)
        if was_held:
            text = f"the lock {grant.key!r}, acquired at {grant.acquired_from}, was not released, and no code can now"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _release(self, grant: Grant, why: str) -> None:
        log(WARNING, f"lock released, {why}", key=grant.key, acquired=grant.acquired_from)
        self._ending.end(grant, How.ABANDONED, stays=True, noticed=True)


def _stays(grant: Grant) -> bool:
    """Return whether *grant* was held and its minimum hold has to last."""
    return grant.token > 0 and grant.terms.min_hold > 0


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
