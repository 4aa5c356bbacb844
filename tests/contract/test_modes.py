"""The small print about modes inside one another, permits, weights, and keys that were taken away."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock import SKIPPED, LockLost, lock_info, mongo_lock, mongo_locked, mongo_semaphore
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockMisused, LockReentry
from django_mongolock.models import Lock
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import holders, in_another_thread, new_key
from tests.support.waiting import eventually

Make = Callable[..., MongoLock]


def exclusive(key: str, **options: Any) -> MongoLock:
    return mongo_lock(key, **options)


def shared(key: str, **options: Any) -> MongoLock:
    return mongo_lock(key, mode="shared", **options)


def permit(key: str, **options: Any) -> MongoLock:
    return mongo_semaphore(key, 3, **options)


MODES: dict[str, Make] = {"exclusive": exclusive, "shared": shared, "permit": permit}


# One mode inside another


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("outer", "inner"), [(a, b) for a in MODES for b in MODES if a != b])
@pytest.mark.usefixtures("world")
def test_another_mode_inside(outer: str, inner: str, reentrant: bool) -> None:
    """F45: A thread that holds a key in one mode does not get it in another one. Otherwise a reader inside its own
    writer would go on reading after the writer has gone, without letting others in. The error comes at once, reentrant
    or not."""
    key = new_key()
    with MODES[outer](key) as lock:
        with pytest.raises(LockReentry) as refused:
            MODES[inner](key, reentrant=reentrant, wait=1).acquire()
        assert lock.held
    said = str(refused.value)
    assert ("pass reentrant=True" in said) == (not reentrant and not refused.value.upgrade)
    assert bool(re.search("each other for ever.*downgrade", said)) == refused.value.upgrade
    assert refused.value.upgrade == ((outer, inner) == ("shared", "exclusive"))


# Permits


@pytest.mark.parametrize("options", [{"wait": 0}, {"wait": 5}])
@pytest.mark.usefixtures("world")
def test_another_number_of_permits(options: dict[str, Any]) -> None:
    """The error names both numbers, whether or not a permit is free, and nothing is left. resize=True allows the
    change."""
    key = new_key()
    for permits in (1, 2):
        with in_another_thread(mongo_semaphore(key, permits)):
            for other in (3, 7):
                with pytest.raises(LockMisused, match=f"has {permits} permits where it is held, and {other} here"):
                    mongo_semaphore(key, other, **options).acquire()
            assert eventually(lambda: (lock_info(key).holding, lock_info(key).waiting) == (1, 0))
    with in_another_thread(mongo_semaphore(key, 2)), mongo_semaphore(key, 3, resize=True, wait=0) as lock:
        assert lock.held
    with mongo_semaphore(key, 5):  # which holds it is free to change
        pass

    @mongo_locked(key, permits=4, on_contention="skip")
    def work() -> str:
        return "done"

    with in_another_thread(mongo_semaphore(key, 2)), pytest.raises(LockMisused):
        work()
    assert eventually(lambda: lock_info(key).state == "free")
    assert work() == "done"
    for alone in ({"resize": True}, {"weight": 2}):
        with pytest.raises(TypeError, match="permits="):
            mongo_locked("a", **alone)


# Taken away by force

#: The lock is not renewed before the test has ended, so that nobody tells its holder that it was taken away.
LONG = 300


def force(key: str) -> None:
    """Take the key from its holder, as an operator does."""
    assert Lock.objects.filter(pk=key).force_release(by="operator") == 1
    assert holders(key) == []


@WITH_MONGO
def test_a_key_that_was_taken_away_is_free_to_its_former_holder() -> None:
    """F50, F45: A thread does not wait for itself if its lock was taken away. The thread gets the key like any other,
    as a new grant, and learns of the loss of the old one."""
    key = new_key()
    lock = mongo_lock(key, lease=LONG).acquire()
    token = lock.fencing_token
    force(key)
    with mongo_lock(key, wait=0) as again:
        assert again.fencing_token > token
        assert [holder["token"] for holder in holders(key)] == [again.fencing_token]
        assert eventually(lambda: lock.lost, 2)
        with pytest.raises(LockLost):
            lock.__exit__(None, None, None)
        assert again.held
    assert holders(key) == []


# Permits of a decorated function


@pytest.mark.usefixtures("world")
def test_weight() -> None:
    """A heavy holder counts for several, also in the queue of its process. With the same weight it may enter again."""
    key = new_key()

    @mongo_locked(key, permits=3, weight=2, on_contention="skip")
    def work() -> bool:
        return True

    with in_another_thread(mongo_semaphore(key, 3)):
        assert work() is True
        with in_another_thread(mongo_semaphore(key, 3, weight=2)):
            assert lock_info(key).permits == 3
            assert work() is SKIPPED
    with mongo_semaphore(key, 3, weight=2):
        with mongo_semaphore(key, 3, weight=2, reentrant=True):
            assert lock_info(key).permits == 2
        with pytest.raises(LockReentry):
            mongo_semaphore(key, 3, reentrant=True, wait=0).acquire()
