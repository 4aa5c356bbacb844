"""Our locks as a driver of tooz, for tooz.tests.test_coordination. In `entry_points` it is registered as one."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from pathlib import Path

import django
import pytest
from django.apps import apps
from django.db import connections

if not apps.ready:  # in a process that the suite starts
    django.setup()

from tooz import coordination, locking
from tooz.coordination import Characteristics

from django_mongolock import LockNotAcquired, MongoLock
from django_mongolock.engine.step import Step

from .processes import Process, document

ENTRY_POINTS = str(Path(__file__).parent / "entry_points")


class Lock(locking.Lock):
    """`tooz.locking.Lock`."""

    def __init__(self, name: bytes, process: Process) -> None:
        super().__init__(name)
        self._key = f"tooz:{name.decode()}"
        self._process = process
        self._held: list[MongoLock] = []

    def acquire(self, blocking: bool | float = True, shared: bool = False, timeout: float | None = None) -> bool:
        wait = timeout if blocking is True else float(blocking)
        lock = self._process.lock(self._key, mode="shared" if shared else "exclusive", reentrant=shared)
        try:
            lock.acquire(wait)
        except LockNotAcquired:
            return False
        self._held.append(lock)
        return True

    def release(self) -> bool:
        return bool(self._held) and self._held.pop().release()

    def break_(self) -> bool:
        """Release it by force, as the admin does."""
        step = Step(remove=tuple(holder["grant"] for holder in document(self._key)["holders"]), force=True)
        return bool(step.remove) and self._process.session.store.apply(self._key, step, 5.0).found


class Driver(coordination.CoordinationDriver):
    """A member is a process of its own."""

    CHARACTERISTICS = (
        Characteristics.DISTRIBUTED_ACROSS_THREADS,
        Characteristics.DISTRIBUTED_ACROSS_PROCESSES,
        Characteristics.DISTRIBUTED_ACROSS_HOSTS,
    )

    def _start(self) -> None:
        self._process = Process()

    def _stop(self) -> None:
        self._process.close()

    def get_lock(self, name: bytes) -> Lock:
        return Lock(name, self._process)


def cases() -> Mapping[str, type[unittest.TestCase]]:
    """The class of the suite. Raises ImportError."""
    from tooz.tests.test_coordination import TestAPI

    return {"Lock": type("Lock", (TestAPI,), {})}


def prepare(monkeypatch: pytest.MonkeyPatch, *, exempt: bool) -> None:
    """Register the driver. A process that the suite starts gets the path, and the database, from this one."""
    monkeypatch.syspath_prepend(ENTRY_POINTS)
    monkeypatch.setenv("TOOZ_TEST_URL", "mongolock://")
    monkeypatch.setenv("MONGODB_NAME", str(connections["mongo"].settings_dict["NAME"]))
