"""Releases what no code can release any more.

These are the grants of lock objects that were garbage-collected, of threads that have ended, and those whose clean-up
a signal interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ..grant import Grant, OwnerRef, State
from ..logs import WARNING, log
from .grant_registry import GrantRegistry
from .local_queue import LocalQueue


class Orphans:
    """Finds such grants and releases them.

    put: takes them to the heartbeat, which has them adopted here. abandon: has a grant removed in the background.
    """

    def __init__(
        self,
        registry: GrantRegistry,
        queue: LocalQueue,
        put: Callable[[Grant | OwnerRef], object],
        abandon: Callable[..., object],
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._put = put
        self._abandon = abandon

    def drop(self, grants: Iterable[Grant], user: int) -> None:
        """A lock object is gone, and its grants were not released. Called by the garbage collector, so anywhere: takes
        no lock and waits for nothing."""
        for grant in grants:
            grant.unshare(user)
            if not grant.users and grant.state is State.HELD:
                self._put(grant)

    def adopt(self, dropped: Grant | OwnerRef) -> None:
        """Release what was dropped. Called by the heartbeat."""
        if isinstance(dropped, OwnerRef):
            if (grant := getattr(dropped, "grant", None)) is not None:  # a signal may strike before it is set
                self._clean_up(grant)
        elif not dropped.users and dropped.state is State.HELD:
            self._release(dropped, "its lock object is gone")

    def next_due(self) -> float:
        """See Chore. Nothing here has a time of its own: it is looked for whenever something else is due."""
        return float("inf")

    def do_due(self, now: float) -> None:
        """Find those that nothing has reported."""
        for grant in list(self._registry.grants.values()):
            if (owner_ref := grant.owner_ref) is not None and owner_ref() is None:
                self._clean_up(grant)
            elif grant.state is State.HELD and grant.held and _has_ended(grant.worker):
                self._release(grant, "its thread has ended")

    def _clean_up(self, grant: Grant) -> None:
        """Do the clean-up in which a signal interrupted the caller."""
        if grant.owner_ref is None:
            return
        self._queue.leave(grant)
        if grant.state is State.HELD:
            self._release(grant, "nothing refers to it any more")
        else:
            self._abandon(grant)
        # The caller may have left the line without waking the next.
        self._queue.wake_first(grant.line)

    def _release(self, grant: Grant, why: str) -> None:
        log(WARNING, f"lock released, {why}", key=grant.key, acquired=grant.acquired_from)
        self._abandon(grant, stays=True)


def _has_ended(worker: object) -> bool:
    """Whether it is a thread that has ended. The main thread has when the interpreter exits; then `close` releases."""
    return isinstance(worker, threading.Thread) and worker is not threading.main_thread() and not worker.is_alive()
