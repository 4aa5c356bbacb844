"""`mongo_lock` and `mongo_semaphore`: the engine with the project's settings, on a real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from bson import ObjectId
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import SimpleTestCase, TestCase
from pytest_django import Settings

from django_mongolock import (
    LockLost,
    LockNotAcquired,
    LockReentry,
    MongoLock,
    mongo_lock,
    mongo_semaphore,
)
from django_mongolock.backends.base import close_backends, mongo_store
from django_mongolock.signals import lock_acquired, lock_lost, lock_released
from testproject.shop.models import Ad, Order, Seller
from tests.support.looking import document, held_elsewhere, holder, holders, new_key
from tests.support.waiting import eventually

Factory = Callable[..., MongoLock]


def fail() -> None:
    raise ZeroDivisionError


def semaphore(key: Any, **options: Any) -> MongoLock:
    return mongo_semaphore(key, 3, **options)


class TestHolding:
    """A lock is held inside the block and free after it."""

    def test_with(self) -> None:
        """``with``: held inside, stored, free afterwards."""
        key = new_key()
        with mongo_lock(key) as lock:
            assert lock.held
            assert lock.key == key
            assert holder(key)["token"] == lock.fencing_token
        assert lock.remaining == 0
        assert holders(key) == []

    async def test_async_with(self) -> None:
        """``async with`` on the same kind of object."""
        key = new_key()
        async with mongo_lock(key) as lock:
            assert lock.held
            assert holder(key)["token"] == lock.fencing_token
        assert holders(key) == []

    def test_acquire_and_release(self) -> None:
        """Without a block: `acquire` returns the lock, `release` tells whether it was still ours."""
        lock = mongo_lock(new_key()).acquire()
        assert lock.held
        assert lock.release() is True
        assert lock.release() is False

    def test_error_of_the_block(self) -> None:
        """What the block raises comes out unchanged, and the lock is free."""
        key = new_key()
        with pytest.raises(ZeroDivisionError), mongo_lock(key):
            fail()
        assert holders(key) == []

    def test_tokens_grow(self) -> None:
        """P2: each grant has a larger fencing token than the one before."""
        key, tokens = new_key(), []
        for _ in range(3):
            with mongo_lock(key) as lock:
                tokens.append(lock.fencing_token)
        assert tokens == sorted(set(tokens))

    def test_excludes_other_threads(self) -> None:
        """Threads that read, wait and write under the lock lose no increment."""
        key, count = new_key(), 0

        def add() -> None:
            nonlocal count
            for _ in range(5):
                with mongo_lock(key, wait=30):
                    seen = count
                    time.sleep(0.001)
                    count = seen + 1

        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(add) for _ in range(4)]:
                future.result()
        assert count == 20

    async def test_excludes_other_tasks(self) -> None:
        """Coroutines of one thread exclude one another, too."""
        key, count = new_key(), 0

        async def add() -> None:
            nonlocal count
            async with mongo_lock(key, wait=30):
                seen = count
                await asyncio.sleep(0.001)
                count = seen + 1

        await asyncio.gather(*(add() for _ in range(10)))
        assert count == 10


class TestKeys:
    """What can be locked."""

    def test_several(self) -> None:
        """Several keys are one lock; each has its own token; they are taken in one order, and once."""
        first, second = sorted([new_key(), new_key()])
        with mongo_lock(second, first, second) as lock:
            assert lock.keys == (first, second)
            assert {key: holder(key)["token"] for key in lock.keys} == lock.fencing_tokens
        assert holders(first) == holders(second) == []

    def test_all_or_none(self) -> None:
        """If one of several is not to be had, none is kept."""
        free, busy = sorted([new_key(), new_key()])
        with held_elsewhere(busy), pytest.raises(LockNotAcquired) as caught:
            mongo_lock(free, busy, wait=0).acquire()
        assert caught.value.key == busy
        assert holders(free) == []

    def test_opposite_orders_do_not_block(self) -> None:
        """Two who name the same keys in opposite orders never wait for each other for good."""
        one, two = new_key(), new_key()
        barrier = threading.Barrier(2)

        def take(*keys: str) -> None:
            barrier.wait()
            for _ in range(10):
                with mongo_lock(*keys, wait=20):
                    pass

        with ThreadPoolExecutor(2) as threads:
            for future in [threads.submit(take, one, two), threads.submit(take, two, one)]:
                future.result()

    @pytest.mark.parametrize(
        ("instance", "key"),
        [
            (Order(pk=5), "shop.order:5"),
            (Seller(pk="no:5"), "shop.seller:no%3A5"),
            (Ad(pk=ObjectId("65f0c0ffee65f0c0ffee65f0")), "shop.ad:65f0c0ffee65f0c0ffee65f0"),
        ],
    )
    def test_instance(self, instance: Any, key: str) -> None:
        """A model instance, of SQL or MongoDB, is locked by its model and primary key, and needs no query."""
        with mongo_lock(instance) as lock:
            assert lock.key == key
            with pytest.raises(LockReentry):
                mongo_lock(key).acquire()

    def test_unsaved_instance(self) -> None:
        """An instance without a primary key has nothing to lock by."""
        with pytest.raises(ValueError, match="Order has no primary key yet"):
            mongo_lock(Order())

    @pytest.mark.parametrize("factory", [mongo_lock, semaphore])
    @pytest.mark.parametrize(
        "key",
        [
            None,
            5,
            True,
            1.5,
            b"key",
            ["key"],
            ("key",),
            {"$gt": ""},
            ObjectId("5f0c9a1e8b3d4c2a1f6e7d80"),
            Order,
            type("Text", (str,), {})("key"),
        ],
        ids=str,
    )
    def test_not_text(self, factory: Factory, key: Any) -> None:
        """F58: what is no text is a TypeError before anything is sent; also a subclass of str."""
        with pytest.raises(TypeError, match="a lock key must be a str, not "):
            factory(key)

    @pytest.mark.parametrize(
        ("key", "problem"),
        [
            ("", "must not be empty"),
            ("a\x00b", "control characters"),
            ("a\nb", "control characters"),
            ("\ud800", "lone surrogates"),
            ("é" * 257, "at most 512 bytes.*514"),
            ("x" * 10_000_000, "at most 512 bytes"),
        ],
        ids=["empty", "NUL", "newline", "surrogate", "514 bytes", "10 MB"],
    )
    def test_bad_text(self, key: str, problem: str) -> None:
        """F54: text that makes no key is a ValueError that says why."""
        with pytest.raises(ValueError, match=problem):
            mongo_lock(key)

    @pytest.mark.parametrize(
        "key", ["$where", "$$NOW", "a.b.c", "'\"`", "<b>&amp;</b>", "{'$gt': ''}", "\U0001f512", "x" * 400, " "]
    )
    def test_literal_text(self, key: str) -> None:
        """F54: everything else is a key like any other, stored as it is."""
        key += new_key()
        with mongo_lock(key, label="$token", owner="$holders") as lock:
            assert lock.key == key
            assert holder(key)["label"] == "$token"
            assert holder(key)["owner"] == "$holders"
        assert holders(key) == []

    def test_one_key_however_composed(self) -> None:
        """F54: the two ways to write é are one key."""
        key = new_key()
        with mongo_lock(key + "\u00e9"), pytest.raises(LockReentry):
            mongo_lock(key + "e\u0301").acquire()

    def test_none(self) -> None:
        """At least one key is needed."""
        with pytest.raises(TypeError, match="at least one key"):
            mongo_lock()


class TestOptions:
    """Every option does what it says, and what cannot be meant is refused before anything is sent."""

    def test_wait_zero(self) -> None:
        """``wait=0`` is a single try; the error says who has the lock and for how long its lease runs."""
        key = new_key()
        with held_elsewhere(key, label="the other", lease=20), pytest.raises(LockNotAcquired) as caught:
            mongo_lock(key, wait=0).acquire()
        assert caught.value.waited < 8  # the default is ten
        assert "the other" in str(caught.value)
        assert 15 < caught.value.retry_after <= 22

    def test_wait(self) -> None:
        """It waits about as long as it was told to, and no longer."""
        key = new_key()
        with held_elsewhere(key), pytest.raises(LockNotAcquired, match=r"within \d\.\d s") as caught:
            mongo_lock(key, wait=0.3).acquire()
        assert 0.3 <= caught.value.waited < 8  # the default is ten

    def test_wait_until_free(self) -> None:
        """It goes on as soon as the lock is free, long before the wait is over."""
        key = new_key()
        with ThreadPoolExecutor(1) as thread:
            with held_elsewhere(key):
                waiting = thread.submit(lambda: mongo_lock(key, wait=None).acquire().release())
                assert eventually(lambda: document(key)["waiters"])
            assert waiting.result(timeout=5) is True

    def test_lease(self) -> None:
        """The lease is the caller's; the server's end is a margin later."""
        key = new_key()
        with mongo_lock(key, lease=60) as lock:
            assert 40 < lock.remaining <= 60
            found = holder(key)
            assert (found["lease"], found["server_lease"]) == (60_000, 66_000)

    def test_no_renewal(self) -> None:
        """``auto_renew=False``: the lease ends, the holder is told, and the key is free a margin later."""
        key, told = new_key(), threading.Event()
        with pytest.raises(LockLost), mongo_lock(key, lease=0.3, auto_renew=False, on_lost=lambda _: told.set()):
            assert told.wait(5)
        with mongo_lock(key, wait=5):
            pass

    def test_renewal(self) -> None:
        """Otherwise the lock is held for as long as the block takes, over one lease after another."""
        with mongo_lock(new_key(), lease=2) as lock:
            time.sleep(5)
            lock.ensure_held()

    def test_owner(self) -> None:
        """Who asks with the owner of a holder that lives waits like everybody; what becomes of it when that has died
        is in tests/engine/test_owners.py."""
        key = new_key()
        first = mongo_lock(key, owner="task 1", lease=2).acquire()
        with ThreadPoolExecutor(1) as thread:
            assert not thread.submit(lambda: mongo_lock(key, owner="task 1").try_acquire()).result()
        assert holder(key)["owner"] == "task 1"
        assert first.release() is True

    def test_min_hold(self) -> None:
        """``min_hold=``: the key stays locked that long, even if it is given back before."""
        key, other = new_key(), new_key()
        with mongo_lock(key, min_hold=60):
            pass
        with pytest.raises(LockNotAcquired):
            mongo_lock(key, wait=0).acquire()
        with mongo_lock(other, min_hold=0.6) as first:
            began = first.acquired_at
        with mongo_lock(other, wait=20) as second:
            assert (second.acquired_at - began).total_seconds() >= 0.6

    def test_reentry(self) -> None:
        """Taking a key again in the same thread is told at once instead of waiting for oneself."""
        key = new_key()
        with mongo_lock(key), pytest.raises(LockReentry, match="pass reentrant=True"):
            mongo_lock(key, wait=None).acquire()

    def test_reentrant(self) -> None:
        """``reentrant=True`` shares the grant; the key is free when the outermost has left."""
        key = new_key()
        with mongo_lock(key) as outer:
            with mongo_lock(key, reentrant=True) as inner:
                assert inner.fencing_token == outer.fencing_token
            assert holders(key)
        assert holders(key) == []

    def test_shared(self) -> None:
        """Readers hold together and exclude the exclusive."""
        key = new_key()
        with held_elsewhere(key, mode="shared"), mongo_lock(key, mode="shared", wait=0):
            assert len(holders(key)) == 2
            with ThreadPoolExecutor(1) as thread:
                assert thread.submit(mongo_lock(key).try_acquire).result() is False

    def test_semaphore(self) -> None:
        """As many hold as there are permits, not one more."""
        key = new_key()
        with held_elsewhere_many(key, 2):
            with pytest.raises(LockNotAcquired):
                mongo_semaphore(key, 2, wait=0).acquire()
            assert len(holders(key)) == 2
        with mongo_semaphore(key, permits=1):
            assert len(holders(key)) == 1

    @pytest.mark.parametrize(
        ("name", "ours"),
        [
            ("timeout", "it could mean two things: use lease= .* or wait="),
            ("ttl", "use lease="),
            ("expire", "use lease="),
            ("expires", "use lease="),
            ("blocking_timeout", "use wait="),
            ("blocking", "use wait=: wait=0 for a single try"),
        ],
    )
    @pytest.mark.parametrize("factory", [mongo_lock, semaphore])
    def test_names_of_other_libraries(self, factory: Factory, name: str, ours: str) -> None:
        """Each is refused and names ours; one that means a lease here and a wait there names both."""
        with pytest.raises(TypeError, match=f"'{name}': {ours}"):
            factory("key", **{name: 5})

    @pytest.mark.parametrize("factory", [mongo_lock, semaphore])
    @pytest.mark.parametrize(
        ("option", "value", "error"),
        [
            ("lease", 0, ValueError),
            ("lease", -1, ValueError),
            ("lease", float("nan"), ValueError),
            ("lease", float("inf"), ValueError),
            ("lease", "30", TypeError),
            ("lease", True, TypeError),
            ("wait", -1, ValueError),
            ("wait", "10", TypeError),
            ("wait", False, TypeError),
            ("min_hold", -1, ValueError),
            ("min_hold", "", TypeError),
            ("min_hold", None, TypeError),
            ("owner", "", ValueError),
            ("owner", 5, TypeError),
            ("owner", "a\x00", ValueError),
            ("owner", "x" * 257, ValueError),
            ("label", b"x", TypeError),
            ("label", "\ud800", ValueError),
            ("on_lost", asyncio.sleep, TypeError),
            ("on_lost", "print", TypeError),
            ("colour", "red", TypeError),
        ],
    )
    def test_wrong_options(self, factory: Factory, option: str, value: Any, error: type[Exception]) -> None:
        """Each is refused by its name when the lock is made, not when it is needed."""
        with pytest.raises(error, match=option):
            factory("key", **{option: value})

    @pytest.mark.parametrize("mode", ["semaphore", "write", None, 1])
    def test_wrong_mode(self, mode: Any) -> None:
        """There are two modes; the message knows where semaphores are."""
        with pytest.raises(ValueError, match=r'"exclusive" or "shared".*mongo_semaphore'):
            mongo_lock("key", mode=mode)

    @pytest.mark.parametrize(
        ("permits", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)]
    )
    def test_wrong_permits(self, permits: Any, error: type[Exception]) -> None:
        """A semaphore has a whole number of permits, at least one."""
        with pytest.raises(error, match="permits"):
            mongo_semaphore("key", permits)


def held_elsewhere_many(key: str, permits: int) -> Any:
    """Take all of them in this process, by one thread each, which live as long: a dead thread's lock is released."""
    stack = ExitStack()
    for _ in range(permits):
        thread = stack.enter_context(ThreadPoolExecutor(1))
        lock = thread.submit(lambda: mongo_semaphore(key, permits, wait=0).acquire()).result()
        stack.callback(lock.release)
    return stack


