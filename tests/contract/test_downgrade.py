"""`lock.downgrade()` turns an exclusive lock into a shared one, and keeps the lock at all times."""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from django_mongolock import LockLost, lock_info, mongo_lock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockMisused
from django_mongolock.inspection.snapshot import ShownState
from tests.contract.conftest import Elsewhere, World
from tests.engine.faces import Face
from tests.support.looking import new_key
from tests.support.waiting import eventually


@pytest.fixture
def key(world: World) -> str:
    return new_key("downgrade")


def test_readers_come_along(key: str, face: Face, elsewhere: Elsewhere, in_thread: Callable[..., Any]) -> None:
    """The same command lets in the readers at the head of the queue. A writer behind them waits for all of them."""
    lock = face.acquire(mongo_lock(key, label="boss"))
    seen = threading.Event()
    readers = [elsewhere(key, mode="shared", wait=20) for _ in range(2)]
    for number, reader in enumerate(readers):
        in_thread(partial(hold, reader, seen))
        assert eventually(partial(waiting, key, number + 1))
    writer = elsewhere(key, wait=20)
    in_thread(partial(hold, writer, seen))
    assert eventually(partial(waiting, key, 3))
    token = lock.fencing_token
    face.call(lock, "downgrade")
    assert lock.held
    assert lock.fencing_token > token
    assert eventually(lambda: all(reader.held for reader in readers))
    found = lock_info(key)
    assert ([holder.mode for holder in found.holders], found.waiting) == (["shared"] * 3, 1)
    assert found.holders[0].label == "boss"
    assert not writer.held
    assert face.release(lock)
    seen.set()
    assert eventually(lambda: (found := lock_info(key)).state is ShownState.FREE and found.acquisitions == 5)


def hold(lock: MongoLock, until: threading.Event) -> None:
    """Hold the lock in a thread that lives as long as its lock. Otherwise the lock would be released."""
    with lock:
        assert until.wait(20)


def waiting(key: str, count: int) -> bool:
    return lock_info(key).waiting == count


def test_it_is_a_readers_lock_from_then_on(key: str, face: Face, elsewhere: Elsewhere) -> None:
    """The lease stays as it was, other readers may come, and a second downgrade is refused."""
    with face.block(mongo_lock(key, lease=20, max_hold=100)) as lock:
        face.extend(lock, 50)
        face.call(lock, "downgrade")
        assert 45 < lock.remaining <= 50
        with elsewhere(key, mode="shared", wait=0):
            assert not elsewhere(key).try_acquire()
        with pytest.raises(LockMisused, match="only an exclusive lock"):
            face.call(lock, "downgrade")
        assert lock.held
    assert lock_info(key).state == "free"
    with face.block(mongo_lock(key)):  # nothing of it is left behind here either
        assert lock_info(key).holders[0].mode == "exclusive"


def test_several_keys(world: World, face: Face, elsewhere: Elsewhere) -> None:
    keys = new_key("a"), new_key("b")
    with face.block(mongo_lock(*keys)) as lock:
        face.call(lock, "downgrade")
        assert set(lock.fencing_tokens) == set(keys)
        with elsewhere(*keys, mode="shared", wait=0):
            assert lock.held


@pytest.mark.parametrize("taken", [True, False])
def test_a_lock_that_was_taken_away(key: str, face: Face, world: World, elsewhere: Elsewhere, taken: bool) -> None:
    """The server knows of the loss before the holder does. The downgrade raises, and takes nothing, even if the lock is
    free again."""
    lost: list[Any] = []
    lock = face.acquire(mongo_lock(key, on_lost=lost.append))
    world.take_away(lock)
    with elsewhere(key, wait=0) if taken else contextlib.nullcontext():
        with pytest.raises(LockLost, match="taken away"):
            face.call(lock, "downgrade")
        assert (lock.held, lock.lost, lock_info(key).holding, lock_info(key).waiting) == (False, True, int(taken), 0)
    assert eventually(lambda: lost == [lock])


def test_a_waiter_of_this_process_comes_to_the_document(key: str, in_thread: Callable[..., Any]) -> None:
    """A thread that stood in line here for the exclusive lock gets its turn when the reader has gone."""
    got = threading.Event()

    def work() -> None:
        with mongo_lock(key, wait=20):
            got.set()

    with mongo_lock(key) as lock:
        in_thread(work)
        assert eventually(lambda: lock._own.session is not None and bool(lock._own.session.queue.lines))
        lock.downgrade()
        assert eventually(lambda: lock_info(key).waiting == 1)
        assert not got.is_set()
    assert got.wait(10)
