"""Our locks with the interface of those of `threading`, for CPython's test.lock_tests."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
import unittest
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType

import pytest

from django_mongolock import LockNotAcquired, mongo_lock, mongo_semaphore
from django_mongolock.backends import get_backend
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.core import COMMAND_THREADS
from django_mongolock.exceptions import LockReentry
from tests.support.looking import new_key


def wait_of(blocking: bool, timeout: float) -> float | None:
    """Our `wait` for the two arguments of threading's locks."""
    if not blocking and timeout != -1:
        raise ValueError("a timeout of a call that does not block")
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError("a longer timeout than threading takes")
    if not blocking:
        return 0.0
    return None if timeout in (-1, threading.TIMEOUT_MAX) else timeout


class Adapter:
    """The common part of the three adapters. Every acquisition is a lock object of ours."""

    error: type[Exception] = RuntimeError

    def __init__(self) -> None:
        self._key = new_key("threading")
        self._held: list[MongoLock] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Return whether it was acquired. A thread that would wait for itself gets LockReentry."""
        lock, wait = self._make(), wait_of(blocking, timeout)
        try:
            self._acquire(lock, wait)
        except LockReentry:
            if wait is None:
                raise
            return False
        except LockNotAcquired:
            return False
        self._held.append(lock)
        return True

    def release(self) -> None:
        if not self._held or not self._held.pop().release():
            raise self.error("released, but not held")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _make(self) -> MongoLock:
        return mongo_lock(self._key)

    def _acquire(self, lock: MongoLock, wait: float | None) -> None:
        lock.acquire(wait)


class Lock(Adapter):
    def locked(self) -> bool:
        return any(lock.held for lock in list(self._held))


class RLock(Adapter):
    """`threading.RLock`. Only its thread releases it, as often as it was acquired."""

    def __init__(self) -> None:
        super().__init__()
        self._by_thread: defaultdict[int, list[MongoLock]] = defaultdict(list)

    @property
    def _held(self) -> list[MongoLock]:
        return self._by_thread[threading.get_ident()]

    @_held.setter
    def _held(self, held: list[MongoLock]) -> None:
        pass

    def _make(self) -> MongoLock:
        return mongo_lock(self._key, reentrant=True)


class Semaphore(Adapter):
    """`threading.Semaphore`. A thread may take several permits of it.

    A thread or task of ours has one permit. Each permit is therefore taken by a task, and released by the thread.
    """

    error = ValueError

    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self._permits = value
        self._make()  # refuses wrong values

    def release(self, n: int = 1) -> None:
        for _ in range(n):
            super().release()

    def _make(self) -> MongoLock:
        return mongo_semaphore(self._key, self._permits)

    def _acquire(self, lock: MongoLock, wait: float | None) -> None:
        asyncio.run(lock.aacquire(wait))


def cases() -> Mapping[str, type[unittest.TestCase]]:
    """Return the classes of the suite, for our locks, or raise ImportError."""
    suite = importlib.import_module("test.lock_tests")
    return {
        "Lock": type("Lock", (suite.LockTests,), {"locktype": Lock}),
        "RLock": type("RLock", (suite.RLockTests,), {"locktype": RLock}),
        "Semaphore": type("Semaphore", (suite.SemaphoreTests,), {"semtype": Semaphore}),
        "BoundedSemaphore": type("BoundedSemaphore", (suite.BoundedSemaphoreTests,), {"semtype": Semaphore}),
    }


def prepare(monkeypatch: pytest.MonkeyPatch, *, exempt: bool) -> None:
    """Start the threads of the session, because the suite counts those that a test leaves behind.

    A test that is to fail need not wait for half a minute first.
    """
    if exempt:
        monkeypatch.setattr("test.support.SHORT_TIMEOUT", 0.5)
    mine, another = mongo_lock(new_key("threading"), wait=0.01), get_backend().new_session()
    with contextlib.suppress(LockNotAcquired), MongoLock(lambda: another, mine.keys, mine.terms, mine.options, dict):
        mine.acquire()
    another.close()
    session = get_backend().session()
    all_at_work = threading.Barrier(COMMAND_THREADS + 1, timeout=10)
    for _ in range(COMMAND_THREADS):
        session.threads.submit(all_at_work.wait, priority=0)
    all_at_work.wait()