@pytest.fixture
def other_alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A second MongoDB alias, in another database of the same server."""
    settings = {**connections.settings["mongo"], "NAME": "mongolock_other"}
    monkeypatch.setitem(connections.settings, "other", settings)
    yield "other"
    document("x", "other")
    mongo_store("other").client.drop_database("mongolock_other")
    close_backends()
    del connections["other"]


class TestAliases:
    """Where the locks are kept."""

    def test_using(self, other_alias: str) -> None:
        """``using=``: another alias is another place; the same key there is another lock."""
        key = new_key()
        with mongo_lock(key), mongo_lock(key, using=other_alias) as lock:
            assert holders(key, other_alias)[0]["token"] == lock.fencing_token
            assert holders(key)[0]["token"] != lock.fencing_token

    def test_unknown(self) -> None:
        """An alias that is not there is told by its name."""
        with pytest.raises(ImproperlyConfigured, match="no DATABASES alias 'nowhere'"):
            mongo_lock("key", using="nowhere")

    def test_sql(self) -> None:
        """An alias that is not MongoDB is told with what it is."""
        with pytest.raises(
            ImproperlyConfigured, match=r"'default' is not MongoDB: its ENGINE is 'django\.db.*sqlite3'"
        ):
            mongo_lock("key", using="default")


class TestSettings:
    """F52: settings are read late and followed."""

    def test_followed(self, settings: Settings) -> None:
        """`override_settings` changes what the next lock does."""
        key = new_key()
        settings.MONGOLOCK = {"DATABASE": "mongo", "LEASE": 77, "WAIT": 0}
        with held_elsewhere(key), pytest.raises(LockNotAcquired) as caught:
            mongo_lock(key).acquire()
        assert caught.value.waited < 8
        with mongo_lock(key) as lock:
            assert 70 < lock.remaining <= 77

    def test_old_locks_are_given_back(self, settings: Settings) -> None:
        """What was held under the old settings is released when they change, rather than renewed by nobody."""
        key = new_key()
        lock = mongo_lock(key).acquire()
        settings.MONGOLOCK = {"DATABASE": "mongo", "LEASE": 20}
        assert not lock.held
        assert holders(key) == []
        assert lock.release() is False

    def test_prefixes_never_meet(self, settings: Settings) -> None:
        """F59: the prefix is part of the key, for named keys and for instances."""
        settings.MONGOLOCK = {"DATABASE": "mongo", "KEY_PREFIX": "production:"}
        key = new_key()
        assert mongo_lock(key, Order(pk=5)).keys == ("production:shop.order:5", f"production:{key}")
        with mongo_lock(key, min_hold=20):
            assert holders("production:" + key)
        settings.MONGOLOCK = {"DATABASE": "mongo", "KEY_PREFIX": "staging:"}
        with mongo_lock(key, wait=0):
            assert holders("staging:" + key)
        assert holders("production:" + key)
        assert holders(key) == []

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            ({}, r'MONGOLOCK\["DATABASE"\] is not set'),
            ({"DATABASE": "mongo", "TIMEOUT": 5}, "unknown settings: TIMEOUT. Known: .*LEASE"),
            (["mongo"], "must be a dictionary, not list"),
            ({"DATABASE": "nowhere"}, "no DATABASES alias 'nowhere'"),
            ({"DATABASE": "default"}, "'default' is not MongoDB"),
            ({"DATABASE": "mongo", "BACKEND": "no.such.Backend"}, r"cannot be imported: no\.such\.Backend"),
        ],
    )
    def test_wrong(self, settings: Settings, value: Any, problem: str) -> None:
        """What cannot work at all is an ImproperlyConfigured that says what to write."""
        settings.MONGOLOCK = value
        with pytest.raises(ImproperlyConfigured, match=problem):
            mongo_lock("key")

    def test_import_needs_no_settings(self) -> None:
        """The package can be imported, and functions decorated, before settings are configured."""
        code = """
