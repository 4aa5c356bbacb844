"""`mongolock`, `override_locks` and `LockTestMixin` for users' tests, without any database."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, SimpleTestCase

from django_mongolock import (
    LockBackendFailed,
    LockError,
    LockLost,
    LockNotAcquired,
    mongo_lock,
    mongo_locked,
    signals,
)
from django_mongolock.backends import MongoBackend, get_backend
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockMisused
from django_mongolock.keys import lock_key
from django_mongolock.management import checks
from django_mongolock.models import Lock
from django_mongolock.testing import LockTestMixin, MemoryLocks, memory_server, override_locks
from testproject.shop.models import Order
from tests.support.looking import heard
from tests.support.waiting import eventually

pytest_plugins = ["pytester"]


@mongo_locked("order:{order_id}", on_contention="respond")
def pay(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse("paid")


class TestLockedView(LockTestMixin, SimpleTestCase):
    def test_free(self) -> None:
        """The lock was taken once, by its key, and is free again."""
        response = pay(RequestFactory().get("/"), 5)
        assert response.content == b"paid"
        self.mongolock.assert_locked("order:5", times=1)
        self.mongolock.assert_free()

    def test_busy(self) -> None:
        """A wait for a lock that the test itself holds ends at once."""
        with self.mongolock.hold("order:5"):
            response = pay(RequestFactory().get("/"), 5)
        assert response.status_code == 423
        self.mongolock.assert_not_locked("order:5")
        assert self.mongolock.contended == ["order:5"]

    def test_unavailable(self) -> None:
        with self.mongolock.unavailable():
            assert pay(RequestFactory().get("/"), 5).status_code == 503
        assert pay(RequestFactory().get("/"), 5).status_code == 200


class TestOverride:
    """The places of `override_locks`, and the removal of its effects."""

    @override_locks(kwarg_name="locks")
    async def test_on_a_coroutine_function(self, locks: MemoryLocks) -> None:
        """The override is in force until the body has run."""
        async with mongo_lock("a"):
            await asyncio.sleep(0)
            assert locks.held() == ["a"]

    def test_each_begins_with_no_locks(self) -> None:
        for _ in range(2):
            with override_locks(strict=None) as locks:
                assert locks.acquired == locks.held() == []
                lock = mongo_lock("a", wait=0).acquire()
            assert lock.lost

    def test_the_order_of_mixins_does_not_matter(self) -> None:
        class Case(SimpleTestCase, LockTestMixin):
            def setUp(self) -> None:  # without super()
                mongo_lock("a").acquire().release()

            def test(self) -> None:
                self.mongolock.assert_locked("a", times=1)

        result = Case("test").run(unittest.TestResult())
        assert result is not None
        assert (result.testsRun, result.errors, result.failures) == (1, [], [])


class TestLeftBehind:
    """F94: Locks that a test still holds at its end, and tests inside of tests."""

    def test_a_lock_that_is_still_held_is_reported(self) -> None:
        """The report has the key of the lock and the line that took it. A lock held by the test itself is not
        reported."""
        test = override_locks()
        locks = test.enable()
        locks.hold("b")
        lock = mongo_lock("a").acquire()
        with pytest.raises(AssertionError, match="'a' is still held"):
            locks.assert_released()
        with pytest.warns(RuntimeWarning, match=r"left locks behind: 'a' is still held, acquired at .*test_testing"):
            test.disable()
        assert lock.lost
        with override_locks(strict=True) as locks:
            locks.hold("b")
            with mongo_lock("a"):
                pass
            locks.assert_released()

    def test_a_thread_that_still_waits_is_reported(self) -> None:
        """The thread will never get the lock."""
        errors: list[LockError] = []

        def wait() -> None:
            try:
                mongo_lock("a", wait=None).acquire()
            except LockError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        test = override_locks(strict=True)
        locks = test.enable()
        locks.hold("a")
        thread.start()
        assert eventually(lambda: locks.waiting("a") == 1)
        with pytest.raises(AssertionError, match="still waits for 'a'"):
            test.disable()
        thread.join(10)
        assert len(errors) == 1

    def test_strict(self) -> None:
        """The test fails, but not in addition to an error of its own. A decorator may be used again."""

        @override_locks(strict=True)
        def leave(error: Exception | None = None) -> MongoLock:
            lock = mongo_lock("a").acquire()
            if error is not None:
                raise error
            return lock

        with pytest.raises(ZeroDivisionError):
            leave(ZeroDivisionError())
        for _ in range(2):
            with pytest.raises(AssertionError, match="left locks behind"):
                leave()
        assert isinstance(get_backend(), MongoBackend)

    @pytest.mark.parametrize("strict", [False, True])
    def test_strict_in_a_test_case(self, strict: bool) -> None:
        """The attribute of the class counts. Locks released in tearDown are not reported."""

        class Case(LockTestMixin, SimpleTestCase):
            mongolock_strict = strict

            def test_left(self) -> None:
                self.lock = mongo_lock("a").acquire()

            def test_released(self) -> None:
                self.test_left()
                self.addCleanup(self.lock.release)

        told = nullcontext() if strict else pytest.warns(RuntimeWarning, match="'a' is still held")
        with told:
            left = Case("test_left").run(unittest.TestResult())
        assert left is not None
        assert len(left.failures) == strict
        assert not left.errors
        released = Case("test_released").run(unittest.TestResult())
        assert released is not None
        assert released.wasSuccessful()

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    @pytest.mark.parametrize("reported", [False, True])
    def test_what_was_dropped(self, reported: bool) -> None:
        """A dropped lock is left behind, too, even if it has been released since. The report comes once."""

        @override_locks(strict=True, kwarg_name="locks")
        def drop(locks: MemoryLocks) -> None:
            mongo_lock("a").acquire()
            gc.collect()
            assert eventually(lambda: not locks.held())
            if reported:
                with pytest.raises(AssertionError, match="'a' was not released"):
                    locks.assert_released()

        with nullcontext() if reported else pytest.raises(AssertionError, match="'a' was not released"):
            drop()  # type: ignore[call-arg]

    def test_one_inside_another(self) -> None:
        """The inner one begins without locks. The outer one keeps its own, and records nothing of the inner one's."""
        with override_locks(strict=True) as outer:
            mine, theirs = mongo_lock("a").acquire(), outer.hold("b")
            with override_locks(WAIT=3) as inner:
                assert inner.held() == []
                mongo_lock("a").acquire().release()
                assert inner.acquired == ["a"]
            assert (outer.held(), outer.acquired, outer.lost) == (["a", "b"], ["a"], [])
            assert mine.held
            assert theirs.held
            outer.advance(100)
            assert not mongo_lock("b", wait=0).try_acquire()
            assert mine.release()


