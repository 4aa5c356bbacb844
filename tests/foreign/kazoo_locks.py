"""Our locks with the interface of kazoo's recipes, for kazoo.tests.test_lock."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import unittest
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace, TracebackType
from typing import Any, Final

import pytest

from django_mongolock import LockNotAcquired
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockCancelled, LockReentry

from .processes import Process, forget, labels

#: Seconds until a waiter goes on that was granted the lock. Between two holders the suite has to see that there is
#: none: if the hand-over is faster than its thread, it waits for ever.
PAUSE = 0.2


class Lock:
    """`kazoo.recipe.lock.Lock`. Each is a process of its own: who waits behind another one of its process is counted
    in the document, but has no name there."""

    options: Mapping[str, Any] = MappingProxyType({})
    #: Seconds that an acquisition waits that names none; None: without end.
    longest: float | None = None

    def __init__(self, path: str, identifier: str | None = None) -> None:
        self.key = f"kazoo:{path}"
        self.process = Process(identifier or "")
        self._held: MongoLock | None = None
        self._wanted: MongoLock | None = None
        self.cancelled = False
        self.wake_event = threading.Event()

    @property
    def is_acquired(self) -> bool:
        return self._held is not None and self._held.held

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        errors = importlib.import_module("kazoo.exceptions")
        self.cancelled = False
        self._wanted = lock = self.process.lock(self.key, **self.options)
        try:
            lock.acquire((timeout or self.longest) if blocking else 0)
        except LockReentry:
            return False
        except LockCancelled as error:
            raise errors.CancelledError from error
        except LockNotAcquired as error:
            if blocking:
                raise errors.LockTimeout from error
            return False
        finally:
            self._wanted = None
        if lock.waited > 0.01:
            time.sleep(PAUSE)
        self._held = lock
        return True

    def release(self) -> bool:
        held, self._held = self._held, None
        return held is not None and held.release()

    def cancel(self) -> None:
        """End the wait, also one that is about to begin."""
        self.cancelled = True
        while (wanted := self._wanted) is not None:
            wanted.cancel()
            time.sleep(0.01)

    def contenders(self) -> list[str]:
        return labels(self.key, "holders", "waiters")

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class ReadLock(Lock):
    options = MappingProxyType({"mode": "shared"})


class Semaphore(Lock):
    def __init__(self, path: str, identifier: str | None = None, max_leases: int = 1) -> None:
        super().__init__(path, identifier)
        self.options = {"permits": max_leases}

    def lease_holders(self) -> list[str]:
        return labels(self.key, "holders")


KINDS: Final = {"Lock": Lock, "WriteLock": Lock, "ReadLock": ReadLock, "Semaphore": Semaphore}


class Client:
    """`kazoo.client.KazooClient`, as far as locks need it."""

    #: Twenty times as long as the suite says. A thread of its barrier that looks too late, when the first one has left
    #: again, waits for ever: on a busy machine, a hundredth of a second is too late.
    handler = SimpleNamespace(sleep_func=lambda seconds: time.sleep(20 * seconds))

    def __init__(self) -> None:
        self._made: list[Lock] = []

    def __getattr__(self, kind: str) -> Callable[..., Lock]:
        if kind not in KINDS:
            raise AttributeError(kind)
        return partial(self._make, KINDS[kind])

    def _make(self, kind: type[Lock], *arguments: Any, **options: Any) -> Lock:
        self._made.append(kind(*arguments, **options))
        return self._made[-1]

    def expire(self) -> None:
        """End the session of this client: what its locks hold and wait for is gone."""
        for lock in self._made:
            forget(lock.key, [lock.process])
            lock.wake_event.set()

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to stop."""


class OnOurs:
    """What kazoo's harness does with a cluster of ZooKeeper servers."""

    client: Client
    threads_made: list[threading.Thread]

    def tearDown(self) -> None:
        """Wait for no thread without end: where a test has failed, its threads may never end. They are daemons."""
        while self.threads_made:
            self.threads_made.pop().join(5)

    def setup_zookeeper(self) -> None:
        self.client = self._get_client()

    def teardown_zookeeper(self) -> None:
        """There is no cluster."""

    def _get_client(self) -> Client:
        return Client()

    def expire_session(self, event_factory: object) -> None:
        self.client.expire()

    @classmethod
    def tearDownClass(cls) -> None:
        """There is no cluster."""


def _suite() -> Any:
    """The module, imported without the two packages with which kazoo's harness makes keys for a ZooKeeper.

    One of them, pyjks, needs a C compiler, and PyMongo would use the other one, pyOpenSSL, for its connections.
    """
    absent = [name for name in ("jks", "OpenSSL") if importlib.util.find_spec(name) is None]
    sys.modules.update((name, ModuleType(name)) for name in absent)
    try:
        return importlib.import_module("kazoo.tests.test_lock")
    finally:
        for name in absent:
            del sys.modules[name]


def cases() -> Mapping[str, type[unittest.TestCase]]:
    """The classes of the suite, for our locks. Raises ImportError."""
    suite = _suite()
    return {
        "Lock": type("Lock", (OnOurs, suite.KazooLockTests), {"thread_count": 6}),
        "Semaphore": type("Semaphore", (OnOurs, suite.TestSemaphore), {}),
    }


def prepare(monkeypatch: pytest.MonkeyPatch, *, exempt: bool) -> None:
    """A test that is to fail need not wait for ever before."""
    if exempt:
        monkeypatch.setattr(Lock, "longest", 0.5)
