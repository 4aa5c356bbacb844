"""The thread that does what is due for the grants of a session, and sleeps while nothing is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from ..logs import WARNING, log, log_exception
from ..protocol.actions import FOREVER
from .grant import OwnerRef
from .worker_threads import WorkerThreads


class Chore(Protocol):
    """Something that is done again and again. Times are by the session's clock."""

    def next_due(self) -> float:
        """When there is something to do, if nothing comes up before."""

    def do_due(self, now: float) -> None:
        """Do it, as far as it is due."""


class Heartbeat:
    """Does the chores that it serves when they are due, in a daemon thread.

    That starts, in one of *threads*, when there is first something to see to, and is replaced if it has died.
    """

    def __init__(self, threads: WorkerThreads, now: Callable[[], float]) -> None:
        self.now = now
        self.threads = threads
        self._chores: Sequence[Chore] = ()
        self.adopt: Callable[[OwnerRef], None]
        #: Until when the thread sleeps; 0 while it does not.
        self.wakes_at = FOREVER
        self._mutex = threading.Lock()
        #: Wakes the thread, and takes what was dropped without a release: its `put` may be called anywhere, also by the
        #: garbage collector, and no signal handler can strike in it. Not an Event: see `worker_threads`.
        self.inbox: SimpleQueue[OwnerRef | None] = SimpleQueue()
        #: What it has taken out of there, until that is adopted: an error in one takes nothing from the others.
        self._dropped: deque[OwnerRef] = deque()
        self.thread: threading.Thread | None = None
        #: Why it could not be started.
        self._failure = ""
        self._closed = False

    def serve(self, chores: Sequence[Chore], adopt: Callable[[OwnerRef], None]) -> None:
        """Do *chores*, in this order, and call *adopt* with each reference whose owner is gone."""
        self._chores, self.adopt = chores, adopt

    def see_to(self, due: float) -> None:
        """See to it that the thread runs, and wakes when something is *due*, unless it was closed."""
        if self._closed:
            return
        if self.thread is None or not self.thread.is_alive():
            self.elsewhere(self.start)
        if due < self.wakes_at:
            self.inbox.put(None)

    def elsewhere(self, call: Callable[[], None]) -> None:
        """Make the call, but not in the main thread, for what a signal may not strike: starting a `Thread`."""
        if threading.current_thread() is threading.main_thread():
            self.threads.call(lambda _: call())
        else:
            call()

    def wake(self) -> None:
        """Have it look again at what is due."""
        self.inbox.put(None)

    def close(self) -> None:
        """End the thread, once it has done what it is doing."""
        self._closed = True
        self.inbox.put(None)

    def next_due(self) -> float:
        """When there is something to do, if nothing comes up before."""
        return min(chore.next_due() for chore in self._chores)

    def do_due(self) -> None:
        """Do what is due."""
        now = self.now()
        for chore in self._chores:
            chore.do_due(now)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if self._closed or (self.thread is not None and self.thread.is_alive()):
                return
            before = self._failure
            self.thread, self._failure = start_thread(self._run, "mongolock-heartbeat")  # else with the next lock
        # Not under the mutex: a handler of the log may take a lock.
        if self._failure and not before:
            log(WARNING, "no heartbeat, leases are not renewed", reason=self._failure)

    def _run(self) -> None:
        while True:
            # What is added from here on wakes us: it may be too late for this look.
            self.wakes_at = FOREVER
            try:
                self.wakes_at = due = self.next_due()
                self._sleep(due)
                self.wakes_at = 0.0
                if self._closed:
                    return
                while self._dropped:
                    self.adopt(self._dropped.popleft())
                self.do_due()
            except BaseException:  # noqa: BLE001 - it is logged
                log_exception("the heartbeat failed and goes on")
                time.sleep(0.1)
                self.wake()

    def _sleep(self, due: float) -> None:
        """Sleep until something is *due* or something comes into the inbox, and take out what was dropped."""
        with contextlib.suppress(Empty):
            item = self.inbox.get(timeout=None if due == FOREVER else max(0.0, due - self.now()))
            while True:
                if item is not None:
                    self._dropped.append(item)
                item = self.inbox.get_nowait()


def start_thread(run: Callable[[], object], name: str) -> tuple[threading.Thread | None, str]:
    """Start a daemon thread. Return it, or why that was impossible; at the end of the interpreter that is no news."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        return None, "" if "shutdown" in str(error) else str(error)
    return thread, ""
