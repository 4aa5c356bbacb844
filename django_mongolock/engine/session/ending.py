"""The end of a grant: the one function by which a session is through with it, `Ending.end`.

How a grant ends, who says so, and what may be left of it in the document then:

- REFUSED: its caller, who waits for it no more. Nothing is left; where that is not known, ABANDONED comes first.
- RELEASED: its caller, whose command has removed it. Nothing is left, unless an election undoes that: see `releases`.
- REPLACED: its caller, whose command has put another grant in its place: a downgrade, a parked lock.
- ABANDONED: its caller, or the heartbeat where no caller is left, and it is not known how it stands. It may be there,
  or a command that adds it on its way: `Cleanup` sees to it in the background that it is gone.
- LOST: whoever first reads `Grant.held` when the deadline is over, the heartbeat at the latest; or a command that
  should have found it. Where it was taken away, only a copy of its own command may be left; else the grant. `Cleanup`
  removes either.

Each may come again, also after another one: the end is reported once. When the process ends, `Session.close` releases
in bulk what is left, and what had no answer in time stays until its lease ends.
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

#: How long to wait before a grant is removed again where that failed, in seconds.
TRY_AGAIN_AFTER: Final = 1.0
#: How long to wait at exit before a batch is sent again as it is, in seconds.
AT_EXIT_PAUSE: Final = 0.05
#: The longest time for which an exit waits for a server that goes on answering, in seconds.
LONGEST_EXIT: Final = 30.0


class How(Enum):
    """How a grant ends: see the table of this module."""

    REFUSED = "refused"
    RELEASED = "released"
    REPLACED = "replaced"
    ABANDONED = "abandoned"
    LOST = "lost"


@dataclass(slots=True)
class Removal:
    """A grant that may still be in the document of its key, and the command that ends it. Times by the session's
    clock. was_granted: whether this process has held it."""

    action: Apply
    give_up: float
    try_at: float
    was_granted: bool = True


class Cleanup:
    """Ensures that what may have been left in a document is removed: in the background, and again until it succeeds.

    Left may be a grant whose command got no answer, or that was given up by a caller that was interrupted; and one
    whose release an election has undone. pending: the removals that are not known to have succeeded, by grant id.
    """

    def __init__(self, session: SessionCore, commands: Commands) -> None:
        self.pending: dict[str, Removal] = {}
        self._session = session
        self._commands = commands
        #: Until when everything has to be removed: the session is being closed.
        self._end = self._latest = FOREVER
        self._patience = 0.0
        #: The batches of `begin_to_finish` that are not known to be removed.
        self._unfinished: list[Sequence[Grant]] = []
        self._mutex = threading.Lock()

    def ensure_removed(self, grant: Grant, *, stays: bool = False) -> None:
        """Remove it, whatever became of the commands for it. stays: see `procedures.removal_for_good`."""
        give_up = self._session.now() + grant.terms.server_lease + procedures.TOMBSTONE_TTL / 1000
        action = procedures.removal_for_good(grant.key, grant.id, stays=stays)
        self._add(grant.id, action, give_up, was_granted=grant.token > 0)
        self._session.heartbeat.see_to(self._session.now())

    def next_due(self) -> float:
        """When a removal is to be tried, or an election to be looked for."""
        times = [removal.try_at for removal in list(self.pending.values())]
        return min([*times, self._commands.releases.look_at])

    def do_due(self, now: float) -> None:
        """Have what is due removed by other threads."""
        self._remove_due(now, BACKGROUND)
        if self._commands.releases.look_at <= now:
            self.repeat_releases()

    def _remove_due(self, now: float, priority: int) -> None:
        for grant_id, removal in self.pending.copy().items():  # copied at once: list() of items lets other threads in
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
        """Try once to have a grant removed."""
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
        # A hand-over that nobody passes on may have granted it to a waiter of this process; none can come after this.
        self._session.queue.wake_first_of(key)
        with self._mutex:
            if self.pending.get(grant_id) is removal:
                del self.pending[grant_id]

    def begin_to_finish(self, grants: Sequence[Grant], end: float) -> None:
        """Have *grants*, holders and waiters, removed in bulk, and what is pending, side by side, until *end*.

        Each batch that is removed puts the end off, because a server that answers is worth waiting for.
        """
        now = self._session.now()
        self._end, self._patience, self._latest = end, end - now, now + LONGEST_EXIT
        for removal in list(self.pending.values()):
            removal.try_at = self._session.now()  # those in the background wait behind all that is released here
        for stays in (False, True):
            for batch in batches([grant for grant in grants if _stays(grant) is stays]):
                self._have_removed(batch)

    def finish(self) -> None:
        """Wait until all is removed, or the end that was set is over."""
        while (self._unfinished or self.pending) and (now := self._session.now()) < self._end:
            self._remove_due(now, RELEASE)
            time.sleep(0.005)
        left = [grant.key for batch in list(self._unfinished) for grant in batch if grant.token]
        left += [removal.action.key for removal in list(self.pending.values()) if removal.was_granted]
        if left:
            log(WARNING, "not released at exit, the leases end by themselves", key=left[0], grants=len(left))
        self.pending.clear()

    def _for_one_command(self) -> float:
        """How many seconds a command may take: at the end a part of what is left, since it keeps a thread from others,
        and its document may be stuck."""
        return max(SHORTEST_COMMAND, (self._end - self._session.now()) / 4)

    def _for_batch(self, batch: Sequence[Grant]) -> float:
        """Return the seconds that the command for a batch may take: half of the patience, as long as it is large."""
        return self._for_one_command() if len(batch) == 1 else max(SHORTEST_COMMAND, self._patience / 2)

    def _have_removed(self, batch: Sequence[Grant]) -> None:
        """Have a batch removed by another thread."""
        self._unfinished.append(batch)
        remove = functools.partial(self._remove_all, batch)
        if not self._session.threads.submit(remove, priority=RELEASE):
            remove()

    def _remove_all(self, batch: Sequence[Grant]) -> None:
        """Remove a batch. If that fails, send its parts, or the same again: see `bulk`."""
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
        """Release those without another holder or waiter, by the short command. Return the others."""
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
    """Ends the grants of a session. May be called from any thread."""

    def __init__(self, session: SessionCore, cleanup: Cleanup) -> None:
        self._session = session
        self._cleanup = cleanup

    def end(self, grant: Grant, how: How, *, stays: bool = False, noticed: bool = False, reason: str = "") -> None:
        """Be through with *grant*: renew it no more, have removed what may be left of it, and report it once.

        stays: an abandoned one was held, and its minimum hold is to last. noticed: the session has noticed the end,
        rather than the caller. reason: why a refused one is not asked for any more.
        """
        if how is How.LOST and grant.state is not State.LOST:
            return  # another thread has just released it, and sees to it
        if how is How.ABANDONED:
            grant.mark_released()
        was_known = self.forget(grant)
        # Of a lost grant that was taken away, only a copy of its command can be left: that must not bring it back.
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
        """Renew it no more, and let the next of its line ask. Return whether it was renewed until now."""
        was_held = self._session.registry.by_line.get(grant.line) is grant
        known = self._session.registry.remove(grant)
        if was_held and grant.line in self._session.queue.lines:
            self._session.queue.wake_first(grant.line)
        return known

    def not_found(self, grant: Grant, *, by_release: bool = False, noticed: bool = False) -> bool:
        """End *grant*, which a command should have found in its document. Return whether that it is lost is news.

        by_release: it was the command that was to release it, so the grant is not held any more.
        """
        if is_news := grant.mark_lost(NOT_FOUND, by_release=by_release):
            self.end(grant, How.LOST, noticed=noticed)
        return is_news


class Orphans:
    """Finds grants that no code can release any more, and releases them.

    These are the grants of lock objects that were garbage-collected, of threads that have ended, and those whose
    clean-up a signal interrupted. No lock object has a `__del__`: Python swallows what a signal handler raises there,
    and a task would outlive its soft time limit.
    """

    def __init__(self, session: SessionCore, ending: Ending) -> None:
        self._session = session
        self._ending = ending

    def adopt(self, owner_ref: OwnerRef) -> None:
        """Release what its owner has dropped. Called by the heartbeat."""
        if (grant := getattr(owner_ref, "grant", None)) is not None:  # a signal may strike before it is set
            self._clean_up(grant)

    def next_due(self) -> float:
        """See Chore. Nothing here has a time of its own: it is looked for whenever something else is due."""
        return float("inf")

    def do_due(self, now: float) -> None:
        """Find those that nothing has reported."""
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
    """Return whether *grant* was held, and its minimum hold is to last."""
    return grant.token > 0 and grant.terms.min_hold > 0


def _has_ended(worker: object) -> bool:
    """Whether it is a thread that has ended, or a task whose event loop is closed.

    The main thread has ended when the interpreter exits; then `close` releases.
    """
    if isinstance(worker, ForeignThread):
        return worker() is None
    if isinstance(worker, weakref.ref):
        task = worker()
        return isinstance(task, asyncio.Task) and task.get_loop().is_closed()
    return isinstance(worker, threading.Thread) and worker is not threading.main_thread() and not worker.is_alive()
