"""A waiter for a lock in a thread of its own."""

import threading
from collections.abc import Callable
from typing import Self

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockError

InThread = Callable[..., threading.Thread]


class Waiter:
    """A thread that takes *lock* (after *first*, if given), and keeps it until it is told to release it."""

    def __init__(self, in_thread: InThread, lock: MongoLock, first: MongoLock | None = None) -> None:
        self.lock = lock
        self.first = first
        self.error: LockError | None = None
        self.at = 0.0
        self._ready, self._done = threading.Event(), threading.Event()
        self._goes, self._lets_go = threading.Event(), threading.Event()
        self.thread = in_thread(self._run)

    def _run(self) -> None:
        if self.first is not None:
            with self.first:
                self._ready.set()
                self._goes.wait(60)
                self._take()
        else:
            self._take()

    def _take(self) -> None:
        try:
            with self.lock as lock:
                self.at = clock.now()
                assert lock.held
                self._done.set()
                self._lets_go.wait(60)
        except LockError as error:
            self.at = self.at or clock.now()
            self.error = error
        finally:
            self._done.set()

    def ready(self) -> Self:
        """Wait until the thread has its first lock."""
        assert self._ready.wait(10)
        return self

    def go(self) -> Self:
        """Let the thread wait for its second lock."""
        self._goes.set()
        return self

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def has_it(self) -> bool:
        return self.done and self.error is None

    def end(self, seconds: float = 10) -> Self:
        """Wait until the thread has the lock, or has failed."""
        assert self._done.wait(seconds)
        return self

    def let_go(self) -> Self:
        """Let the thread release the lock, once it has it."""
        self._lets_go.set()
        return self
