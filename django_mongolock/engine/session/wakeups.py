"""What one waiter waits with, whether it is a thread or a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

from ..protocol.actions import FOREVER, Answer
from ..rule.replies import News


@dataclass(slots=True, eq=False)
class Wakeup:
    """Wakes one waiter: a thread, or a coroutine. Woken before the wait begins, it ends the wait at once."""

    _lock: threading.Lock | None = field(default=None, init=False)
    _future: asyncio.Future[None] | None = field(default=None, init=False)
    _woken: bool = field(default=False, init=False)

    def wake(self) -> None:
        """Wake the waiter. May be called from any thread, and again."""
        self._woken = True
        lock, future = self._lock, self._future
        if lock is not None:
            with contextlib.suppress(RuntimeError):  # woken twice
                lock.release()
        elif future is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits there
                future.get_loop().call_soon_threadsafe(self._wake_coroutine)

    def wait(self, seconds: float) -> None:
        """Block this thread until it is woken, at most so long."""
        self._lock = lock = threading.Lock()
        lock.acquire()
        try:
            if not self._woken:
                # A lock and no condition: a signal handler may raise here, and leaves nothing half done.
                lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._lock, self._woken = None, False

    async def await_(self, seconds: float) -> None:
        """See wait(). Holds no thread."""
        loop = asyncio.get_running_loop()
        self._future = future = loop.create_future()
        # No infinite time. Who is woken too soon looks again.
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
    """What there is to know of a grant while its caller waits.

    began: when it was asked for. back_by: when its caller must be back at the latest. When it was woken, `news` (of a
    bell), `answer` (to a command that another caller sent for it) and `cancelled` say why. last_token: the key's when a
    command last found it in the queue. at_head: the key's when it was last seen to be the first there; -1 if it is not.
    behind: how many stand behind it in its line of this process. counted: its entry counts some of these. sent: a
    command was sent that adds it. place_gone: its entry was not found, so it has to ask again.
    handover_reserved: see `LocalQueue`.
    """

    began: float
    back_by: float = FOREVER
    news: News | None = None
    answer: Answer | None = None
    cancelled: bool = False
    last_token: int = 0
    at_head: int = -1
    behind: int = 0
    counted: bool = False
    sent: bool = False
    place_gone: bool = False
    handover_reserved: bool = False
