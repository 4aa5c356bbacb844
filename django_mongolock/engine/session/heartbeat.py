"""The thread that looks after the grants of a session, and sleeps while there is nothing to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ..grant import Grant, OwnerRef
from ..logs import log_exception

#: What was dropped without a release: a grant; or the owner reference of one whose cleaning up was struck by a signal.
Dropped = Grant | OwnerRef


class Heartbeat:
    """Calls *look_after* whenever something is due, and with what was dropped, in a daemon thread.

    The thread starts when there is first something to see to, and is replaced if it has died.

    next_due: when something is due, by the clock *now*. elsewhere: calls what starts a thread, not in the main thread.
    """

    def __init__(
        self,
        next_due: Callable[[], float],
        look_after: Callable[[list[Dropped]], None],
        elsewhere: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        self._next_due = next_due
        self._look_after = look_after
        self._elsewhere = elsewhere
        self._now = now
        self._wakes_at = float("inf")
        self._mutex = threading.Lock()
        #: Wakes the thread, and takes what was dropped: its `put` may be called anywhere, also by the garbage
        #: collector, and no signal handler can strike in it. Not an Event: see `worker_threads`.
        self.inbox: SimpleQueue[Dropped | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def see_to(self, due: float) -> None:
        """See to it that the thread runs, and wakes when something is *due*."""
        if self._thread is None or not self._thread.is_alive():
            self._elsewhere(self._start)
        if due < self._wakes_at:
            self.inbox.put(None)

    def wake(self) -> None:
        """Have it look again at what is due."""
        self.inbox.put(None)

    def close(self) -> None:
        """End the thread, once it has done what it is doing."""
        self._closed = True
        self.inbox.put(None)

    def _start(self) -> None:
        with self._mutex:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(target=self._run, name="mongolock-heartbeat", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down, and ends every lease
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            # Whoever comes from here on wakes us: what it adds may be too late for this look.
            self._wakes_at = float("inf")
            try:
                self._wakes_at = due = self._next_due()
                dropped = self._sleep(due)
                self._wakes_at = 0.0
                if self._closed:
                    return
                self._look_after(dropped)
            except BaseException:  # noqa: BLE001 - it is logged
                log_exception("the heartbeat failed and goes on")
                time.sleep(0.1)

    def _sleep(self, due: float) -> list[Dropped]:
        """Sleep until something is *due* or something comes into the inbox; return what was dropped."""
        dropped: list[Dropped] = []
        with contextlib.suppress(Empty):
            item = self.inbox.get(timeout=None if due == float("inf") else max(0.0, due - self._now()))
            while True:
                if item is not None:
                    dropped.append(item)
                item = self.inbox.get_nowait()
        return dropped
