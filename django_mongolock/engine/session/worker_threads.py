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
import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from ...exceptions import LockBackendFailed
from ..logs import log_exception

T = TypeVar("T")

#: Seconds that a call which has begun may take longer than it was given, before it fails for its caller.
OVERTIME: Final = 1.0
#: The part of its timeout that a call needs to be begun. With less a command could only fail, and then nobody knows
#: whether it took effect; one that was never sent needs no cleaning up.
LEAST: Final = 0.05


class WorkerThreads:
    """At most *most* daemon threads, started as they are needed; *reserved* of them make urgent calls only.

    A call gets the number of seconds that are left of its *timeout* (infinity if it has none) and must end within
    them. A call that has not begun when its timeout is over (or so nearly that it has no chance, see `LEAST`) is never
    begun; the caller gets LockBackendFailed when it is over. One that has begun is waited for `OVERTIME` seconds more.

    A call that nobody waits for any more, because its coroutine was cancelled or a signal handler raised, is withdrawn
    if it has not begun. `on_withdrawn` is called, in the caller's thread, for every call that was withdrawn and for no
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
        return self._enter(_Submitted(lambda _left: call(), self._lane(urgent)))

    def call(
        self,
        call: Callable[[float], T],
        timeout: float | None = None,
        *,
        urgent: bool = False,
        on_withdrawn: Callable[[], object] | None = None,
    ) -> T:
        """Have *call* made by one of the threads, and wait for what it returns or raises."""
        entry = _Blocking(call, self._lane(urgent), timeout, on_withdrawn)
        try:
            if not self._enter(entry):
                return call(_seconds(timeout))
            if not entry.ended.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                if entry.withdraw():
                    raise _not_begun(_seconds(timeout))
                if not entry.ended.acquire(timeout=OVERTIME):
                    raise _not_ended(_seconds(timeout))
            return entry.outcome()
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
        entry = _Awaited(call, self._lane(urgent), timeout, on_withdrawn)
        timer: asyncio.TimerHandle | None = None
        try:
            if timeout is not None:
                timer = entry.loop.call_later(timeout, entry.expire, timeout)
            return await entry.future if self._enter(entry) else call(_seconds(timeout))
        finally:
            entry.withdraw()
            if timer is not None:
                timer.cancel()

    def make_elsewhere(self, call: Callable[[], None]) -> None:
        """Make the call, but not in the main thread, for what a signal may not strike: starting a `Thread`."""
        if threading.current_thread() is threading.main_thread():
            self.call(lambda _: call(), urgent=True)
        else:
            call()

    def close(self) -> None:
        """End the threads, when they have done what they were given before."""
        self._closed = True
        self._tickets.put(False)

    def _lane(self, urgent: bool) -> Lane:
        return self._urgent if urgent else self._others

    def _enter(self, entry: _Entry) -> bool:
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
        if self._urgent and (entry := _first(self._urgent)) is not None:
            entry.begin()
            return True
        while self._others:  # again after a slot was put back: another thread may have missed it
            try:
                self._slots.pop()
            except IndexError:
                return False
            try:
                if (entry := _first(self._others)) is not None:
                    entry.begin()
                    return True
            finally:
                self._slots.append(None)
        return False


class _Entry:
    """A call that waits for its turn. Whoever locks `_decided` first, a thread or the owner, has decided about it."""

    __slots__ = ("_call", "_decided", "_least", "_on_withdrawn", "_until", "lane")

    def __init__(
        self,
        call: Callable[[float], Any],
        lane: Lane,
        timeout: float | None = None,
        on_withdrawn: Callable[[], object] | None = None,
    ) -> None:
        self.lane = lane
        self._call = call
        self._until = time.monotonic() + _seconds(timeout)
        self._least = 0.0 if timeout is None else LEAST * timeout
        self._decided = _thread.allocate_lock()
        self._on_withdrawn = on_withdrawn

    def begin(self) -> None:
        """Make the call, unless it was taken back or comes too late: then its owner takes it back."""
        left = self._until - time.monotonic()
        if left > self._least and self._decided.acquire(blocking=False):
            self._make(left)

    def take_back(self) -> bool:
        """Return whether it was not begun; it will not be then."""
        if not self._decided.acquire(blocking=False):
            return False
        self.lane.pop(self, None)
        return True

    def withdraw(self) -> bool:
        """Take it back, and say so to its owner."""
        if not self.take_back():
            return False
        if self._on_withdrawn is not None:
            self._on_withdrawn()
        return True

    def _make(self, left: float) -> None:
        raise NotImplementedError


#: Those that wait for their turn, in its order.
Lane = OrderedDict[_Entry, None]


class _Submitted(_Entry):
    """A call that nobody waits for."""

    __slots__ = ()

    def _make(self, left: float) -> None:
        try:
            self._call(left)
        except BaseException:  # noqa: BLE001 - it is logged, and the thread goes on
            log_exception("a call in the background failed")


class _Blocking(_Entry, Generic[T]):
    """A call that a thread waits for, until `ended` can be locked."""

    __slots__ = ("_errors", "_results", "ended")

    def __init__(
        self,
        call: Callable[[float], T],
        lane: Lane,
        timeout: float | None,
        on_withdrawn: Callable[[], object] | None,
    ) -> None:
        super().__init__(call, lane, timeout, on_withdrawn)
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self.ended = _thread.allocate_lock()
        self.ended.acquire()

    def _make(self, left: float) -> None:
        try:
            self._results.append(self._call(left))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self._errors.append(error)
        finally:
            self.ended.release()

    def outcome(self) -> T:
        """Return or raise what the call has."""
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()


class _Awaited(_Entry, Generic[T]):
    """A call that a coroutine waits for."""

    __slots__ = ("future", "loop")

    def __init__(
        self,
        call: Callable[[float], T],
        lane: Lane,
        timeout: float | None,
        on_withdrawn: Callable[[], object] | None,
    ) -> None:
        super().__init__(call, lane, timeout, on_withdrawn)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    def _make(self, left: float) -> None:
        try:
            report = functools.partial(_set_outcome, self.future, self._call(left))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            report = functools.partial(_set_outcome, self.future, None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(report)

    def expire(self, timeout: float) -> None:
        """The timeout is over. Called by the event loop."""
        if self.withdraw():
            _set_outcome(self.future, None, _not_begun(timeout))
        elif not self.future.done():
            self.loop.call_later(OVERTIME, _set_outcome, self.future, None, _not_ended(timeout))


def _first(lane: Lane) -> _Entry | None:
    """Take out the first one, if there is one."""
    try:
        return lane.popitem(last=False)[0]
    except KeyError:
        return None


def _seconds(timeout: float | None) -> float:
    return math.inf if timeout is None else timeout


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    """Set the outcome of a call, unless nobody waits for it any more."""
    if not future.done():
        future.set_result(result) if error is None else future.set_exception(error)


def _not_begun(timeout: float) -> LockBackendFailed:
    return LockBackendFailed(f"the command was not sent: no thread was free for it within {timeout:.1f} s")


def _not_ended(timeout: float) -> LockBackendFailed:
    return LockBackendFailed(f"the command was sent, but did not end within {timeout:.1f} s")
