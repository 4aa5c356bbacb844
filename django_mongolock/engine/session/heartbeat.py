"""The thread that runs the periodic tasks of a session, and sleeps while none is due."""

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
from .lanes import RENEWAL
from .worker_threads import WorkerThreads


class PeriodicTask(Protocol):
    """A periodic task. Times are by the session's clock."""

    def next_due(self) -> float:
        """Return the time of the next run, if nothing comes up before."""

    def do_due(self, now: float) -> None:
        """Do the work that is due."""


class Heartbeat:
    """The runner of periodic tasks, in a daemon thread.

    The thread is started from one of *threads* when the first task is scheduled. A dead thread is replaced.
    """

    def __init__(self, threads: WorkerThreads, now: Callable[[], float]) -> None:
        self.now = now
        self.threads = threads
        self._tasks: Sequence[PeriodicTask] = ()
        self.adopt: Callable[[OwnerRef], None]
        #: The time until which the thread sleeps, 0 while it is awake.
        self.wakes_at = FOREVER
        self._mutex = threading.Lock()
        #: The queue that wakes the thread, and receives the references of dropped locks. The garbage collector may call
        #: `put` too, and no signal handler can strike in it. An Event would not be safe, see `worker_threads`.
        self.inbox: SimpleQueue[OwnerRef | None] = SimpleQueue()
        #: The references taken out of the inbox but not adopted yet. An error in one of them does not lose the others.
        self._dropped: deque[OwnerRef] = deque()
        self.thread: threading.Thread | None = None
        #: The reason why the thread could not be started.
        self._failure = ""
        self._closed = False

    def set_tasks(self, tasks: Sequence[PeriodicTask], adopt: Callable[[OwnerRef], None]) -> None:
        """Run *tasks* in this order, and call *adopt* with each reference whose owner is gone."""
        self._tasks, self.adopt = tasks, adopt

    def schedule(self, due: float) -> None:
        """Ensure that the thread runs and wakes at *due*. After close(), do nothing."""
        if self._closed:
            return
        if self.thread is None or not self.thread.is_alive():
            # A signal must not strike while a `Thread` is started.
            self.threads.off_main_thread(self.start, priority=RENEWAL)
        if due < self.wakes_at:
            self.inbox.put(None)

    def wake(self) -> None:
        """Have the thread look again at what is due."""
        self.inbox.put(None)

    def close(self) -> None:
        """End the thread after its current work."""
        self._closed = True
        self.inbox.put(None)

    def next_due(self) -> float:
        """Return the time of the next task, if nothing comes up before."""
        return min(task.next_due() for task in self._tasks)

    def do_due(self) -> None:
        """Run the tasks that are due."""
        now = self.now()
        for task in self._tasks:
            task.do_due(now)

    def start(self, _left: float = FOREVER) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if self._closed or (self.thread is not None and self.thread.is_alive()):
                return
            before = self._failure
            # a failed start is repeated with the next lock
            self.thread, self._failure = start_thread(self._run, "mongolock-heartbeat")
        # Log without the mutex, because a handler of the log may take a lock.
        if self._failure and not before:
            log(WARNING, "no heartbeat, leases are not renewed", reason=self._failure)

    def _run(self) -> None:
        while True:
            # Work that is added from here on wakes the thread, because this look may miss it.
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
        """Sleep until *due* or until an item comes into the inbox, and take out the dropped references."""
        with contextlib.suppress(Empty):
            item = self.inbox.get(timeout=None if due == FOREVER else max(0.0, due - self.now()))
            while True:
                if item is not None:
                    self._dropped.append(item)
                item = self.inbox.get_nowait()


def start_thread(run: Callable[[], object], name: str) -> tuple[threading.Thread | None, str]:
    """Start a daemon thread. Return the thread, or the reason for the failure.

    The reason is empty at the end of the interpreter, because that failure is no news.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        return None, "" if "shutdown" in str(error) else str(error)
    return thread, ""