@pytest.mark.long
def test_strict_by_the_configuration(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """F94: ``mongolock_strict = true`` applies to all tests with the fixture."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    pytester.makeini("[pytest]\nmongolock_strict = true\nDJANGO_SETTINGS_MODULE = testproject.settings\n")
    pytester.makepyfile(
        """
        from django_mongolock import mongo_lock
        def test_left(mongolock):
            mongo_lock("a").acquire().extend()
            test_left.lock = mongo_lock("b").acquire()
        def test_released(mongolock):
            with mongo_lock("a"):
                pass
        """
    )
    plugins = [] if has_plugin() else ["-p", "django_mongolock.testing.pytest_plugin"]
    result = pytester.runpytest_subprocess(*plugins)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*AssertionError: the test has left locks behind: *'b' is still held*"])


def has_plugin() -> bool:
    """Return whether pytest finds the plugin by itself."""
    return any(point.value == "django_mongolock.testing.pytest_plugin" for point in entry_points(group="pytest11"))


class TestHold:
    def test_a_wait_of_the_same_thread_takes_no_time(self, mongolock: MemoryLocks) -> None:
        mongolock.hold("a")
        with pytest.raises(LockNotAcquired) as caught:
            mongo_lock("a", wait=3000).acquire()
        assert caught.value.waited >= 3000

    def test_a_wait_without_end_is_an_error(self, mongolock: MemoryLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_server, "LONGEST_WAIT", 600.0)
        mongolock.hold("a")
        with pytest.raises(LockMisused, match="for ever"):
            mongo_lock("a", wait=None).acquire()

    async def test_advance_ends_the_wait_of_a_coroutine(self, mongolock: MemoryLocks) -> None:
        mongolock.hold("a")
        waiting = asyncio.create_task(mongo_lock("a", wait=1000).aacquire())
        await asyncio.sleep(0.02)
        mongolock.advance(1000)
        async with asyncio.timeout(5):
            with pytest.raises(LockNotAcquired):
                await waiting

    def test_an_instance_and_a_made_key(self, mongolock: MemoryLocks) -> None:
        order = Order(pk=7)
        with mongolock.hold(order), mongolock.hold(lock_key("tag:{tag}", tag="a:b")):
            assert mongolock.held() == ["shop.order:7", "tag:a%3Ab"]
        mongo_lock(order).acquire().release()
        mongolock.assert_locked(order)


class TestLose:
    def test_at_once(self, mongolock: MemoryLocks) -> None:
        told: list[MongoLock] = []
        lock = mongo_lock("a", on_lost=told.append)
        with pytest.raises(LockLost), lock:
            mongolock.lose("a")
        assert told == [lock]
        assert mongolock.lost == ["a"]
        mongolock.hold("a")

    def test_what_is_not_held(self, mongolock: MemoryLocks) -> None:
        with pytest.raises(AssertionError, match="does not hold 'a'"):
            mongolock.lose("a")


class TestTime:
    def test_a_day_is_quick(self, mongolock: MemoryLocks) -> None:
        """F94: In a day, a lock with a lease of a second has a quarter of a million renewals. Only the first and the
        last are made."""
        began = time.process_time()
        with mongo_lock("a", lease=1) as mine, mongolock.hold("b", lease=1) as theirs:
            mongolock.advance(timedelta(days=1))
            assert mine.held
            assert theirs.held
            assert 0 < mine.remaining <= 1
        assert time.process_time() - began < 5

    def test_the_longest_hold_ends_within_a_long_time(self, mongolock: MemoryLocks) -> None:
        """Exactly the renewals that would be made are skipped."""
        with heard(signals.lock_lost) as told:
            lock = mongo_lock("a", lease=1, max_hold=5_000).acquire()
            with mongo_lock("b", lease=7) as other:
                mongolock.advance(80_000)
                assert other.held
            assert lock.lost
            assert eventually(lambda: told)
        assert [(facts["key"], facts["held"]) for facts in told] == [("a", pytest.approx(5_000, abs=5))]

    def test_what_happened_within_a_long_time_is_noticed(self, mongolock: MemoryLocks) -> None:
        """A forced release is found by one of the renewals that are made."""
        with mongolock.hold("a", lease=1) as held:
            memory: Any = get_backend()
            memory.server.documents["a"]["holders"].clear()
            mongolock.advance(timedelta(days=1))
            assert not held.held


class TestAssertions:
    def test_locked(self, mongolock: MemoryLocks) -> None:
        for _ in range(2):
            with mongo_lock("a", "b"):
                pass
        mongolock.assert_locked("a")
        mongolock.assert_locked("a", times=2)
        with pytest.raises(AssertionError, match="'a' was not locked 1 times, but 2 times: acquired: 'a', 'b'"):
            mongolock.assert_locked("a", times=1)
        with pytest.raises(AssertionError, match="'c' was not locked at all: acquired: 'a', 'b', 'a', 'b'"):
            mongolock.assert_locked("c")
        with pytest.raises(AssertionError, match="'a' was locked"):
            mongolock.assert_not_locked("a")
        mongolock.assert_not_locked("c")

    def test_free(self, mongolock: MemoryLocks) -> None:
        with mongo_lock("a"):
            mongolock.assert_free("b")
            for keys in ((), ("a",), ("a", "b")):
                with pytest.raises(AssertionError, match="still held: 'a'"):
                    mongolock.assert_free(*keys)
        mongolock.assert_free()

    @override_locks(kwarg_name="locks", KEY_PREFIX="shop:")
    def test_keys_are_named_as_the_code_names_them(self, locks: MemoryLocks) -> None:
        with mongo_lock("a") as lock:
            assert lock.key == "shop:a"
            assert locks.held() == ["a"]
        locks.assert_locked("a", times=1)


class TestBackend:
    @pytest.fixture
    def chosen(self, settings: Any) -> None:
        settings.MONGOLOCK = {"BACKEND": "django_mongolock.testing.memory.MemoryLockBackend"}

    def test_needs_nothing_else(self, chosen: None) -> None:
        with mongo_lock("a", using="any"):
            assert mongo_lock("a").try_acquire()
            assert not mongo_lock("a", using="any", reentrant=False, owner="o").held

    def test_is_warned_of_outside_of_tests(self, chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lock that two processes both get would be a false promise."""
        monkeypatch.setattr(checks, "shared_by_all", set())  # functions of other tests
        assert [message.id for message in run_checks(databases=["default"]) if "mongolock" in str(message.id)] == []
        monkeypatch.delattr("django.core.mail.outbox")
        found = [message.id for message in run_checks() if "mongolock" in str(message.id)]
        assert found == ["mongolock.W005"]

    @pytest.mark.parametrize(
        "look",
        [
            lambda: Lock.objects.held().count(),
            lambda: list(Lock.objects.all()),
            lambda: Lock.objects.get(key="a"),
            lambda: Lock(key="a").ask_to_release("b"),
        ],
        ids=["held", "all", "get", "ask"],
    )
    def test_the_orm_says_that_it_sees_nothing(self, mongolock: MemoryLocks, look: Callable[[], object]) -> None:
        """The error does not claim that no lock is held, and needs no database."""
        with mongo_lock("a"), pytest.raises(LockBackendFailed, match="in the memory of each process"):
            look()

    def test_a_view_with_a_queryset(self, mongolock: MemoryLocks) -> None:
        """Code that only makes one, such as a module of class-based views, is imported."""
        assert Lock.objects.held().filter(key="a").order_by("key").query.is_empty() is False

    @pytest.mark.parametrize(
        "command", [["list_locks"], ["clear_stale_locks", "--no-input"], ["release_lock", "a", "--no-input"]]
    )
    def test_commands_say_so_too(self, mongolock: MemoryLocks, command: list[str]) -> None:
        with pytest.raises(CommandError, match="in the memory of each process"):
            call_command(*command)

    def test_another_backend_meanwhile(self, mongolock: MemoryLocks) -> None:
        """The error has clear words, and is not an attribute error."""
        mongo = "django_mongolock.backends.MongoBackend"
        with override_locks(BACKEND=mongo) as locks, pytest.raises(ImproperlyConfigured, match="BACKEND"):
            locks.hold("a")
