"""Locks in memory for tests. A test can hold them as another process, lose them and check them."""

from __future__ import annotations

import threading
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model
from django.dispatch import Signal
from django.test.utils import TestContextDecorator

from ..backends import get_backend, put_backends_back, set_backends_aside
from ..conf import MEMORY, get_settings, override
from ..engine.lock.lock import MongoLock
from ..engine.rule.options import LockOptions, Seconds, as_seconds
from ..engine.session.grant import State
from ..engine.text_checks import check_key
from ..keys import as_key
from ..locks import LockMode, make_lock
from ..signals import EVENTS
from .memory import MemoryLockBackend, exchange_servers, own_sessions
from .memory_server import MemoryServer, MemorySession

__all__ = ["HeldLock", "LockTestMixin", "MemoryLocks", "override_locks"]

Key = str | Model

#: The attributes in which `MemoryLocks` records signals.
_RECORDED: Final = {EVENTS[name]: name for name in ("acquired", "released", "lost", "contended")}


class HeldLock:
    """A lock that is held as if by another process.

    The lock is renewed until it is released (``with`` releases it, too), or until the end of the test.
    """

    def __init__(self, lock: MongoLock, session: MemorySession) -> None:
        self.lock = lock
        self._session = session

    @property
    def held(self) -> bool:
        """Whether the lock is still held. False once a forced release was noticed."""
        return self.lock.held

    @property
    def release_requested(self) -> str | None:
        """The requester of its release, as text, once the next renewal has read it. See `MemoryLocks.advance`."""
        return self.lock.release_requested

    def release(self) -> None:
        """Release the lock. The first waiter gets it."""
        self.lock.release()
        self._session.close()

    def die(self) -> None:
        """Kill the process of the lock. The lock is no longer renewed, and ends with its lease."""
        self._session.die()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class MemoryLocks:
    """The locks of a test.

    `acquired`, `released`, `lost` and `contended` are lists of keys, in order and without MONGOLOCK["KEY_PREFIX"]. The
    lists contain the keys that the code under test acquired, released, lost, or found taken. Locks that the test holds
    as another process are not included.

    - using: DATABASES alias (MONGOLOCK["DATABASE"]).
    """

    def __init__(self, using: str | None = None) -> None:
        self.acquired: list[str] = []
        self.released: list[str] = []
        self.lost: list[str] = []
        self.contended: list[str] = []
        self._using = using
        self._held: list[HeldLock] = []

    def hold(
        self,
        key: Key,
        *,
        mode: LockMode = "exclusive",
        permits: int | None = None,
        lease: Seconds | None = None,
        owner: str | None = None,
        label: str = "another process",
    ) -> HeldLock:
        """Hold *key* as another process, from now on. Raises LockNotAcquired.

        Code in the thread of the test would wait for the key in vain, because the test cannot release it meanwhile.
        Such a wait ends at once, with the clock moved to its end.

        - permits: as in a semaphore.
        """
        session = self._backend.other_process()
        options = LockOptions(
            mode=mode, permits=permits, wait=0, lease=as_seconds(lease), owner=owner, using=self._using
        )
        made = make_lock((key,), options)
        facts: dict[str, str | int] = {"host": "elsewhere", "pid": 1, "thread": "MainThread", "label": label}
        lock = MongoLock(lambda: session, made.keys, made.terms, made.options, lambda: facts)
        try:
            # not acquire(), because that warns of blocking calls in a coroutine
            session.run(lock._own.acquire_all(session, 0))
        except BaseException:
            session.close()
            raise
        self._held.append(HeldLock(lock, session))  # keep the lock held if the test drops it
        return self._held[-1]

    def lose(self, key: Key) -> None:
        """Take *key* from the code under test, and tell that code at once.

        Raises AssertionError if the key is not held.
        """
        if not self._backend.session().lose(self._full(key)):
            raise AssertionError(f"the code under test does not hold {self._full(key)!r}: {self._summary()}")

    def advance(self, seconds: Seconds) -> None:
        """Move the clock by *seconds*. Locks are renewed meanwhile, unless their process has died (`HeldLock.die`)."""
        self._server.advance(as_seconds(seconds))

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        """Within the block, let MongoDB be away: acquiring raises LockBackendFailed, and no lock is renewed."""
        self._server.away = threading.current_thread()
        try:
            yield
        finally:
            self._server.away = None

    def held(self) -> list[str]:
        """Return the keys that are held now, in alphabetical order."""
        now = self._server.time
        documents = sorted(self._server.documents.copy().items())
        return [self._bare(key) for key, document in documents if any(e["until"] > now for e in document["holders"])]

    def waiting(self, key: Key) -> int:
        """Return the number of threads and tasks that wait for *key*.

        A waiter behind another one of its process counts once the place of that one in the queue is renewed, within
        seconds.
        """
        document = self._server.documents.get(self._full(key), {})
        now = self._server.time
        return sum(1 + e.get("behind", 0) for e in document.get("waiters", []) if e["until"] > now)

    def assert_locked(self, key: Key, times: int | None = None) -> None:
        """Assert that the code under test has acquired *key*, at least once or exactly so many *times*."""
        name = self._plain(key)
        found = self.acquired.count(name)
        if (times is None and not found) or times not in (None, found):
            wanted = "at all" if times is None else f"{times} times, but {found} times"
            raise AssertionError(f"{name!r} was not locked {wanted}: {self._summary()}")

    def assert_not_locked(self, key: Key) -> None:
        """Assert that the code under test has never acquired *key*."""
        if self._plain(key) in self.acquired:
            raise AssertionError(f"{self._plain(key)!r} was locked: {self._summary()}")

    def assert_free(self, *keys: Key) -> None:
        """Assert that none of *keys* is held now. Without keys, assert that no key at all is held."""
        wanted = [self._plain(key) for key in keys]
        if found := [key for key in self.held() if key in wanted or not keys]:
            raise AssertionError(f"still held: {', '.join(map(repr, found))}")

    def assert_released(self) -> None:
        """Assert that the code under test holds no lock, waits for none, and has dropped none.

        Locks that the test holds as another process do not count.
        """
        if left := self._left_behind():
            raise AssertionError(left)

    def _left_behind(self) -> str:
        left = [text for session in own_sessions() for text in _left_over(session)]
        return f"the test has left locks behind: {'; '.join(left)}" if left else ""

    def _summary(self) -> str:
        return f"acquired: {', '.join(map(repr, self.acquired)) or 'none'}"

    @property
    def _backend(self) -> MemoryLockBackend:
        backend = get_backend(self._using)
        if not isinstance(backend, MemoryLockBackend):
            raise ImproperlyConfigured(f'MONGOLOCK["BACKEND"] is no longer {MEMORY!r}')
        return backend

    @property
    def _server(self) -> MemoryServer:
        return self._backend.server

    def _full(self, key: Key) -> str:
        return check_key(as_key(key), get_settings().KEY_PREFIX)

    def _plain(self, key: Key) -> str:
        return self._bare(self._full(key))

    def _bare(self, key: str) -> str:
        return key.removeprefix(get_settings().KEY_PREFIX)

    def _record(self, signal: Signal, key: str, **facts: object) -> None:
        if _listening[-1:] == [self]:
            getattr(self, _RECORDED[signal]).append(self._bare(key))

    def _listen(self) -> None:
        _listening.append(self)
        for signal in _RECORDED:
            signal.connect(self._record)

    def _close(self) -> None:
        for signal in _RECORDED:
            signal.disconnect(self._record)
        _listening.remove(self)


