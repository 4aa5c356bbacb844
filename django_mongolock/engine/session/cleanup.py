"""Ensures that what may have been left in a document is removed: in the background, and again until it succeeds.

Left may be a grant whose command got no answer, or that was given up by a caller that was interrupted; and one whose
release an election has undone.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Final

from .. import protocol
from ..actions import Apply
from ..grant import Grant
from ..logs import DEBUG, WARNING, log
from .commands import Commands
from .worker_threads import WorkerThreads

#: Threads that remove grants: a thousand of these must not keep a command of the program waiting.
CLEANUP_THREADS: Final = 4
#: How long to wait before a grant is removed again where that failed, in seconds.
TRY_AGAIN_AFTER: Final = 1.0


@dataclass(slots=True)
class Removal:
    """A grant that may still be in the document of its key, and the command that ends it. Times by the session's
    clock."""

    action: Apply
    give_up: float
    try_at: float


class Cleanup:
    """Removes grants. pending: the removals that are not known to have succeeded, by grant id."""

    def __init__(self, commands: Commands) -> None:
        self.pending: dict[str, Removal] = {}
        self._commands = commands
        self._now = commands.now
        self._threads = WorkerThreads(CLEANUP_THREADS)
        self._mutex = threading.Lock()

    def ensure_removed(self, grant: Grant, *, stays: bool = False) -> None:
        """Remove it, whatever became of the commands that were sent for it. stays: see `protocol.removal_for_good`."""
        give_up = self._now() + grant.terms.server_lease + protocol.TOMBSTONE_TTL / 1000
        self._add(grant.id, protocol.removal_for_good(grant.key, grant.id, stays=stays), give_up)
        self._commands.heartbeat.see_to(self._now())

    def next_due(self) -> float:
        """When a removal is to be tried, or an election to be looked for."""
        times = [removal.try_at for removal in list(self.pending.values())]
        return min([*times, self._commands.releases.look_at])

    def do_due(self, now: float) -> None:
        """Have what is due removed by other threads."""
        for grant_id, removal in self.pending.copy().items():  # copied at once: list() of items lets other threads in
            if removal.try_at <= now:
                under_way = self._threads.submit(functools.partial(self.remove, grant_id))
                removal.try_at = float("inf") if under_way else now + TRY_AGAIN_AFTER
        if self._commands.releases.look_at <= now:
            self.repeat_releases()

    def repeat_releases(self) -> None:
        """Release again what an election may have undone."""
        now = self._now()
        for release in self._commands.releases.undone(self._commands.store.primary(), now):
            log(DEBUG, "released again after a failover", key=release.again.key)
            self._add(release.again.step.remove[0], release.again, now + protocol.TOMBSTONE_TTL / 1000)

    def remove(self, grant_id: str) -> None:
        """Try once to have a grant removed."""
        removal = self.pending.get(grant_id)
        if removal is None:
            return
        key = removal.action.key
        try:
            self._commands.send(removal.action)
        except Exception as error:  # noqa: BLE001 - it is logged, and nothing else tries again
            if self._now() < removal.give_up:
                log(DEBUG, "removal postponed", key=key, error=error)
                removal.try_at = self._now() + TRY_AGAIN_AFTER
                self._commands.heartbeat.see_to(removal.try_at)
                return
            log(WARNING, "removal given up, the lease ends by itself", key=key, error=error)
        with self._mutex:
            if self.pending.get(grant_id) is removal:
                del self.pending[grant_id]

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _add(self, grant_id: str, action: Apply, give_up: float) -> None:
        with self._mutex:
            self.pending[grant_id] = Removal(action, give_up, self._now())
