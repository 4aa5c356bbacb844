"""Threads that make calls for others, in a way that an exception raised by a signal handler cannot hurt.

Signal handlers run in the main thread, between any two lines of Python. `Event`, `Condition`, `Semaphore` and the
futures and pools made of them are Python: struck there they leave their inner lock taken for ever, or complain of one
that is not (seen: 1 of 8 processes with 150 interrupts each hung or got a RuntimeError for their KeyboardInterrupt).
A bare lock, a SimpleQueue and a list are single operations of the interpreter: they have happened, or they have not.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from .logs import log_exception

T = TypeVar("T")


class Senders:
    """At most so many daemon threads, started as they are needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._started: list[None] = []
        self._idle: list[None] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._started)

    def submit(self, call: Callable[[], object]) -> bool:
        """Have *call* made. Return False, and do nothing, where there is no thread for it, nor can be one."""
        if self._closed or not (self._started or self._start()):
            return False
        self._calls.put(call)
        if len(self._idle) <= self._calls.qsize() and len(self._started) < self._most:
            self._start()
        return True

    def call(self, call: Callable[[], T]) -> T:
        """Have *call* made by one of the threads, and wait for what it returns or raises."""
        done = threading.Lock()
        done.acquire()
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                errors.append(error)
            finally:
                done.release()

        if not self.submit(work):
            return call()
        while not done.acquire(timeout=1.0):
            if self._closed:
                return call()
        if errors:
            raise errors.pop()
        return results.pop()

    async def acall(self, call: Callable[[], T]) -> T:
        """See call(). A cancelled coroutine stops waiting; the call goes on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                tell = functools.partial(_tell, future, call())
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                tell = functools.partial(_tell, future, None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell)

        return await future if self.submit(work) else call()

    def close(self) -> None:
        """End the threads, when they have done what they were given before."""
        self._closed = True
        for _ in range(len(self._started)):
            self._calls.put(None)

    def _start(self) -> bool:
        try:
            # Not a Thread: starting one waits for it by an Event.
            _thread.start_new_thread(self._work, ())
        except RuntimeError:  # the interpreter is shutting down
            return False
        self._started.append(None)
        return True

    def _work(self) -> None:
        while True:
            self._idle.append(None)
            call = self._calls.get()
            self._idle.pop()
            if call is None:
                return
            try:
                call()
            except Exception:  # noqa: BLE001 - it is logged
                log_exception("a call in the background failed")


def _tell(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    """Set the outcome of a call, unless nobody waits for it any more."""
    if not future.done():
        future.set_result(result) if error is None else future.set_exception(error)
