"""Calls of a session besides the commands of locks, safe from signals or in the background.

Document locks and fencing send their commands this way.
"""

from __future__ import annotations

import _thread
import functools
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from .. import clock
from .worker_threads import WorkerThreads

T = TypeVar("T")

#: The most tries without an answer. After these the call is given up.
MOST_TRIES: Final = 100


@dataclass(order=True, slots=True)
class Errand:
    """A call that is tried in the background.

    - due: time of the next try, by the local clock.
    - tries: number of tries so far.
    - pauses: seconds before each try.
    """

    due: float
    number: int
    call: Callable[[], bool | None] = field(compare=False)
    pauses: Sequence[float] = field(compare=False)
    tries: int = field(default=0, compare=False)


class Errands:
    """Calls made in *threads*.

    Calls that a caller waits for use `priorities[0]`, background calls use `priorities[1]`.
    """

    def __init__(self, threads: WorkerThreads, priorities: tuple[int, int] = (0, 0)) -> None:
        self._threads = threads
        self._waited_for, self._priority = priorities
        self._inbox: SimpleQueue[Errand] = SimpleQueue()
        self._numbers = itertools.count()
        #: One item for each errand that has not been tried yet.
        self._untried: list[None] = []
        self._keeping_time = _thread.allocate_lock()

    def send(self, call: Callable[[float], T], timeout: float) -> T:
        """Make a *call* with the number of seconds left.

        Another thread makes the calls of the main thread. An exception of a signal handler must not strike inside the
        driver.
        """
        if threading.current_thread() is threading.main_thread():
            return self._threads.call(call, timeout, priority=self._waited_for)
        return call(timeout)

    async def asend(self, call: Callable[[float], T], timeout: float) -> T:  # noqa: ASYNC109 - the thread has to know it
        """See send()."""
        return await self._threads.acall(call, timeout, priority=self._waited_for)

    def in_background(self, call: Callable[[], bool | None], pauses: Sequence[float]) -> None:
        """Try *call* after each of the *pauses* until it returns True.

        If the last try had no answer (None), the call is tried again after the last pause. This method never waits,
        because the caller may be handling a signal.
        """
        self._untried.append(None)
        self._put(Errand(clock.now() + pauses[0], next(self._numbers), call, pauses))

    def flush(self, timeout: float) -> None:
        """Wait until each errand has been tried once, at most *timeout* seconds."""
        end = clock.now() + timeout
        while self._untried and clock.now() < end:
            time.sleep(0.01)

    def _put(self, errand: Errand) -> None:
        self._inbox.put(errand)
        if not self._threads.submit(self._keep_time, priority=self._priority):
            self._untried.clear()  # the process ends, and has no threads any more

    def _keep_time(self) -> None:
        """Try each errand when it is due. Only one thread does this at a time, as long as there are errands."""
        while not self._inbox.empty():
            if not self._keeping_time.acquire(blocking=False):
                return
            try:
                self._wait()
            finally:
                self._keeping_time.release()

    def _wait(self) -> None:
        waiting: list[Errand] = []
        while True:
            with suppress(Empty):
                left = max(0.0, waiting[0].due - clock.now()) if waiting else 0.0
                heapq.heappush(waiting, self._inbox.get(timeout=left))
            if not waiting:
                return
            while waiting and waiting[0].due <= clock.now():
                errand = heapq.heappop(waiting)
                self._threads.submit(functools.partial(self._try, errand), priority=self._priority)

    def _try(self, errand: Errand) -> None:
        try:
            done = errand.call()
        finally:
            if errand.tries == 0:
                del self._untried[-1:]  # the list is empty if the process ends
        errand.tries += 1
        is_last = errand.tries >= len(errand.pauses)
        if done or (done is False and is_last) or errand.tries >= MOST_TRIES:
            return
        errand.due = clock.now() + errand.pauses[min(errand.tries, len(errand.pauses) - 1)]
        self._put(errand)