import django_mongolock
from django.conf import settings
from django_mongolock import mongo_lock, mongo_locked

@mongo_locked("order:{order_id}", wait=0, on_contention="skip")
def pay(order_id): ...

assert not settings.configured
try:
    mongo_lock("key")
except Exception as error:
    assert type(error).__name__ == "ImproperlyConfigured", error
else:
    raise AssertionError
"""
        environment = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


class TestWithoutDatabaseAccess(TestCase):
    """A user's own tests of locked code need no access to the lock database."""

    databases = {"default"}  # noqa: RUF012 - as Django has it

    def test_lock(self) -> None:
        """No "Database queries to 'mongo' are not allowed" in a TestCase without that alias."""
        with mongo_lock(new_key()) as lock:
            assert lock.held


class TestWithoutAnyDatabase(SimpleTestCase):
    """The same without any database."""

    def test_lock(self) -> None:
        """No "Database queries to 'mongo' are not allowed" in a SimpleTestCase."""
        with mongo_lock(new_key()) as lock:
            assert lock.held


class TestSignals:
    """Signals tell of this process's own locks; a receiver that fails breaks nothing."""

    def test_told(self) -> None:
        """Acquired and released, once each, with the key, the token and the alias."""
        seen: list[tuple[str, dict[str, Any]]] = []

        def acquired(**event: Any) -> None:
            seen.append(("acquired", event))

        def released(**event: Any) -> None:
            seen.append(("released", event))

        lock_acquired.connect(acquired)
        lock_released.connect(released)
        key = new_key()
        try:
            with mongo_lock(key) as lock:
                token = lock.fencing_token
        finally:
            lock_acquired.disconnect(acquired)
            lock_released.disconnect(released)
        assert [name for name, _ in seen] == ["acquired", "released"]
        for _, event in seen:
            assert (event["key"], event["token"], event["using"]) == (key, token, "mongo")

    def test_loss_is_told(self) -> None:
        """A loss has its signal, with the reason in words."""
        told: list[dict[str, Any]] = []

        def lost(**event: Any) -> None:
            told.append(event)

        lock_lost.connect(lost)
        try:
            with pytest.raises(LockLost), mongo_lock(new_key(), lease=0.2, auto_renew=False) as lock:
                assert eventually(lambda: told)
        finally:
            lock_lost.disconnect(lost)
        assert told[0]["key"] == lock.key
        assert "lease ended" in told[0]["reason"]

    def test_failing_receiver(self) -> None:
        """The lock is acquired and released whatever receivers do."""

        def fail(**event: Any) -> None:
            raise ZeroDivisionError

        lock_acquired.connect(fail)
        lock_released.connect(fail)
        key = new_key()
        try:
            with mongo_lock(key) as lock:
                assert lock.held
        finally:
            lock_acquired.disconnect(fail)
            lock_released.disconnect(fail)
        assert holders(key) == []

    async def test_async_receiver(self, caplog: pytest.LogCaptureFixture) -> None:
        """An async receiver cannot be called from a running loop by a sync send; that breaks no lock, and is logged."""

        async def listen(**event: Any) -> None: ...

        lock_acquired.connect(listen)
        key = new_key()
        try:
            async with mongo_lock(key) as lock:
                assert lock.held
        finally:
            lock_acquired.disconnect(listen)
        assert holders(key) == []
        assert "signal not sent" in caplog.text
