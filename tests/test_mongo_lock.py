"""`mongo_lock` and `mongo_semaphore` run the engine with the project's settings, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import SimpleTestCase
from pytest_django import Settings

from django_mongolock import LockNotAcquired, mongo_lock, mongo_locked, mongo_semaphore
from django_mongolock.backends import close_backends, mongo_store
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockReentry
from django_mongolock.signals import lock_acquired
from testproject.shop.models import Order
from tests.support.looking import document, held_elsewhere, holder, holders, new_key
from tests.support.programs import python

Factory = Callable[..., MongoLock]


def semaphore(key: Any, **options: Any) -> MongoLock:
    return mongo_semaphore(key, 3, **options)


class TestKeys:
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
        """F58: A key that is not exactly a str raises TypeError before any command. A subclass of str raises it,
        too."""
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
        """F54: Text that makes no key is a ValueError that says why."""
        with pytest.raises(ValueError, match=problem):
            mongo_lock(key)

    def test_one_key_however_composed(self) -> None:
        """F54: The two ways to write é are one key."""
        key = new_key()
        with mongo_lock(key + "\u00e9"), pytest.raises(LockReentry):
            mongo_lock(key + "e\u0301").acquire()


_WRONG: dict[type[Exception], dict[str, tuple[Any, ...]]] = {
    ValueError: {
        "lease": (0, float("nan"), float("inf")),
        "wait": (-1, float("inf"), float("nan")),
        "release": ("later",),
        "min_hold": (-1,),
        "owner": ("", "x" * 257),
        "label": ("\ud800",),
        "weight": (0, 4, -1),
        "permits": (0, 5_001),
    },
    TypeError: {
        "lease": ("30", True),
        "wait": ("10", False),
        "min_hold": (None,),
        "owner": (5,),
        "label": (b"x",),
        "on_lost": (asyncio.sleep, "print"),
        "weight": ("2", True),
        "permits": ("3",),
        "resize": ("no",),
        "reentrant": ("no",),
        "auto_renew": (0,),
    },
}
WRONG = [(error, option, value) for error, known in _WRONG.items() for option, each in known.items() for value in each]


class TestOptions:
    """Every option has its effect. Invalid options are refused before any command."""

    @pytest.mark.parametrize(("longer", "margin"), [(8, 1.0), (60, 6.0), (3_600, 360.0)])
    def test_an_extended_lock(self, longer: float, margin: float) -> None:
        """F80: A lease of 5 s that is extended to 60 has the margin of 60 s, in the document and in fact."""
        key = new_key()
        with mongo_lock(key, lease=5, auto_renew=False) as lock:
            lock.extend(longer)
            found = holder(key)
            left = (found["until"] - datetime.now(UTC)).total_seconds()
            assert found["server_lease"] - found["lease"] == margin * 1000
            assert margin <= left - lock.remaining + 0.01 < margin + 3

    @pytest.mark.parametrize(("error", "option", "value"), WRONG)
    def test_wrong_options(self, error: type[Exception], option: str, value: Any) -> None:
        """A wrong option is refused by its name when the lock is made. Such a lock could never be granted, or would not
        do what its option says."""
        makers: list[Callable[..., Any]] = [mongo_semaphore, mongo_locked]
        for make in makers:
            with pytest.raises(error, match=option):
                make("key", **{"permits": 3, option: value})
        if option not in ("permits", "weight", "resize"):
            with pytest.raises(error, match=option):
                mongo_lock("key", **{option: value})

    def test_the_error_names_what_can_be_meant(self) -> None:
        with pytest.raises(TypeError, match="permits is a whole number, not NoneType"):
            mongo_semaphore("a", None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"weight= and resize= belong to permits=, which is missing"):
            mongo_locked("a", weight=2)
        with pytest.raises(ValueError, match='mode is "exclusive" or "shared"'):
            mongo_lock("a", mode="semaphore")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="wait is 0 for a single try, or seconds, or None"):
            mongo_lock("a", wait=float("inf"))


@pytest.fixture
def other_alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a second MongoDB alias, in another database of the same server."""
    settings = {**connections.settings["mongo"], "NAME": "mongolock_other"}
    monkeypatch.setitem(connections.settings, "other", settings)
    yield "other"
    document("x", "other")
    mongo_store("other").client.drop_database("mongolock_other")
    close_backends()
    del connections["other"]


class TestAliases:
    def test_using(self, other_alias: str) -> None:
        """With ``using=``, another alias is another place, and the same key is another lock there."""
        key = new_key()
        with mongo_lock(key), mongo_lock(key, using=other_alias) as lock:
            assert holders(key, other_alias)[0]["token"] == lock.fencing_token
            assert holders(key)[0]["token"] != lock.fencing_token


class TestSettings:
    """F52: Settings are read late and followed."""

    def test_followed(self, settings: Settings) -> None:
        """`override_settings` takes effect at the next lock."""
        key = new_key()
        settings.MONGOLOCK = {"DATABASE": "mongo", "LEASE": 77, "WAIT": 0}
        with held_elsewhere(key), pytest.raises(LockNotAcquired) as caught:
            mongo_lock(key).acquire()
        assert caught.value.waited < 8
        with mongo_lock(key) as lock:
            assert 70 < lock.remaining <= 77

    def test_old_locks_are_given_back(self, settings: Settings) -> None:
        """Locks held under the old settings are released when the settings change. Otherwise no session would renew
        them."""
        key = new_key()
        lock = mongo_lock(key).acquire()
        settings.MONGOLOCK = {"DATABASE": "mongo", "LEASE": 20}
        assert not lock.held
        assert holders(key) == []
        assert lock.release() is False

    def test_prefixes_never_meet(self, settings: Settings) -> None:
        """F59: The prefix is part of the key, for named keys and for instances."""
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
        """Settings that cannot work raise ImproperlyConfigured with the cure."""
        settings.MONGOLOCK = value
        with pytest.raises(ImproperlyConfigured, match=problem):
            mongo_lock("key")

    @pytest.mark.long
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
        python("-c", code, DJANGO_SETTINGS_MODULE="")


class TestWithoutAnyDatabase(SimpleTestCase):
    def test_lock(self) -> None:
        """No "Database queries to 'mongo' are not allowed" in a SimpleTestCase."""
        with mongo_lock(new_key()) as lock:
            assert lock.held


class TestSignals:
    """Signals report this process's own locks. A receiver that fails breaks nothing."""

    async def test_async_receiver(self, caplog: pytest.LogCaptureFixture) -> None:
        """A sync send cannot call an async receiver from a running loop. The lock is not affected, and the error is
        logged."""

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
