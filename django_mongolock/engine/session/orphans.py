"""Releases what no code can release any more.

These are the grants of lock objects that were garbage-collected, of threads that have ended, and those whose clean-up
a signal interrupted. No lock object has a `__del__`: Python swallows what a signal handler raises there, and a task
would outlive its soft time limit.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
import weakref

from ..logs import WARNING, log
from .ending import ABANDONED, Ending
from .grant import Grant, OwnerRef, State
from .grant_registry import ForeignThread
from .shared import Shared


class Orphans:
    """Finds such grants and releases them."""

    def __init__(self, session: Shared, ending: Ending) -> None:
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
                self._ending.end(grant, ABANDONED, noticed=True)

    def _clean_up(self, grant: Grant) -> None:
        """Do the clean-up in which a signal interrupted the caller."""
        if grant.owner_ref is None:
            return
        self._session.queue.leave(grant)
        was_held = grant.state is State.HELD
        if was_held:
            self._release(grant, "its lock object is gone")
        else:
            self._ending.end(grant, ABANDONED, stays=grant.state is State.RELEASED, noticed=True)
        # The caller may have left the line without waking the next.
        self._session.queue.wake_first(grant.line)
        if was_held:
            text = f"the lock {grant.key!r}, acquired at {grant.acquired_from}, was not released, and no code can now"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _release(self, grant: Grant, why: str) -> None:
        log(WARNING, f"lock released, {why}", key=grant.key, acquired=grant.acquired_from)
        self._ending.end(grant, ABANDONED, stays=True, noticed=True)


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
