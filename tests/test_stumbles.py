"""What newcomers tripped over: each once, so that nobody does again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from django.test import RequestFactory
from pytest_django import Settings

from django_mongolock import LockBackendError, LockNotAcquired, mongo_lock, mongo_locked
from django_mongolock.models import Lock
from django_mongolock.router import MongoLockRouter
from tests.lock_documents import Locks
from tests.lock_fixtures import WITH_MONGO
from tests.test_commands import run_json

pytestmark = WITH_MONGO


def test_a_lock_that_is_only_kept_for_its_minimum_hold_is_never_stale(locks: Locks) -> None:
    """It was released: nobody died, no command reports it, no counter says so; and others are told why they wait."""
    with mongo_lock("k", min_hold=0.6):
        pass
    with pytest.raises(LockNotAcquired, match="minimum hold"):
        mongo_lock("k", wait=0).acquire()
    assert Lock.objects.held().count() == 1
    time.sleep(0.7)
    assert not Lock.objects.stale().exists()
    assert not Lock.objects.held().exists()
    assert run_json("clear_stale_locks", "--dry-run")["stale"] == []
    (shown,) = run_json("list_locks", "--all")["locks"]
    assert shown["state"] == "free"
    with mongo_lock("k"):
        pass
    after = locks.read("k")
    assert after["lapsed"] == 0
    assert after["longest_hold_ms"] < 500


@pytest.mark.usefixtures("away")
def test_a_single_try_does_not_wait_for_a_server_that_is_away() -> None:
    """One command's time, not two: a view that answers 503 must not hold its worker for longer."""
    started = time.monotonic()
    with pytest.raises(LockBackendError):
        mongo_lock("k", wait=0).acquire()
    assert time.monotonic() - started < 3


def test_blocking_in_a_coroutine_is_warned_of() -> None:
    """It works, but a wait would stop every task of the event loop."""

    async def block() -> None:
        with pytest.warns(RuntimeWarning, match="async with"), mongo_lock("k"):
            pass

    asyncio.run(block())


def test_a_view_cannot_be_skipped() -> None:
    """A view owes a response; told at every call, not first under contention."""

    @mongo_locked("k", on_contention="skip")
    def view(request: Any) -> None: ...

    with pytest.raises(TypeError, match="respond"):
        view(RequestFactory().get("/"))


@pytest.mark.parametrize("wrong", [{}, [], {"DATABASE": None}, {"DATABASE": "mongo", "LEESE": 5}])
def test_wrong_settings_are_left_to_the_checks(settings: Settings, wrong: Any) -> None:
    """``check`` and ``migrate`` ask the router first: it must not hide their answer behind a traceback."""
    settings.MONGOLOCK = wrong
    assert MongoLockRouter().allow_migrate("default", "auth") is None


@pytest.mark.parametrize("wait", [-1, float("inf"), float("nan")])
def test_a_wait_that_cannot_be_meant_names_what_can(wait: float) -> None:
    """0 is a wait, and None is one without end."""
    with pytest.raises(ValueError, match="0 for a single try, or seconds, or None"):
        mongo_lock("k", wait=wait)
