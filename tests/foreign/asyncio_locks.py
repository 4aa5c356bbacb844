"""Our locks with the interface of those of `asyncio`, for CPython's test.test_asyncio.test_locks.

The suite counts turns of the event loop: after so many, a lock must have been handed over. Ours are handed over by a
server. So `asyncio.sleep(0)` of the suite waits here until all who could go on have gone on.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
import unittest
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pytest

from django_mongolock import mongo_lock, mongo_semaphore
from django_mongolock.engine.lock.lock import MongoLock
from tests.support.looking import new_key

#: The longest time until all have gone on, in seconds.
LIMIT = 10

_all: weakref.WeakSet[Semaphore] = weakref.WeakSet()


class Waiter:
    def __init__(self) -> None:
        self._task = asyncio.current_task()

    def cancelled(self) -> bool:
        return self._task is not None and self._task.cancelling() > 0

    done = cancelled


class Semaphore:
    """`asyncio.Semaphore`, of which a task may take several permits, and which any task may release.

    A thread or task of ours has one permit at most. So each permit is taken by a task of its own. With 0, the only one
    is taken.
    """

    error: type[Exception] = ValueError

    def __init__(self, value: int = 1) -> None:
        self._key = new_key("asyncio")
        self._permits = value or 1
        self._held: list[MongoLock] = []
        self._waiters: list[Waiter] = []
        first = self._make()  # refuses wrong values
        if not value:
            taker = threading.Thread(target=asyncio.run, args=[first.aacquire(0)])
            taker.start()
            taker.join()
            self._held.append(first)
        _all.add(self)

    @property
    def _value(self) -> int:
        return self._permits - sum(lock.held for lock in self._held)

    @property
    def settled(self) -> bool:
        """Whether all who wait have to go on waiting."""
        return not any(waiter.cancelled() for waiter in self._waiters) and not (self._waiters and self._value)

    def locked(self) -> bool:
        return not self._value

    async def acquire(self) -> bool:
        waiter, lock = Waiter(), self._make()
        self._waiters.append(waiter)
        try:
            await self._acquire(lock)
        finally:
            self._waiters.remove(waiter)
        self._held.append(lock)
        return True

    def release(self) -> None:
        if not self._held or not self._held.pop(0).release():
            raise self.error("released, but not held")

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._held.pop(0).arelease()

    def _make(self) -> MongoLock:
        return mongo_semaphore(self._key, self._permits)

    async def _acquire(self, lock: MongoLock) -> None:
        task = asyncio.create_task(lock.aacquire(None))
        try:
            await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled():
                await lock.arelease()
            raise


class BoundedSemaphore(Semaphore):
    """All of ours are bounded."""


class Lock(Semaphore):
    """`asyncio.Lock`, acquired by the task itself."""

    error = RuntimeError

    def __init__(self) -> None:
        super().__init__()

    def _make(self) -> MongoLock:
        return mongo_lock(self._key)

    async def _acquire(self, lock: MongoLock) -> None:
        await lock.aacquire(None)


class Asyncio:
    Lock, Semaphore, BoundedSemaphore = Lock, Semaphore, BoundedSemaphore

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        """Sleep; with 0, let all others go on as far as they can."""
        if seconds:
            return await asyncio.sleep(seconds)
        await asyncio.sleep(0.05)  # time for a wrong hand-over to show
        end = time.monotonic() + LIMIT
        while not all(lock.settled for lock in list(_all)) and time.monotonic() < end:  # noqa: ASYNC110 - see LIMIT
            await asyncio.sleep(0.002)
        return None


def cases() -> Mapping[str, type[unittest.TestCase]]:
    """The classes of the suite, for our locks. Raises ImportError."""
    suite: Any = importlib.import_module("test.test_asyncio.test_locks")
    suite.asyncio = Asyncio()
    return {"Lock": suite.LockTests, "Semaphore": suite.SemaphoreTests}


def prepare(monkeypatch: pytest.MonkeyPatch, *, exempt: bool) -> None:
    _all.clear()
