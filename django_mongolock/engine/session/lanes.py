"""In which order calls are made: by priority, and of one key at most two at a time."""

from __future__ import annotations

import _thread
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from ..protocol.actions import Answer

#: How many calls of one key are made at a time.
PER_KEY: Final = 2
#: A call that has taken longer, in seconds, waits for something of its own: another thread takes its place.
SLOW: Final = 0.5


class InLane(Protocol):
    """What is to be known of a call to find its turn: see `worker_threads.Call`."""

    lane: OrderedDict[Any, None]
    key: str | None
    priority: int
    same: object
    since: float
    decided: _thread.LockType


E = TypeVar("E", bound=InLane)
#: Those that wait for their turn, in its order.
Lane = OrderedDict[E, None]


class Lanes(Generic[E]):
    """The calls that wait: a lane for each priority, and lanes for each key of which two calls are being made.

    size, most, shares: see `worker_threads.WorkerThreads`. Anybody may put an entry into one of `waiting`, or take it
    out again. All else is changed with the `mutex` held, and never by the main thread.
    """

    def __init__(self, size: int, most: int, shares: Sequence[float]) -> None:
        self._limits = [(max(1, int(size * share)), max(1, int(most * share))) for share in shares]
        self.waiting: list[Lane[E]] = [OrderedDict() for _ in shares]
        self.mutex = _thread.allocate_lock()
        #: Since when each call is being made, and how many of them are slow.
        self.running: dict[E, float] = {}
        self.slow = 0
        #: How many calls of a key are being made, and those that wait for it, by priority.
        self.under_way: dict[str, int] = {}
        self.waiting_for_key: dict[str, list[Lane[E]]] = {}

    def begin_next(self, now: float) -> tuple[E | None, float | None]:
        """Take out the call whose turn it is. If there is none: None, and how long there is none at least."""
        quick = [left for began in self.running.values() if (left := began + SLOW - now) > 0]
        self.slow = len(self.running) - len(quick)
        for priority, (size, most) in enumerate(self._limits):
            if len(quick) >= size or len(self.running) >= most:
                return None, quick[0] if quick else None
            if (entry := self._first_of(self.waiting[priority])) is not None:
                self.running[entry] = now
                return entry, None
        return None, None

    def _first_of(self, lane: Lane[E]) -> E | None:
        """Take out the first call that may be made. Those before it wait for their keys from now on."""
        while (entry := first(lane)) is not None and not self.is_admitted(entry.key):
            lanes = self.waiting_for_key.setdefault(str(entry.key), [OrderedDict() for _ in self.waiting])
            entry.lane = lanes[entry.priority]
            entry.lane[entry] = None
            if entry.decided.locked():  # taken back meanwhile, perhaps from the lane before
                entry.lane.pop(entry, None)
        return entry

    def is_admitted(self, key: str | None) -> bool:
        """Count a call of *key*, if it may be made."""
        if key is None:
            return True
        count = self.under_way.get(key, 0)
        if count < PER_KEY:
            self.under_way[key] = count + 1
        return count < PER_KEY

    def end(self, entry: E, result: object) -> list[E]:
        """The call has ended. Return those that its result is passed on to."""
        began = self.running.pop(entry)
        shared: list[E] = []
        if entry.same is not None and isinstance(result, Answer) and not result.reply.held:
            waiting = [other for lane in self.waiting_for_key.get(str(entry.key), ()) for other in list(lane)]
            shared = [other for other in waiting if other.same == entry.same and other.since <= began]
            for other in shared:
                other.lane.pop(other, None)
        self.free_place(entry.key)
        return shared

    def free_place(self, key: str | None) -> bool:
        """A call of *key* has ended: the next one that waits for it comes first in its lane. Return whether there is
        one.

        It does not take the free place of its key yet, but when it is made: calls of its priority may have to wait.
        """
        if key is None:
            return False
        self.under_way[key] -= 1
        if not self.under_way[key]:
            del self.under_way[key]
        for lane in self.waiting_for_key.get(key, ()):
            if (entry := first(lane)) is not None:
                # Taken back, it leaves `entry.lane`, where it is not any more. So it stays in `waiting`, until a
                # thread takes it out, finds that it was taken back, and calls `end`: then the next of its key follows.
                self.waiting[entry.priority][entry] = None
                self.waiting[entry.priority].move_to_end(entry, last=False)
                return True
        self.waiting_for_key.pop(key, None)
        return False


def first(lane: Lane[E]) -> E | None:
    """Take out the first one, if there is one."""
    try:
        return lane.popitem(last=False)[0]
    except KeyError:
        return None
