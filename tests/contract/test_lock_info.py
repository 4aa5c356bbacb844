"""`lock_info` describes a lock without acquiring it, in MongoDB and in memory."""

import asyncio
import threading
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from pytest_django import Settings

from django_mongolock import LockBackendFailed, lock_info, mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.inspection.named_locks import row_of
from django_mongolock.inspection.overview import overview
from django_mongolock.inspection.queries import alock_info
from django_mongolock.models import Lock, LockSnapshot
from django_mongolock.testing import override_locks
from tests.contract.conftest import Elsewhere, World
from tests.support.lock_documents import Locks, entry, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import new_key
from tests.support.waiting import eventually


@pytest.fixture(params=["blocking", "async"])
def look(request: pytest.FixtureRequest) -> Any:
    """Both functions."""
    return lock_info if request.param == "blocking" else lambda key: asyncio.run(alock_info(key))


@pytest.fixture
def key(world: World) -> str:
    return new_key("info")


def test_held(key: str, look: Any, elsewhere: Elsewhere) -> None:
    with elsewhere(key, label="nightly", lease=20) as lock:
        found: LockSnapshot = look(key)
        assert (found.key, found.state, found.holding, found.waiting, found.waiters) == (key, "held", 1, 0, ())
        assert found.tokens == [lock.fencing_token]
        assert found.holders[0].host == "elsewhere"
        assert found.since == lock.acquired_at
        assert 15 < (found.left or 0) < 25
    assert look(key).state == "free"
    with elsewhere(key, mode="shared"), elsewhere(key, mode="shared"):
        assert [holder.mode for holder in look(key).holders] == ["shared", "shared"]
    with elsewhere(key, min_hold=60):
        pass
    assert look(key).state == "kept"


def test_a_minimum_hold_that_is_over(key: str, look: Any, elsewhere: Elsewhere, world: World) -> None:
    """After the minimum hold, the lock is free, and its last holder is the previous one."""
    with elsewhere(key, min_hold=0.2):
        pass
    world.let_pass(0.3)
    found: LockSnapshot = look(key)
    assert (found.state, found.holders, found.holding, found.permits, found.left) == ("free", (), 0, 0, None)
    assert found.last
    assert (found.last.host, found.acquisitions - found.uncounted) == ("elsewhere", 0)


def test_waiting(key: str, look: Any, elsewhere: Elsewhere) -> None:
    waiting = elsewhere(key, wait=20)
    thread = threading.Thread(target=waiting.acquire)
    with elsewhere(key):
        thread.start()
        assert eventually(lambda: look(key).waiting == 1)
        found = look(key)
        assert [waiter.host for waiter in found.waiters] == ["elsewhere"]
        assert (found.longest_wait or 0) >= 0
    thread.join(20)
    assert look(key).waiting == 0


@WITH_MONGO
def test_those_behind_a_waiter_of_their_process_are_counted(locks: Locks) -> None:
    """F69, P5: The waiters count in a snapshot, in JSON, in the dashboard's overview, and in the list of the
    command."""
    locks.add("k", [entry(1)], [waiter(2, behind=7)])
    (found,) = Lock.objects.filter(pk="k").snapshots()
    shown = found.waiting, row_of(found).as_json()["waiting"], overview(mongo_store()).waiting
    assert shown == (8, 8, 8)
    call_command("list_locks", "--waiting", "--wide", stdout=(out := StringIO()))
    (line,) = [line.split() for line in out.getvalue().splitlines() if line.startswith("k ")]
    assert "8" in line


def test_a_key_that_nothing_has_used(key: str, look: Any) -> None:
    """An unused key is free, and reading its state leaves nothing behind."""
    found = look(key)
    assert (found.key, found.state, found.holders, found.waiters, found.left) == (key, "free", (), (), None)
    assert abs((datetime.now(UTC) - found.now).total_seconds()) < 60


def test_the_prefix(settings: Settings) -> None:
    key = new_key("info")
    settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "shop:"}
    with mongo_lock(key):
        assert (lock_info(key).key, lock_info(key).state) == (f"shop:{key}", "held")
        assert lock_info(f"other:{key}").state == "free"


def test_wrong_keys() -> None:
    with pytest.raises(TypeError, match="5"):
        lock_info(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which nothing fills"):
        lock_info("order:{order_id}")


def test_no_answer() -> None:
    with override_locks() as locks, locks.unavailable(), pytest.raises(LockBackendFailed):
        lock_info("a")
