"""Threads that make calls for the main thread and for coroutines: in bounded time, and safe from signal handlers.

Signal handlers run in the main thread, between any two lines of Python. `Event`, `Condition`, `Semaphore` and the
futures and pools made of them are Python: struck there they leave their inner lock taken for ever, or complain of one
that is not (seen: 1 of 8 processes with 150 interrupts each hung or got a RuntimeError for their KeyboardInterrupt).
A bare lock, a SimpleQueue, a list and an OrderedDict whose keys are hashed by identity are single operations of the
interpreter: they have happened, or they have not. Nothing else is used here, and no lock is held over other code.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from .worker_calls import Awaited, Blocking, Call, Lane, Submitted, first, seconds

T = TypeVar("T")


class WorkerThreads:
    """At most *most* daemon threads, started as they are needed; *reserved* of them make urgent calls only.

    A call gets the number of seconds that are left of its *timeout* (infinity if it has none) and must end within
    them. A call that has not begun when its timeout is over (or so nearly that it has no chance, see `LEAST`) is never
    begun; the caller gets LockBackendFailed when it is over. One that has begun is waited for `OVERTIME` seconds more.

    A call without a caller, because its coroutine was cancelled or a signal handler raised, is withdrawn if it has not
    begun. `on_withdrawn` is called, in the caller's thread, for every call that was withdrawn and for no
    other, before the error is raised: where it was not called, assume that the call was begun.

    Urgent calls are begun before all others.
    """

    def __init__(self, most: int, reserved: int = 0) -> None:
        self._most = most
        self._urgent: Lane = OrderedDict()
        self._others: Lane = OrderedDict()
        #: One for each call that entered a lane. A thread which gets one makes a call, if there still is one: there may
        #: be too many of these, for calls that were withdrawn. False ends a thread.
        self._tickets: SimpleQueue[bool] = SimpleQueue()
        #: One for each call, of those that are not urgent, that may be begun now.
        self._slots: list[None] = [None] * (most - reserved)
        self._started: list[None] = []
        self._idle: list[None] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._started)

    def submit(self, call: Callable[[], object], *, urgent: bool = False) -> bool:
        """Have *call* made. Return False, and do nothing, where there is no thread for it, nor can be one."""
        return self._enter(Submitted(lambda _left: call(), self._lane(urgent)))

    def call(
        self,
        call: Callable[[float], T],
        timeout: float | None = None,
        *,
        urgent: bool = False,
        on_withdrawn: Callable[[], object] | None = None,
    ) -> T:
        """Have *call* made by one of the threads, and wait for what it returns or raises."""
        entry: Blocking[T] = Blocking(call, self._lane(urgent), timeout, on_withdrawn)
        try:
            return entry.wait(timeout) if self._enter(entry) else call(seconds(timeout))
        finally:
            entry.withdraw()

    async def acall(
        self,
        call: Callable[[float], T],
        timeout: float | None = None,  # noqa: ASYNC109 - the thread has to know it
        *,
        urgent: bool = False,
        on_withdrawn: Callable[[], object] | None = None,
    ) -> T:
        """See call(). A call that has begun goes on when the coroutine is cancelled."""
        entry: Awaited[T] = Awaited(call, self._lane(urgent), timeout, on_withdrawn)
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

    def _lane(self, urgent: bool) -> Lane:
        return self._urgent if urgent else self._others

    def _enter(self, entry: Call) -> bool:
        """Put *entry* into its lane. Return False if no thread will ever begin it."""
        if self._closed:
            entry.take_back()
            return False
        entry.lane[entry] = None
        if len(self._started) < self._most and len(self._idle) < len(self._urgent) + len(self._others):
            self._start()
        self._tickets.put(True)  # last: a thread that wakes while this one has more to do costs two switches
        if self._started and not self._closed:
            return True
        # No thread, or closed just now: the threads may have ended without having seen it.
        return not entry.take_back()

    def _start(self) -> None:
        # Not a Thread: starting one waits for it by an Event.
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            _thread.start_new_thread(self._work, ())
            self._started.append(None)

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            # Where no ticket is left there may be calls without one: a signal struck between the two, or there was no
            # slot when a thread came with it.
            while self._serve() and not self._tickets.qsize():
                pass
            self._idle.append(None)
            goes_on = self._tickets.get()
            self._idle.pop()
        while self._serve():
            pass
        self._tickets.put(False)  # for the next one

    def _serve(self) -> bool:
        """Begin the call whose turn it is, if there is one. Return whether there was."""
        if self._urgent and (entry := first(self._urgent)) is not None:
            entry.begin()
            return True
        while self._others:  # again after a slot was put back: another thread may have missed it
            try:
                self._slots.pop()
            except IndexError:
                return False
            try:
                if (entry := first(self._others)) is not None:
                    entry.begin()
                    return True
            finally:
                self._slots.append(None)
        return False
