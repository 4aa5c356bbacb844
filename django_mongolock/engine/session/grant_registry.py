"""The grants of one process: by id while they are renewed, by the thread or task that holds them, and in line.

Waiters that want the same key on the same terms stand in one line. The first of a line stands in the document's queue
for all of them. When the first releases the key or leaves the queue, it puts the next of the line into the queue.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from ...exceptions import LockQueueFull
from ..protocol.actions import Answer, Turn
from . import flow
from .grant import Grant, LineKey
from .heartbeat import Heartbeat

_NONE: Final[Mapping[str, Grant]] = MappingProxyType({})


class GrantRegistry:
    """The index of grants. May be called from any thread.

    - grants: grants that stand in a document, or may soon, by id. The heartbeat renews these.
    - by_line: grants that are held exclusively, by their lines. A waiter with one of these lines waits for this process
      to hand its key over.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.grants: dict[str, Grant] = {}
        self.by_line: dict[LineKey, Grant] = {}
        self._heartbeat = heartbeat
        self._by_worker: dict[object, dict[str, Grant]] = {}
        self._mutex = threading.Lock()

    def held_by(self, worker: object) -> Mapping[str, Grant]:
        """Return the grants that this thread or task holds, by key."""
        return self._by_worker.get(worker, _NONE)

    def add(self, grant: Grant) -> None:
        """Add a grant that is about to be asked for. From now on its place in the queue is renewed."""
        # The grant may have stood in line for long, without any renewal.
        grant.lease.renew_at = max(grant.lease.renew_at, self._heartbeat.now() + grant.lease.waiter_length / 3)
        self.grants[grant.id] = grant

    def expect(self, grant: Grant) -> None:
        """Add *grant*, and schedule its renewals."""
        self.add(grant)
        self.schedule(grant)

    def schedule(self, grant: Grant) -> None:
        """Schedule the renewals of *grant*."""
        self._heartbeat.schedule(grant.lease.renew_at)

    def add_held(self, grant: Grant) -> None:
        """Record that its worker holds *grant*."""
        with self._mutex:
            self._by_worker.setdefault(grant.worker, {})[grant.key] = grant
            if grant.terms.mode == "exclusive":
                self.by_line[grant.line] = grant

    def remove(self, grant: Grant) -> bool:
        """Remove a *grant* that has ended. No renewal follows. Return whether it was known."""
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
    """Return the running task or thread. If another one waits for it in a call of asgiref, return that one.

    Two requests by the returned worker would be in a deadlock with each other.

    A task is returned as a weak reference. Python makes one such reference for each object. The result of a task may be
    the lock, and a strong reference would keep that lock from being collected.
    """
    task = current_task()
    return flow.origin_of(_current_thread() if task is None else weakref.ref(task), task)


class _Alive:
    """An object that dies with the thread in which it was made."""

    __slots__ = ("__weakref__",)


class ForeignThread(weakref.ref[_Alive]):
    """A thread that `threading` has not started. The reference is dead when that thread has ended.

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
    """Return the running task, or None if there is none in this thread."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


