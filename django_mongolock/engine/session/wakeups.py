"""The wake-up and the state of one waiter, a thread or a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

from ..protocol.actions import FOREVER, Answer
from ..rule.replies import News


@dataclass(slots=True, eq=False)
class Wakeup:
    """The wake-up of one waiter: a thread, or a coroutine. A wake-up before the wait begins ends the wait at once."""

    _lock: threading.Lock | None = field(default=None, init=False)
    _future: asyncio.Future[None] | None = field(default=None, init=False)
    _woken: bool = field(default=False, init=False)

    def wake(self) -> None:
        """Wake the waiter. May be called from any thread, and repeatedly."""
        self._woken = True
        lock, future = self._lock, self._future
        if lock is not None:
            with contextlib.suppress(RuntimeError):  # woken twice
                lock.release()
        elif future is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so no coroutine waits there
                future.get_loop().call_soon_threadsafe(self._wake_coroutine)

    def wait(self, seconds: float) -> None:
        """Block this thread until it is woken, at most *seconds*."""
        self._lock = lock = threading.Lock()
        lock.acquire()
        try:
            if not self._woken:
                # Use a lock, not a condition. If a signal handler raises here, a lock is left in no half-done state.
                lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._lock, self._woken = None, False

    async def await_(self, seconds: float) -> None:
        """See wait(). Holds no thread."""
        loop = asyncio.get_running_loop()
        self._future = future = loop.create_future()
        # The event loop accepts no infinite time. A waiter that is woken too soon looks again.
        timer = loop.call_later(min(seconds, 86_400), self._wake_coroutine)
        try:
            if not self._woken:
                await future
        finally:
            timer.cancel()
            self._future, self._woken = None, False

    def _wake_coroutine(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


@dataclass(slots=True, eq=False)
class Waiting(Wakeup):
    """The state of one wait.

    After a wake-up, `news` (of a bell), `answer` (to a command that another caller sent) and `cancelled` say why.

    - began: time of the request.
    - back_by: latest time at which its caller must be back.
    - seen_at: time of the last answer that found the grant in the queue.
    - last_token: token of the key when a command last found the grant in the queue.
    - at_head: token of the key when the grant was last seen at the head of the queue, -1 if it is not at the head.
    - behind: number of grants behind it in its line of this process.
    - counted: whether the entry counts some of these.
    - sent: whether a command that adds the grant was sent.
    - place_gone: whether the entry was not found. The waiter has to ask again.
    - handover_reserved: see `LocalQueue`.
    """

    began: float
    back_by: float = FOREVER
    news: News | None = None
    answer: Answer | None = None
    cancelled: bool = False
    seen_at: float = 0.0
    last_token: int = 0
    at_head: int = -1
    behind: int = 0
    counted: bool = False
    sent: bool = False
    place_gone: bool = False
    handover_reserved: bool = False
