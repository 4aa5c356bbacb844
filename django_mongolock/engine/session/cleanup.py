"""Ensures that what may have been left in a document is removed: in the background, and again until it succeeds.

Left may be a grant whose command got no answer, or that was given up by a caller that was interrupted; and one whose
release an election has undone.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...exceptions import LockError
from ..logs import DEBUG, WARNING, log
from ..protocol import procedures
from ..protocol.actions import FOREVER, Apply
from .commands import SHORTEST_COMMAND, Commands
from .grant import Grant
from .shared import BACKGROUND, RELEASE, Shared

#: How long to wait before a grant is removed again where that failed, in seconds.
TRY_AGAIN_AFTER: Final = 1.0
#: How many locks one command releases at exit, and in how many parts that is done again if it fails.
AT_EXIT_BATCH, AT_EXIT_PARTS = 1_000, 10


@dataclass(slots=True)
class Removal:
    """A grant that may still be in the document of its key, and the command that ends it. Times by the session's
    clock."""

    action: Apply
    give_up: float
    try_at: float


class Cleanup:
    """Removes grants. pending: the removals that are not known to have succeeded, by grant id."""

    def __init__(self, session: Shared, commands: Commands) -> None:
        self.pending: dict[str, Removal] = {}
        self._session = session
        self._commands = commands
        #: One for each command of `finish` that has not ended.
        self._unfinished: list[None] = []
        self._mutex = threading.Lock()

    def ensure_removed(self, grant: Grant, *, stays: bool = False) -> None:
        """Remove it, whatever became of the commands for it. stays: see `procedures.removal_for_good`."""
        give_up = self._session.now() + grant.terms.server_lease + procedures.TOMBSTONE_TTL / 1000
        self._add(grant.id, procedures.removal_for_good(grant.key, grant.id, stays=stays), give_up)
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
            self._commands.send(removal.action)
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

    def finish(self, held: Sequence[Grant], end: float) -> None:
        """Release what is *held*, in bulk, and remove what is pending, side by side, until *end*."""
        self._have_released([grant for grant in held if not grant.terms.min_hold], AT_EXIT_BATCH, end)
        self._have_released([grant for grant in held if grant.terms.min_hold], 1, end)
        while (self._unfinished or self.pending) and (now := self._session.now()) < end:
            self._remove_due(now, RELEASE)
            time.sleep(0.005)
        for removal in list(self.pending.values()):
            log(WARNING, "not released at exit, its lease ends by itself", key=removal.action.key)
        self.pending.clear()

    def _have_released(self, held: Sequence[Grant], size: int, end: float) -> None:
        """Have grants released by other threads, *size* of them in one command."""
        if size == 1:
            for grant in held:
                self._add(grant.id, procedures.releasing(grant.key, grant.id, stays=grant.terms.min_hold > 0), end)
            return
        for start in range(0, len(held), size):
            self._unfinished.append(None)
            release = functools.partial(self._release_all, held[start : start + size], end)
            if not self._session.threads.submit(release, priority=RELEASE):
                release()

    def _release_all(self, held: Sequence[Grant], end: float) -> None:
        """Release grants in one command. If that fails, a part of them each, which leaves out what is stuck."""
        keys, ids = [grant.key for grant in held], [grant.id for grant in held]
        try:
            timeout = max(SHORTEST_COMMAND, (end - self._session.now()) / 4)
            left = self._session.store.release_uncontended(keys, ids, timeout)
            self._have_released([grant for grant in held if grant.key in left], 1, end)
        except LockError:
            self._have_released(held, -(-len(held) // AT_EXIT_PARTS), end)
        finally:
            self._unfinished.pop()

    def _add(self, grant_id: str, action: Apply, give_up: float) -> None:
        with self._mutex:
            self.pending[grant_id] = Removal(action, give_up, self._session.now())
