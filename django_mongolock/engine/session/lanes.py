"""The order of calls: by priority, and at most two of one key at a time."""

from __future__ import annotations

import _thread
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from ..protocol.actions import Answer

#: The priorities of a session's commands, and the share of its threads that each priority may use. The shares keep less
#: urgent calls from blocking more urgent ones.
RENEWAL, RELEASE, REQUEST, BACKGROUND = range(4)
SHARES: Final = (1.0, 0.75, 0.5, 0.25)
#: The most calls of one key at a time.
PER_KEY: Final = 2
#: Seconds after which a running call counts as slow. Another thread takes the place of a slow call.
SLOW: Final = 0.5


class InLane(Protocol):
    """The attributes of a call that decide its turn: see `worker_threads.Call`."""

    lane: OrderedDict[Any, None]
    key: str | None
    priority: int
    same: object
    since: float
    decided: _thread.LockType


E = TypeVar("E", bound=InLane)
#: The calls that wait for their turn, in order.
Lane = OrderedDict[E, None]


class Lanes(Generic[E]):
    """The calls that wait: a lane for each priority, and lanes for each key with two running calls.

    Any thread may put an entry into one of `waiting`, or take it out again. All other attributes are changed with the
    `mutex` held, and never by the main thread. For size, most and shares see `worker_threads.WorkerThreads`.
    """

    def __init__(self, size: int, most: int, shares: Sequence[float]) -> None:
        self._limits = [(max(1, int(size * share)), max(1, int(most * share))) for share in shares]
        self.waiting: list[Lane[E]] = [OrderedDict() for _ in shares]
        self.mutex = _thread.allocate_lock()
        #: The start time of each running call, and the number of slow ones.
        self.running: dict[E, float] = {}
        self.slow = 0
        #: The number of running calls of each key, and the calls that wait for the key, by priority.
        self.under_way: dict[str, int] = {}
        self.waiting_for_key: dict[str, list[Lane[E]]] = {}

    def begin_next(self, now: float) -> tuple[E | None, float | None]:
        """Take out the call whose turn has come.

        If there is none, return None and the seconds until there may be one.
        """
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
        """Take out the first call that may be made. Calls before it wait for their keys from now on."""
        while (entry := first(lane)) is not None and not self.is_admitted(entry.key):
            lanes = self.waiting_for_key.setdefault(str(entry.key), [OrderedDict() for _ in self.waiting])
            entry.lane = lanes[entry.priority]
            entry.lane[entry] = None
            if entry.decided.locked():  # withdrawn meanwhile, perhaps from the earlier lane
                entry.lane.pop(entry, None)
        return entry

    def is_admitted(self, key: str | None) -> bool:
        """Count a call of *key* if it may be made. Return whether it may."""
        if key is None:
            return True
        count = self.under_way.get(key, 0)
        if count < PER_KEY:
            self.under_way[key] = count + 1
        return count < PER_KEY

    def end(self, entry: E, result: object) -> list[E]:
        """Record the end of a call. Return the calls that share its result."""
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
        """Record the end of a call of *key*, and move the next call of the key to the front of its lane.

        Return whether there is one.

        The next call takes the free place of its key only when it is made, because calls of its priority may have to
        wait.
        """
        if key is None:
            return False
        self.under_way[key] -= 1
        if not self.under_way[key]:
            del self.under_way[key]
        for lane in self.waiting_for_key.get(key, ()):
            if (entry := first(lane)) is not None:
                # `take_back` removes an entry from `entry.lane`, but this entry stands in `waiting` now. If it is
                # withdrawn, it stays there until a thread takes it out, finds it withdrawn, and calls `end`. The next
                # call of its key follows after that.
                self.waiting[entry.priority][entry] = None
                self.waiting[entry.priority].move_to_end(entry, last=False)
                return True
        self.waiting_for_key.pop(key, None)
        return False


def first(lane: Lane[E]) -> E | None:
    """Take out the first call, if there is one."""
    try:
        return lane.popitem(last=False)[0]
    except KeyError:
        return None
