"""The promises of `mongo_lock`, `mongo_semaphore` and `mongo_locked`, on MongoDB and in memory, blocking and async."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from django_mongolock import LockLost, LockNotAcquired, mongo_lock, mongo_semaphore, signals
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol import procedures
from django_mongolock.exceptions import LockCancelled, LockDeadlock, LockMisused, LockQueueFull, LockReentry
from tests.contract.conftest import Elsewhere, MemoryWorld, World
from tests.engine.faces import Face
from tests.engine.waiters import InThread
from tests.support.grants import own
from tests.support.looking import new_key
from tests.support.waiting import eventually


@pytest.fixture
def key(world: World) -> str:
    return new_key("contract")


def test_a_try_that_waits(key: str, face: Face, elsewhere: Elsewhere) -> None:
    """F155: A try waits for the given time, whatever the wait of the lock, and returns whether the lock is held."""
    lock = mongo_lock(key, wait=0)
    with elsewhere(key):
        began = time.monotonic()
        assert face.call(lock, "try_acquire", 0.2) is False
        assert time.monotonic() - began >= 0.2
    assert face.call(lock, "try_acquire", 0.2) is True
    assert face.release(lock)


FACTS = "fencing_token", "fencing_tokens", "acquired_at", "waited"


def facts(lock: MongoLock) -> list[Any]:
    return [getattr(lock, name) for name in FACTS]


class TestOne:
    """One lock, one holder."""

    def test_how_a_lock_stands(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        """P2: The facts of a lock before, in and after its block. The facts of its last grant stay, for a record of the
        work."""
        lock = mongo_lock(key)
        assert (lock.held, lock.lost, lock.remaining, repr(lock)) == (False, False, 0, f"<MongoLock {key!r} not held>")
        for name in FACTS:
            with pytest.raises(LockMisused):
                getattr(lock, name)
        with pytest.raises(ZeroDivisionError), face.block(lock):  # noqa: PT012
            lock.ensure_held()
            assert lock.held
            assert 0 < lock.remaining <= 30
            inside = facts(lock)
            assert inside[1] == {key: inside[0]}
            assert lock.acquired_at.tzinfo is not None
            assert repr(lock).startswith(f"<MongoLock {key!r} held, token {inside[0]}, ")
            assert not elsewhere(key).try_acquire()
            raise ZeroDivisionError
        assert (lock.held, lock.lost, lock.remaining, facts(lock)) == (False, False, 0, inside)
        with pytest.raises(LockMisused):
            lock.ensure_held()
        assert not face.release(lock)
        with elsewhere(key, wait=0):
            pass
        with face.block(lock):
            assert lock.fencing_token > inside[0]

    @pytest.mark.parametrize("wait", [0, 0.2])
    def test_a_busy_lock(self, key: str, face: Face, elsewhere: Elsewhere, wait: float) -> None:
        with elsewhere(key, label="nightly"), pytest.raises(LockNotAcquired) as caught:
            face.acquire(mongo_lock(key, wait=wait))
        assert caught.value.key == key
        assert wait <= caught.value.waited < 8  # of ten, if no wait were given
        assert "host elsewhere" in (caught.value.holder or "")
        assert 0 < caught.value.retry_after <= 33

    def test_several_keys_are_all_or_none(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with elsewhere(f"{key}:b"), pytest.raises(LockNotAcquired):
            face.acquire(mongo_lock(f"{key}:a", f"{key}:b", wait=0))
        with face.block(mongo_lock(f"{key}:b", f"{key}:a")) as lock:
            assert lock.keys == (f"{key}:a", f"{key}:b")
            assert set(lock.fencing_tokens) == set(lock.keys)

    def test_taking_it_again_is_an_error_or_meant(self, key: str, elsewhere: Elsewhere) -> None:
        """F45: A key that is taken again on purpose is held until the last release, in any order, by one grant."""
        outer, inner = mongo_lock(key).acquire(), mongo_lock(key, reentrant=True)
        with pytest.raises(LockReentry, match="reentrant=True"):
            mongo_lock(key).acquire()
        with inner:
            assert inner.fencing_token == outer.fencing_token
        assert outer.held
        inner.acquire()
        assert outer.release()
        assert inner.held
        assert not elsewhere(key).try_acquire()
        assert inner.release()
        assert elsewhere(key).try_acquire()

    @pytest.mark.parametrize("options", [{"mode": "shared"}, {"permits": 2}], ids=["readers", "permits"])
    def test_those_who_may_hold_it_together(
        self, key: str, face: Face, elsewhere: Elsewhere, options: dict[str, Any]
    ) -> None:
        """Two readers, or two of two permits, hold the lock together. A writer and a third permit wait."""
        mine = mongo_lock(key, mode="shared") if "mode" in options else mongo_semaphore(key, 2)
        third = {} if "mode" in options else options
        with face.block(mine), elsewhere(key, wait=0, **options):
            assert not elsewhere(key, **third).try_acquire()
        assert elsewhere(key, **third).try_acquire()


def cancelled(lock: MongoLock) -> None:
    with pytest.raises(LockCancelled):
        lock.acquire()


class TestTurns:
    """Waiters get the lock in their turn."""

    async def test_handed_over_to_a_coroutine(self, key: str, elsewhere: Elsewhere) -> None:
        first = elsewhere(key)
        await first.aacquire()
        waiting = asyncio.create_task(mongo_lock(key).aacquire())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await first.arelease()
        assert (await waiting).held
        await waiting.result().arelease()

    def test_threads_of_one_process_exclude_one_another(self, key: str, in_thread: InThread) -> None:
        inside, most = [], []

        def work() -> None:
            for _ in range(5):
                with mongo_lock(key, wait=30, reentrant=True):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()

        threads = [in_thread(work) for _ in range(4)]
        for thread in threads:
            thread.join(30)
        assert most == [1] * 20

    def test_the_queue_has_an_end(
        self, key: str, world: World, elsewhere: Elsewhere, in_thread: InThread, settings: Any
    ) -> None:
        """F13: The length of the queue is limited."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "MAX_WAITERS": 1}
        with elsewhere(key):
            waiter = mongo_lock(key)
            in_thread(lambda: cancelled(waiter))
            assert eventually(lambda: (wanted := own(waiter).wanted) is not None and wanted.lease.until)
            with pytest.raises(LockQueueFull):
                elsewhere(key).acquire()
            waiter.cancel()

    def test_a_deadlock_has_a_victim(
        self, key: str, elsewhere: Elsewhere, in_thread: InThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F45: Two processes wait for each other's locks, and one of them gives up."""
        monkeypatch.setattr(procedures, "DEADLOCK_CHECK_AFTER", 0.2)
        one, two = f"{key}:1", f"{key}:2"
        errors: list[BaseException] = []
        barrier = threading.Barrier(2)

        def take(first: Any, second: Any) -> None:
            with first:
                barrier.wait(10)
                try:
                    with second:
                        pass
                except LockDeadlock as error:
                    errors.append(error)

        there, back = elsewhere(one, wait=30), elsewhere(two, wait=30)
        back._current_session = there._current_session
        threads = [
            in_thread(lambda: take(there, back)),
            in_thread(lambda: take(mongo_lock(two, wait=30), mongo_lock(one, wait=30))),
        ]
        for thread in threads:
            thread.join(30)
        assert len(errors) == 1


class TestTime:
    """Leases, by the clock of the backend."""

    def test_an_extension_moves_the_end_and_never_nearer(self, key: str, face: Face, world: World) -> None:
        """An extension moves the end by the length of the lease from now by default, up to the longest hold."""
        lock = face.acquire(mongo_lock(key, lease=20, max_hold=200, auto_renew=False))
        face.extend(lock, 60)
        face.extend(lock, 5)
        assert 50 < lock.remaining <= 60
        if isinstance(world, MemoryWorld):
            world.let_pass(50)
            face.extend(lock)
            assert 50 < lock.remaining <= 60
        for wrong in (0, -1, True, "5"):
            with pytest.raises((TypeError, ValueError)):
                face.extend(lock, wrong)
        face.extend(lock, 300)
        assert 140 < lock.remaining <= 200
        if isinstance(world, MemoryWorld):
            world.let_pass(150)
            with pytest.raises(LockLost, match="max_hold"):
                lock.ensure_held()
        face.release(lock)
        with pytest.raises(LockMisused):
            face.extend(lock)

    def test_an_owner_waits_while_its_former_run_lives(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        """F49: A message that is delivered twice does not take the lock from the run that has it."""
        former = elsewhere(key, owner="task-1").acquire()
        with pytest.raises(LockNotAcquired):
            face.acquire(mongo_lock(key, owner="task-1", wait=0))
        assert former.held
        former.release()
        assert face.release(face.acquire(mongo_lock(key, owner="task-1", wait=0)))


class TestSignals:
    """The signals of a lock are the same wherever it is kept."""

    @pytest.fixture
    def heard(self, key: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        heard: list[tuple[str, dict[str, Any]]] = []
        for name, signal in signals.EVENTS.items():

            def hear(name: str = name, **facts: Any) -> None:
                if facts["key"].startswith(key):
                    heard.append((name, facts))

            signal.connect(hear, weak=False, dispatch_uid="contract")
        yield heard
        for signal in signals.EVENTS.values():
            signal.disconnect(dispatch_uid="contract")

    def test_a_free_lock(self, heard: list[Any], key: str, face: Face) -> None:
        with face.block(mongo_lock(key)) as lock:
            token = lock.fencing_token
        assert [name for name, _ in heard] == ["acquired", "released"]
        for _, facts in heard:
            assert (facts["token"], facts["mode"], facts["contended"]) == (token, "exclusive", False)
        assert heard[1][1]["held"] >= 0

    def test_a_busy_lock(self, heard: list[Any], key: str, face: Face, elsewhere: Elsewhere) -> None:
        with elsewhere(key):
            assert not face.try_acquire(mongo_lock(key))
            with pytest.raises(LockNotAcquired):
                face.acquire(mongo_lock(key, wait=0.1))
        assert [name for name, _ in heard] == ["contended", "not_acquired"] * 2
        assert "host elsewhere" in heard[0][1]["reason"]
        assert heard[3][1]["reason"] == "busy"
        assert heard[3][1]["waited"] >= 0.1

    def test_a_wait(self, heard: list[Any], key: str, elsewhere: Elsewhere, in_thread: InThread) -> None:
        first = elsewhere(key).acquire()
        thread = in_thread(lambda: mongo_lock(key).acquire().release())
        assert eventually(lambda: heard)
        first.release()
        thread.join(10)
        assert [name for name, _ in heard] == ["contended", "acquired", "released"]
        assert heard[1][1]["contended"]
        assert heard[1][1]["waited"] > 0

    def test_a_loss(self, heard: list[Any], key: str, world: World) -> None:
        lock = mongo_lock(key, lease=0.3, auto_renew=False).acquire()
        world.let_pass(0.4)
        assert eventually(lambda: len(heard) == 2)
        assert heard[1][0] == "lost"
        assert "lease ended" in heard[1][1]["reason"]
        assert 0.2 < heard[1][1]["held"] < 0.5
        assert not lock.release()
        assert len(heard) == 2

    def test_whatever_was_acquired_ends_once(self, heard: list[Any], key: str, elsewhere: Elsewhere) -> None:
        lock = mongo_lock(key).acquire()
        with pytest.warns(ResourceWarning) as warned:  # noqa: PT031
            del lock
            assert eventually(lambda: len(warned) > 0)
        assert elsewhere(key, wait=10).acquire().release()
        assert [name for name, _ in heard] == ["acquired", "released"]


def test_a_closed_session_says_so(key: str, world: World, elsewhere: Elsewhere) -> None:
    lock = elsewhere(key).acquire()
    world.sessions[-1].close()
    assert lock.lost
    again = MongoLock(lock._current_session, lock.keys, lock.terms, lock.options)
    with pytest.raises(LockMisused, match="closed"):
        again.acquire()
    began = time.monotonic()
    world.sessions[-1].close()  # once more, because refused locks leave nothing to wait for
    assert time.monotonic() - began < 1
    assert mongo_lock(key).try_acquire()
