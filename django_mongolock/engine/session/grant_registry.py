"""The grants of one process: by id while they are kept alive, and by the thread or task that holds them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .grant import Grant, LineKey
from .heartbeat import Heartbeat

_NONE: Final[Mapping[str, Grant]] = MappingProxyType({})


class GrantRegistry:
    """Finds grants. May be called from any thread.

    grants: those that stand in a document, or may soon, by id: they are renewed. by_line: those that are held
    exclusively, by the line that waits for them.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.grants: dict[str, Grant] = {}
        self.by_line: dict[LineKey, Grant] = {}
        self._heartbeat = heartbeat
        self._by_worker: dict[object, dict[str, Grant]] = {}
        self._mutex = threading.Lock()

    def held_by(self, worker: object) -> Mapping[str, Grant]:
        """What this thread or task holds, by key."""
        return self._by_worker.get(worker, _NONE)

    def add(self, grant: Grant) -> None:
        """Add a grant that is about to be asked for: from now on its place in the queue is renewed."""
        # It may have stood in line for long before, without any renewal.
        grant.lease.renew_at = max(grant.lease.renew_at, self._heartbeat.now() + grant.lease.waiter_length / 3)
        self.grants[grant.id] = grant

    def expect(self, grant: Grant) -> None:
        """Add it, and see to its renewals."""
        self.add(grant)
        self.see_to(grant)

    def see_to(self, grant: Grant) -> None:
        """See to its renewals."""
        self._heartbeat.see_to(grant.lease.renew_at)

    def hold(self, grant: Grant) -> None:
        """Its worker holds it."""
        with self._mutex:
            self._by_worker.setdefault(grant.worker, {})[grant.key] = grant
            if grant.terms.mode == "exclusive":
                self.by_line[grant.line] = grant

    def forget(self, grant: Grant) -> bool:
        """It has ended: it is renewed no more. Return whether it was known."""
        with self._mutex:
            known = self.grants.pop(grant.id, None) is not None
            if self.by_line.get(grant.line) is grant:
                del self.by_line[grant.line]
            held = self._by_worker.get(grant.worker, {})
            if held.get(grant.key) is grant:
                del held[grant.key]
            if not held:
                self._by_worker.pop(grant.worker, None)
        return known


def current_worker() -> object:
    """The running task, or else the thread: what would be in a deadlock with itself.

    The task is a weak reference, of which Python makes one for each object: the result of a task may be the lock, which
    would otherwise never be collected.
    """
    task = current_task()
    return _current_thread() if task is None else weakref.ref(task)


class _Alive:
    """Dies with the thread in which it was made."""

    __slots__ = ("__weakref__",)


class ForeignThread(weakref.ref[_Alive]):
    """A thread that `threading` has not started; dead when that thread has ended.

    Before Python 3.13, `threading.current_thread` takes such a thread for an earlier one that had the same number.
    """

    __slots__ = ()


_local: Final = threading.local()


def _current_thread() -> object:
    thread = threading.current_thread()
    if not isinstance(thread, threading._DummyThread):
        return thread
    if not hasattr(_local, "worker"):
        _local.alive = _Alive()
        _local.worker = ForeignThread(_local.alive)
    worker: ForeignThread = _local.worker
    return worker


def current_task() -> asyncio.Task[Any] | None:
    """The running task; None if there is none in this thread."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
