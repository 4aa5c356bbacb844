"""Threads that make calls for the main thread and for coroutines: in bounded time, and safe from signal handlers.

Signal handlers run in the main thread, between any two lines of Python. `Event`, `Condition`, `Semaphore` and the
futures and pools made of them are Python: struck there they leave their inner lock taken for ever, or complain of one
that is not (seen: 1 of 8 processes with 150 interrupts each hung or got a RuntimeError for their KeyboardInterrupt).
A bare lock, a SimpleQueue, a list and an OrderedDict whose keys are hashed by identity are single operations of the
interpreter: they have happened, or they have not. The main thread uses nothing else here, and no lock over other code.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ..protocol.actions import Answer
from .worker_calls import Awaited, Blocking, Call, Lane, first, logged, seconds

T = TypeVar("T")

#: How many calls of one key are made at a time.
PER_KEY: Final = 2
#: A call that has taken longer, in seconds, waits for something of its own: another thread takes its place.
SLOW: Final = 0.5


class WorkerThreads:
    """Daemon threads, started as they are needed, that make at most *size* calls at a time, and two of each key.

    A call that has taken half a second does not count any more, up to *most* calls (*size* if not given). What comes
    then waits until one of them ends.

    shares: for each priority of calls, the first one first, of how many of the threads these may have use; the others
    are for those before.

    Where a call returns an `Answer` that refuses, it is passed on to the calls that wait for its key, ask the `same`,
    and were entered before that one was begun.

    A call gets the number of seconds that are left of its *timeout* (infinity if it has none) and must end within
    them. A call that has not begun when its timeout is over (or so nearly that it has no chance, see `LEAST`) is never
    begun; the caller gets LockBackendFailed when it is over. One that has begun is waited for `OVERTIME` seconds more.

    A call without a caller, because its coroutine was cancelled or a signal handler raised, is withdrawn if it has not
    begun. `on_withdrawn` is called, in the caller's thread, for every call that was withdrawn and for no
    other, before the error is raised: where it was not called, assume that the call was begun.

    how: more arguments of `worker_calls.Call`.
    """

    def __init__(self, size: int, most: int = 0, *, shares: Sequence[float] = (1.0,)) -> None:
        self._size, self._most = size, max(size, most)
        self._limits = [(max(1, int(size * share)), max(1, int(self._most * share))) for share in shares]
        self._lanes: list[Lane] = [OrderedDict() for _ in shares]
        #: One for each call that entered a lane. A thread which gets one makes what calls there are: there may be too
        #: many of these. False ends a thread.
        self._tickets: SimpleQueue[bool] = SimpleQueue()
        self._unstarted: list[None] = [None] * self._most
        self._idle: list[None] = []
        self._closed = False
        # What follows is changed under the mutex, and never by the main thread.
        self._mutex = _thread.allocate_lock()
        #: Since when each call is being made, and how many of them are slow.
        self._running: dict[Call, float] = {}
        self._slow = 0
        #: Whether a thread sleeps until one of them becomes slow, or until the alarm can be locked.
        self._watched = False
        self._alarm = _thread.allocate_lock()
        self._alarm.acquire()
        #: How many calls of a key are being made, and those that wait for it, by priority.
        self._under_way: dict[str, int] = {}
        self._parked: dict[str, list[Lane]] = {}

    def __len__(self) -> int:
        return self._most - len(self._unstarted)

    def submit(self, call: Callable[[], object], **how: Any) -> bool:
        """Have *call* made. Return False, and do nothing, where there is no thread for it, nor can be one."""
        return self._enter(Call(functools.partial(logged, call), **how))

    def call(self, call: Callable[..., T], timeout: float | None = None, **how: Any) -> T:
        """Have *call* made by one of the threads, and wait for what it returns or raises."""
        entry: Blocking[T] = Blocking(call, timeout, **how)
        try:
            return entry.wait(timeout) if self._enter(entry) else call(seconds(timeout))
        finally:
            entry.withdraw()

    async def acall(self, call: Callable[..., T], timeout: float | None = None, **how: Any) -> T:  # noqa: ASYNC109 - the thread has to know it
        """See call(). A call that has begun goes on when the coroutine is cancelled."""
        entry: Awaited[T] = Awaited(call, timeout, **how)
        timer: asyncio.TimerHandle | None = None
        try:
            if timeout is not None:
                timer = entry.loop.call_later(timeout, entry.expire, timeout)
            return await entry.future if self._enter(entry) else call(seconds(timeout))
        finally:
            entry.withdraw()
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """End the threads, when they have done what they were given before."""
        self._closed = True
        self._tickets.put(False)

    # Calls that a thread makes itself. Not for the main thread.

    def begin_own(self, key: str | None) -> bool:
        """Note that this thread is going to make a call of *key*. Return False where it must have it made instead.

        While other calls wait for the key, it waits behind them.
        """
        with self._mutex:
            return key not in self._parked and self._is_admitted(key)

    def end_own(self, key: str | None) -> None:
        """Note that the call has ended."""
        with self._mutex:
            is_next = self._leave(key)
        if is_next:
            self._wake_one()

    # How a call finds a thread

    def _enter(self, entry: Call) -> bool:
        """Put *entry* into its lane. Return False if no thread will ever begin it."""
        entry.lane = self._lanes[entry.priority]
        if self._closed:
            entry.take_back()
            return False
        entry.lane[entry] = None
        self._wake_one()  # last: a thread that wakes while this one has more to do costs two switches
        if len(self) and not self._closed:
            return True
        # No thread, or closed just now: the threads may have ended without having seen it.
        return not entry.take_back()

    def _wake_one(self) -> None:
        """Have a thread look for calls."""
        self._start_if_needed()
        self._tickets.put(True)
        if self._watched and not self._idle:
            with contextlib.suppress(RuntimeError):  # it was woken already
                self._alarm.release()

    def _start_if_needed(self) -> None:
        waiting = sum(map(len, self._lanes))
        # One more than make calls: it watches for one of these to become slow.
        if len(self._idle) < waiting and len(self) <= self._size + self._slow and self._unstarted:
            with contextlib.suppress(IndexError, RuntimeError):  # another was faster; the interpreter is shutting down
                self._unstarted.pop()
                try:
                    _thread.start_new_thread(self._work, ())  # not a Thread: starting one waits for it by an Event
                except BaseException:
                    self._unstarted.append(None)
                    raise

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            if (pause := self._serve()) is None:
                self._idle.append(None)
                goes_on = self._tickets.get()
                self._idle.pop()
            else:
                # Not `get(timeout=...)`: where several threads wait so, it may never return (Python 3.11 and 3.12).
                self._alarm.acquire(timeout=pause)
                self._watched = False
        self._serve()
        self._tickets.put(False)  # for the next one

    def _serve(self) -> float | None:
        """Make the calls that may be made. Return None, or after how many seconds this thread has to look again."""
        while True:
            with self._mutex:
                entry, pause = self._next(time.monotonic())
                if entry is None:
                    if self._watched:
                        return None
                    self._watched = pause is not None
                    return pause
                is_unseen = not self._watched and any(self._lanes)
            self._start_if_needed()
            if is_unseen:  # this thread is busy now: another one looks
                self._tickets.put(True)
            result = entry.begin()
            with self._mutex:
                shared = self._end(entry, result)
            for other in shared:
                other.begin(known=result)

    def _next(self, now: float) -> tuple[Call | None, float | None]:
        """Take out the call whose turn it is. If there is none: None, and how long there is none at least."""
        quick = [began for began in self._running.values() if began > now - SLOW]
        self._slow = len(self._running) - len(quick)
        for lane, (size, most) in zip(self._lanes, self._limits, strict=True):
            if len(quick) >= size or len(self._running) >= most:
                return None, max(0.0, quick[0] + SLOW - now) if quick else None
            if (entry := self._first_of(lane)) is not None:
                self._running[entry] = now
                return entry, None
        return None, None

    def _first_of(self, lane: Lane) -> Call | None:
        """Take out the first call that may be made. Those before it wait for their keys from now on."""
        while (entry := first(lane)) is not None and not self._is_admitted(entry.key):
            parked = self._parked.setdefault(str(entry.key), [OrderedDict() for _ in self._lanes])
            entry.lane = parked[entry.priority]
            entry.lane[entry] = None
            if entry.decided.locked():  # taken back meanwhile, perhaps from the lane before
                entry.lane.pop(entry, None)
        return entry

    def _is_admitted(self, key: str | None) -> bool:
        """Count a call of *key*, if it may be made."""
        if key is None:
            return True
        count = self._under_way.get(key, 0)
        self._under_way[key] = min(count + 1, PER_KEY)
        return count < PER_KEY

    def _end(self, entry: Call, result: object) -> list[Call]:
        """The call has ended. Return those that its result is passed on to."""
        began = self._running.pop(entry)
        shared: list[Call] = []
        if entry.same is not None and isinstance(result, Answer) and not result.reply.held:
            waiting = [other for lane in self._parked.get(entry.key or "", ()) for other in list(lane)]
            shared = [other for other in waiting if other.same == entry.same and other.since <= began]
            for other in shared:
                other.lane.pop(other, None)
        self._leave(entry.key)
        return shared

    def _leave(self, key: str | None) -> bool:
        """A call of *key* has ended: the next one that waits for it comes first in its lane. Return whether there is
        one.

        It takes none of the two places of its key before it is made: its lane may be shut for a while.
        """
        if key is None:
            return False
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        for lane in self._parked.get(key, ()):
            if (entry := first(lane)) is not None:
                # It cannot leave the lane by being taken back: whoever takes it out there lets the next one follow.
                entry.lane = OrderedDict()
                self._lanes[entry.priority][entry] = None
                self._lanes[entry.priority].move_to_end(entry, last=False)
                return True
        self._parked.pop(key, None)
        return False