class LocalQueue:
    """The lines of one process. May be called from any thread.

    - waiting: grants that a caller waits for, by id, including single tries.
    - lines: grants that are more than a single try, in the order of their arrival.
    - limit: largest number of grants in a line.
    """

    def __init__(self, limit: int, registry: GrantRegistry) -> None:
        self.waiting: dict[str, Grant] = {}
        self.lines: dict[LineKey, OrderedDict[str, Grant]] = {}
        self._limit = limit
        self.registry = registry
        self._mutex = threading.Lock()

    def join(self, grant: Grant, *, trial: bool) -> Turn:
        """Put *grant* into its line, unless it is a *trial*. Return whether the caller may ask for it now.

        Raises LockQueueFull if the line is as long as any queue may be.
        """
        with self._mutex:
            if not trial:
                standing = self.lines.setdefault(grant.line, OrderedDict())
                if len(standing) >= self._limit:
                    raise LockQueueFull(grant.key)
                if standing:
                    grant.line = next(iter(standing.values())).line  # one key object for all: there may be thousands
                standing[grant.id] = grant
                self._count(standing)
            self.waiting[grant.id] = grant
            turn = "now" if trial else self._turn(grant)[0]
        grant.reporting.busy = turn != "now"
        return turn

    def turn(self, grant: Grant) -> tuple[Turn, Grant | None]:
        """Return where *grant* stands in its line, and the first of the line if that is another grant."""
        with self._mutex:
            return self._turn(grant)

    def _turn(self, grant: Grant) -> tuple[Turn, Grant | None]:
        first = self._first(grant.line)
        if first is not None and first is not grant:
            return "behind", first
        return ("next" if grant.line in self.registry.by_line else "now"), None

    def leave(self, grant: Grant) -> None:
        """Take *grant* out of its line, because it is held or no longer waited for."""
        with self._mutex:
            self.waiting.pop(grant.id, None)
            standing = self.lines.get(grant.line)
            if standing is None:
                return
            was_first = next(iter(standing), None) == grant.id
            standing.pop(grant.id, None)
            grant.waiting.behind = 0
            if standing:
                self._count(standing)
            else:
                self.lines.pop(grant.line, None)
        if was_first and standing:
            self.wake_first(grant.line)

    def wake_first(self, line: LineKey) -> None:
        """Wake the first in that line."""
        with self._mutex:
            first = self._first(line)
        if first is not None:
            first.waiting.wake()

    def wake_first_of(self, keys: Collection[str]) -> None:
        """Wake the first in each line of those keys."""
        for line in list(self.lines):
            if line[0] in keys:
                self.wake_first(line)

    def reserve_handover(self, grant: Grant) -> Grant | None:
        """Reserve the hand-over of *grant*'s key to the next in line, and return the next.

        `finish_handover` ends it.
        """
        with self._mutex:
            following = iter(self.lines.get(grant.line, {}).values())
            next_waiter = next(following, None)
            if grant.id in self.waiting:  # *grant* stands in line itself
                while next_waiter is not None and next_waiter is not grant:
                    next_waiter = next(following, None)
                next_waiter = next(following, None)
            while next_waiter is not None and self._is_served(next_waiter):
                next_waiter = next(following, None)
            if next_waiter is None or next_waiter.waiting.cancelled:
                return None
            next_waiter.waiting.handover_reserved = True
            # Add the waiter under the mutex, because its caller removes it only after it has left the line.
            self.registry.add(next_waiter)
        self.registry.schedule(next_waiter)
        return next_waiter

    def _is_served(self, waiter: Grant) -> bool:
        """Return whether another command serves that waiter.

        A waiter that is reserved twice would have a second command on its way after the answer to the first. In a mode
        with several holders, a waiter that asks for itself may be granted by its own command. A waiter whose command
        had no answer does not ask.
        """
        waiting = waiter.waiting
        unanswered = waiting.sent and not waiter.lease.until and not waiter.outcome_unknown
        asks = unanswered and waiter.terms.mode != "exclusive"
        return waiting.handover_reserved or asks

    def finish_handover(self, next_waiter: Grant, answer: Answer | None) -> None:
        """Pass *answer* on to the waiter that the hand-over was reserved for.

        None means that the outcome is unknown.
        """
        if answer is None:
            next_waiter.outcome_unknown = True
        next_waiter.waiting.answer = answer
        next_waiter.waiting.handover_reserved = False
        next_waiter.waiting.wake()

    def _count(self, standing: OrderedDict[str, Grant]) -> None:
        """Record at the first of a line how many stand behind it."""
        next(iter(standing.values())).waiting.behind = len(standing) - 1

    def _first(self, line: LineKey) -> Grant | None:
        """Return the first in that line. Call this with the mutex held."""
        standing = self.lines.get(line)
        return next(iter(standing.values())) if standing else None