#: The locks of the running tests, the innermost last. Only the innermost records.
_listening: Final[list[MemoryLocks]] = []


def _left_over(session: MemorySession) -> Iterator[str]:
    """Yield, in words, the locks that a session holds, waits for, or has dropped."""
    for grant in list(session.registry.grants.values()):
        if grant.held:
            yield f"{grant.key!r} is still held, acquired at {grant.acquired_from}"
        elif grant.state is State.WAITING:
            yield f"a thread or task still waits for {grant.key!r}"
    while session.dropped.told:
        yield session.dropped.told.popleft()


class override_locks(TestContextDecorator):  # noqa: N801 - a sibling of override_settings
    """Keep the locks in memory, and return a `MemoryLocks`: ``with override_locks() as locks:``.

    The class also decorates functions, coroutine functions and test case classes, like Django's ``override_settings``.
    An inner use begins without locks, and the outer one keeps its own.

    - attr_name, kwarg_name: attribute of the test case, or argument, that receives the locks.
    - strict: whether a lock that is left held at the end is an AssertionError, rather than a warning. None: neither.
    - values: other settings of MONGOLOCK during the test, such as ``WAIT=0``.
    """

    def __init__(
        self,
        attr_name: str | None = None,
        kwarg_name: str | None = None,
        *,
        strict: bool | None = False,
        **values: Any,
    ) -> None:
        super().__init__(attr_name=attr_name, kwarg_name=kwarg_name)
        self.strict = strict
        self.values = values

    def enable(self) -> MemoryLocks:
        """Keep the locks in memory from now on."""
        set_backends_aside()
        self._before = override({"BACKEND": MEMORY, **self.values})
        self._servers = exchange_servers({})
        self._locks = MemoryLocks()
        self._locks._listen()
        return self._locks

    def __enter__(self) -> MemoryLocks:  # type: ignore[override]
        return self.enable()

    def disable(self) -> None:
        """Restore the backend of the project. Locks that are still held are reported, and gone."""
        self._end(self.strict)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(self.strict if error is None else None)  # after an error, locks may be left behind

    def _end(self, strict: bool | None) -> None:
        left = None if strict is None else self._locks._left_behind()
        self._locks._close()
        for server in exchange_servers(self._servers).values():
            for session in list(server.sessions):
                session.die()
        override(self._before)
        put_backends_back()
        if left and strict:
            raise AssertionError(left)
        if left:
            warnings.warn(left, RuntimeWarning, stacklevel=3)


class LockTestMixin(unittest.TestCase):
    """A mixin for any Django test case. Each test has locks of its own in memory, as `mongolock`.

    No database is needed. Locks that ``setUpClass`` and ``setUpTestData`` take are not covered.

    - mongolock_strict: whether a test fails that leaves a lock held. Otherwise there is a warning.
    """

    mongolock: MemoryLocks
    mongolock_strict: bool = False

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Run one test, including `setUp` and `tearDown`."""
        with override_locks(strict=None if self.mongolock_strict else False) as self.mongolock:
            if self.mongolock_strict:
                self.addCleanup(self.mongolock.assert_released)  # runs last, and fails the test
            return super().run(result)
