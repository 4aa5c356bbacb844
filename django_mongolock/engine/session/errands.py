"""What a session sends besides the commands of locks: calls of other parts, safe from signals, and in the background.

Document locks and fencing send through it.
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

#: How many tries without an answer there are at most; then what it was about is left.
MOST_TRIES: Final = 100


@dataclass(order=True, slots=True)
class Errand:
    """Something that is tried in the background. due: when the next time, by the local clock. tries: how often it was
    tried. pauses: seconds before each try."""

    due: float
    number: int
    call: Callable[[], bool | None] = field(compare=False)
    pauses: Sequence[float] = field(compare=False)
    tries: int = field(default=0, compare=False)


class Errands:
    """Makes calls in *threads*: what is waited for with the first of these *priorities*, else with the second."""

    def __init__(self, threads: WorkerThreads, priorities: tuple[int, int] = (0, 0)) -> None:
        self._threads = threads
        self._waited_for, self._priority = priorities
        self._inbox: SimpleQueue[Errand] = SimpleQueue()
        self._numbers = itertools.count()
        #: One for each errand that has not been tried yet.
        self._untried: list[None] = []
        self._keeping_time = _thread.allocate_lock()

    def send(self, call: Callable[[float], T], timeout: float) -> T:
        """Make a *call*, which gets the seconds that are left. For the main thread another one makes it: what a signal
        handler raises there must not strike inside the driver."""
        if threading.current_thread() is threading.main_thread():
            return self._threads.call(call, timeout, priority=self._waited_for)
        return call(timeout)

    async def asend(self, call: Callable[[float], T], timeout: float) -> T:  # noqa: ASYNC109 - the thread has to know it
        """See send()."""
        return await self._threads.acall(call, timeout, priority=self._waited_for)

    def in_background(self, call: Callable[[], bool | None], pauses: Sequence[float]) -> None:
        """Have it tried after each of the *pauses* until *call* returns True.

        If the last try had no answer (None), it is tried again after the last pause. Never waits: the caller may be
        handling a signal.
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
        """Have each errand tried when it is due. One thread does this at a time, for as long as there are any."""
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
                del self._untried[-1:]  # none where the process ends
        errand.tries += 1
        is_last = errand.tries >= len(errand.pauses)
        if done or (done is False and is_last) or errand.tries >= MOST_TRIES:
            return
        errand.due = clock.now() + errand.pauses[min(errand.tries, len(errand.pauses) - 1)]
        self._put(errand)
