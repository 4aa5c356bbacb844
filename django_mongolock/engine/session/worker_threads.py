"""Threads that make calls for the main thread and for coroutines, in bounded time and safe from signal handlers.

Signal handlers run in the main thread, between any two lines of Python. `Event`, `Condition`, `Semaphore` and the
futures and pools made of them are Python code. An interrupt in that code leaves an inner lock taken for ever, or raises
an error about a lock that is not taken. (Seen: 1 of 8 processes with 150 interrupts each hung or got a RuntimeError for
their KeyboardInterrupt.) Operations on a bare lock, a SimpleQueue, a list and an OrderedDict with keys hashed by
identity are single operations of the interpreter. Each has happened, or has not. The main thread uses nothing else
here, and holds no lock over other code.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from ...exceptions import LockBackendFailed
from ..logs import log_exception
from .lanes import Lane, Lanes

T = TypeVar("T")

#: Seconds that a running call may take beyond its timeout, before it fails for its caller.
OVERTIME: Final = 1.0
#: The part of its timeout that a call needs to begin. With less time, a command could only fail, and its outcome would
#: be unknown. A command that was never sent needs no cleanup.
LEAST: Final = 0.05


class Call:
    """A call that waits for its turn. A thread and the owner compete for `decided`, and the first to lock it decides.

    - key: at most two calls of one key are made at a time.
    - priority: calls with a lower number are made sooner.
    - same: question that the call asks. If another call with the same question is made after this one was entered,
      this one may get that result as its argument *known*.
    - since: time when the call was entered.
    """

    __slots__ = (
        *("_call", "_least", "_on_overdue", "_on_withdrawn", "_until"),
        *("decided", "key", "lane", "priority", "same", "since"),
    )

    def __init__(
        self,
        call: Callable[..., Any],
        timeout: float | None = None,
        *,
        priority: int,
        key: str | None = None,
        same: object = None,
        on_withdrawn: Callable[[], object] | None = None,
        on_overdue: Callable[[], object] | None = None,
    ) -> None:
        self.lane: Lane[Call] = OrderedDict()
        self.key, self.priority, self.same = key, priority, same
        self.since = time.monotonic()
        self.decided = _thread.allocate_lock()
        self._call = call
        self._until = self.since + seconds(timeout)
        self._least = 0.0 if timeout is None else LEAST * timeout
        self._on_withdrawn, self._on_overdue = on_withdrawn, on_overdue

    def begin(self, **known: object) -> object:
        """Make the call, and return its result, or None if there is none.

        A withdrawn call is not made. A call that comes too late is not made either, and its owner withdraws it.
        """
        left = self._until - time.monotonic()
        if left <= self._least or not self.decided.acquire(blocking=False):
            return None
        try:
            result: object = self._call(left, **known)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for; no variable here keeps it
            self._settle(None, error)
            return None
        self._settle(result, None)
        return result

    def take_back(self) -> bool:
        """Keep the call from being made, unless it has begun. Return whether that succeeded."""
        if not self.decided.acquire(blocking=False):
            return False
        self.lane.pop(self, None)
        return True

    def withdraw(self) -> bool:
        """Take the call back, and tell its owner."""
        if not self.take_back():
            return False
        if self._on_withdrawn is not None:
            self._on_withdrawn()
        return True

    def overdue(self, timeout: float) -> LockBackendFailed:
        """Tell the owner that the running call is no longer waited for. Return the error for its caller."""
        if self._on_overdue is not None:
            self._on_overdue()
        return LockBackendFailed(f"the command was sent, but did not end within {timeout:.1f} s")

    def _settle(self, result: Any, error: BaseException | None) -> None:
        """Report the outcome to the caller. A call without a caller reports nothing."""


class Blocking(Call, Generic[T]):
    """A call that a thread waits for, until `ended` can be locked."""

    __slots__ = ("_errors", "_results", "ended")

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self.ended = _thread.allocate_lock()
        self.ended.acquire()

    def _settle(self, result: T, error: BaseException | None) -> None:
        if error is None:
            self._results.append(result)
        else:
            self._errors.append(error)
        self.ended.release()

    def wait(self, timeout: float | None) -> T:
        """Return or raise the outcome of the call."""
        if not self.ended.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            if self.withdraw():
                raise _not_begun(seconds(timeout))
            if not self.ended.acquire(timeout=OVERTIME):
                raise self.overdue(seconds(timeout))
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()


class Awaited(Call, Generic[T]):
    """A call that a coroutine waits for."""

    __slots__ = ("future", "loop")

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    def _settle(self, result: T, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits there
            self.loop.call_soon_threadsafe(_set_outcome, self.future, result, error)

    def expire(self, timeout: float) -> None:
        """Fail the call after its timeout. Called by the event loop."""
        if self.withdraw():
            _set_outcome(self.future, None, _not_begun(timeout))
        elif not self.future.done():
            self.loop.call_later(OVERTIME, self._fail_overdue, timeout)

    def _fail_overdue(self, timeout: float) -> None:
        if not self.future.done():
            self.future.set_exception(self.overdue(timeout))


class WorkerThreads:
    """Daemon threads, started as needed, that make at most *size* calls at a time, and two of each key.

    A call that has run for half a second no longer counts, up to *most* calls (default: *size*). Further calls wait
    until one of them ends.

    - shares: for each priority, highest first, the share of the threads that its calls may use. The other threads are
      for more urgent calls.
    - own: number of calls that other threads may make themselves at a time (`begin_own`).

    If a call returns a refusing `Answer`, calls that wait for its key get the same answer. Such calls ask the `same`,
    and were entered before the answered call began.

    A call gets the number of seconds left of its *timeout* (infinity if it has none) and must end within them. A call
    that has not begun when its timeout is over, or nearly over (see `LEAST`), is never begun. Its caller gets
    LockBackendFailed at the end of the timeout. A call that has begun is waited for `OVERTIME` seconds more.

    A call loses its caller if its coroutine was cancelled or a signal handler raised. Such a call is withdrawn if it
    has not begun. `on_withdrawn` is called, in the caller's thread, for every withdrawn call and for no other, before
    the error is raised. Without that callback, assume that the call was begun. `on_overdue` is called for a call that
    has begun and is waited for no more. The parameter *how* holds more arguments of `Call`.
    """

    def __init__(self, size: int, most: int = 0, *, shares: Sequence[float] = (1.0,), own: float = math.inf) -> None:
        self._size, self._most = size, max(size, most)
        #: The number of further calls that other threads may make themselves.
        self._own = own
        self._lanes: Lanes[Call] = Lanes(size, self._most, shares)
        #: The tickets of the threads. A thread with a ticket makes all the calls that may be made, so spare tickets do
        #: no harm. False ends a thread.
        self._tickets: SimpleQueue[bool] = SimpleQueue()
        #: One item for each thread that may still be started, and for each thread that waits for a ticket. These lists
        #: are counters. `append` and `pop` are single operations of the interpreter, and `+= 1` is not.
        self._unstarted: list[None] = [None] * self._most
        self._idle: list[None] = []
        self._closed = False
        #: Whether a thread watches the running calls. The watching thread sleeps until the next call becomes slow,
        #: because another call may begin then. The watching thread waits for the alarm instead of a ticket. If no
        #: thread is idle, `_wake_one` unlocks the alarm.
        self._watched = False
        self._alarm = _thread.allocate_lock()
        self._alarm.acquire()

    def __len__(self) -> int:
        return self._most - len(self._unstarted)

    def submit(self, call: Callable[[], object], *, priority: int, key: str | None = None) -> bool:
        """Have *call* made. Return False, and do nothing, if no thread exists or can be started for it."""
        return self._enter(Call(functools.partial(logged, call), priority=priority, key=key))

    def call(self, call: Callable[..., T], timeout: float | None = None, *, priority: int, **how: Any) -> T:
        """Have one of the threads make *call*, and return or raise its outcome."""
        entry: Blocking[T] = Blocking(call, timeout, priority=priority, **how)
        try:
            return entry.wait(timeout) if self._enter(entry) else call(seconds(timeout))
        finally:
            entry.withdraw()

    def off_main_thread(self, call: Callable[[float], T], timeout: float | None = None, *, priority: int) -> T:
        """Make *call* with the number of seconds left. Another thread makes the calls of the main thread.

        An exception of a signal handler must not strike inside the driver, because the driver's pool does not survive
        it. The context comes along, since it holds time limits and the request for logs and monitors.
        """
        if threading.current_thread() is not threading.main_thread():
            return call(seconds(timeout))
        context = contextvars.copy_context()
        return self.call(lambda left: context.run(call, left), timeout, priority=priority)

    async def acall(
        self,
        call: Callable[..., T],
        timeout: float | None = None,  # noqa: ASYNC109 - the thread has to know it
        *,
        priority: int,
        **how: Any,
    ) -> T:
        """See call(). A call that has begun goes on when the coroutine is cancelled."""
        entry: Awaited[T] = Awaited(call, timeout, priority=priority, **how)
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
        """End the threads after the pending calls."""
        self._closed = True
        self._tickets.put(False)

    # Calls that a thread makes itself. The main thread must not use them.

    def begin_own(self, key: str | None) -> bool:
        """Count a call of *key* that this thread is going to make.

        Return False if a thread of the pool must make the call.

        If other calls wait for the key, the call has to wait behind them. If `own` threads make calls already, the call
        has to wait for a thread of the pool.
        """
        with self._lanes.mutex:
            if self._own < 1 or key in self._lanes.waiting_for_key or not self._lanes.is_admitted(key):
                return False
            self._own -= 1
            return True

    def end_own(self, key: str | None) -> None:
        """Record the end of the call."""
        with self._lanes.mutex:
            self._own += 1
            is_next = self._lanes.free_place(key)
        if is_next:
            self._wake_one()

    # How a call finds a thread

    def _enter(self, entry: Call) -> bool:
        """Put *entry* into its lane. Return False if no thread will ever begin it."""
        entry.lane = self._lanes.waiting[entry.priority]
        if self._closed:
            entry.take_back()
            return False
        entry.lane[entry] = None
        self._wake_one()  # last, because waking a thread while this one has more to do costs two switches
        if len(self) and not self._closed:
            return True
        # There is no thread, or close() came just now. The threads may have ended without seeing the entry.
        return not entry.take_back()

    def _wake_one(self) -> None:
        """Have a thread look for calls."""
        self._start_if_needed()
        self._put_ticket()
        if self._watched and not self._idle:
            with contextlib.suppress(RuntimeError):  # the watching thread was woken already
                self._alarm.release()

    def _put_ticket(self) -> None:
        """Put a ticket for a new entry.

        If there are as many tickets as threads, one of those threads will find the entry.
        """
        if self._tickets.qsize() < self._most:
            self._tickets.put(True)

    def _start_if_needed(self) -> None:
        waiting = sum(map(len, self._lanes.waiting))
        # Start one more than the running calls need. The extra thread watches for a call to become slow.
        if len(self._idle) < waiting and len(self) <= self._size + self._lanes.slow:
            # all threads are started, or the interpreter is shutting down
            with contextlib.suppress(IndexError, RuntimeError):
                self._unstarted.pop()
                try:
                    _thread.start_new_thread(self._work, ())  # a Thread would wait for its start by an Event
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
                # Do not use `get(timeout=...)`. If several threads wait that way, it may never return (Python 3.11 and
                # 3.12).
                self._alarm.acquire(timeout=pause)
                self._watched = False
        self._serve()
        self._tickets.put(False)  # for the next one

    def _serve(self) -> float | None:
        """Make the calls that may be made. Return None, or the seconds until this thread has to look again."""
        while True:
            with self._lanes.mutex:
                entry, pause = self._lanes.begin_next(time.monotonic())
                if entry is None:
                    if self._watched:
                        return None
                    self._watched = pause is not None
                    return pause
                is_unseen = not self._watched and any(self._lanes.waiting)
            self._start_if_needed()
            if is_unseen:  # this thread is busy now, so another one looks
                self._put_ticket()
            result = entry.begin()
            with self._lanes.mutex:
                shared = self._lanes.end(entry, result)
            for other in shared:
                other.begin(known=result)


def seconds(timeout: float | None) -> float:
    """Return the timeout as a number."""
    return math.inf if timeout is None else timeout


def logged(call: Callable[[], object], left: float) -> None:
    """Make a call that no caller waits for."""
    try:
        call()
    except BaseException:  # noqa: BLE001 - it is logged, and the thread goes on
        log_exception("a call in the background failed")


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    """Set the outcome of a call, unless its caller waits for it no more."""
    if not future.done():
        future.set_result(result) if error is None else future.set_exception(error)


def _not_begun(timeout: float) -> LockBackendFailed:
    return LockBackendFailed(
        f"the command was not sent within {timeout:.1f} s: earlier ones, of this key or of many, are without an answer"
    )
