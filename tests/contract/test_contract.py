"""What `mongo_lock`, `mongo_semaphore` and `mongo_locked` promise: on MongoDB and in memory, blocking and async."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_mongolock import (
    SKIPPED,
    LockCancelled,
    LockDeadlock,
    LockLost,
    LockMisused,
    LockNotAcquired,
    LockQueueFull,
    LockReentry,
    MongoLock,
    lock_key,
    mongo_lock,
    mongo_locked,
    mongo_semaphore,
    signals,
)
from tests.contract.conftest import Elsewhere, World
from tests.engine.faces import Face
from tests.support.grants import own
from tests.support.looking import new_key
from tests.support.waiting import eventually

InThread = Callable[..., threading.Thread]


@pytest.fixture
def key(world: World) -> str:
    return new_key("contract")


def test_a_try_that_waits(key: str, face: Face, elsewhere: Elsewhere) -> None:
    """F155: for as long as it is told, whatever the lock was made with; it returns whether the lock is held then."""
    lock = mongo_lock(key, wait=0)
    with elsewhere(key):
        began = time.monotonic()
        assert face.call(lock, "try_acquire", 0.2) is False
        assert time.monotonic() - began >= 0.2
    assert face.call(lock, "try_acquire", 0.2) is True
    assert face.release(lock)


def test_the_time_that_several_keys_took(world: World) -> None:
    """One is waited for after the other."""
    with mongo_lock(new_key("a"), new_key("b")) as lock:
        for grant in own(lock).grants:
            grant.reporting.waited = 2.0
        assert lock.waited == 4.0


class TestOne:
    """One lock, one holder."""

    def test_held_in_the_block_and_free_after_it(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with face.block(mongo_lock(key)) as lock:
            assert lock.held
            assert 0 < lock.remaining <= 30
            assert not elsewhere(key).try_acquire()
        assert lock.remaining == 0
        assert elsewhere(key).try_acquire()

    def test_the_error_of_a_busy_lock_names_the_holder(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with elsewhere(key, label="nightly"), pytest.raises(LockNotAcquired) as caught:
            face.acquire(mongo_lock(key, wait=0))
        assert caught.value.key == key
        assert "host elsewhere" in (caught.value.holder or "")
        assert 0 < caught.value.retry_after <= 33

    def test_a_wait_has_an_end(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with elsewhere(key), pytest.raises(LockNotAcquired) as caught:
            face.acquire(mongo_lock(key, wait=0.2))
        assert caught.value.waited >= 0.2

    def test_tokens_grow(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        tokens = []
        for make in (mongo_lock, elsewhere, mongo_lock):
            with face.block(make(key)) as lock:
                tokens.append(lock.fencing_token)
        assert tokens == sorted(set(tokens))

    def test_what_the_block_raises_comes_out(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with pytest.raises(ZeroDivisionError), face.block(mongo_lock(key)):
            raise ZeroDivisionError
        assert elsewhere(key).try_acquire()

    def test_several_keys_are_all_or_none(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with elsewhere(f"{key}:b"), pytest.raises(LockNotAcquired):
            face.acquire(mongo_lock(f"{key}:a", f"{key}:b", wait=0))
        with face.block(mongo_lock(f"{key}:b", f"{key}:a")) as lock:
            assert lock.keys == (f"{key}:a", f"{key}:b")
            assert set(lock.fencing_tokens) == set(lock.keys)

    def test_taking_it_again_is_an_error_or_meant(self, key: str) -> None:
        with mongo_lock(key) as outer:
            with pytest.raises(LockReentry):
                mongo_lock(key).acquire()
            with mongo_lock(key, reentrant=True) as inner:
                assert inner.fencing_token == outer.fencing_token
            assert outer.held

    def test_one_object_is_one_acquisition(self, key: str) -> None:
        with mongo_lock(key) as lock, pytest.raises(LockMisused):
            lock.acquire()

    def test_release_twice(self, key: str, face: Face) -> None:
        lock = face.acquire(mongo_lock(key))
        assert face.release(lock)
        assert not face.release(lock)

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    def test_a_forgotten_lock_is_given_back(self, key: str, elsewhere: Elsewhere) -> None:
        mongo_lock(key).acquire()
        elsewhere(key, wait=10).acquire()


class TestTogether:
    """Those who may hold a key at once."""

    def test_readers_share_and_a_writer_waits(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with face.block(mongo_lock(key, mode="shared")), elsewhere(key, mode="shared", wait=0):
            assert not elsewhere(key).try_acquire()
        assert elsewhere(key).try_acquire()

    def test_permits(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        with face.block(mongo_semaphore(key, 2)), elsewhere(key, permits=2, wait=0):
            assert not elsewhere(key, permits=2).try_acquire()
        assert elsewhere(key, permits=2).try_acquire()


def cancelled(lock: MongoLock) -> None:
    with pytest.raises(LockCancelled):
        lock.acquire()


class TestTurns:
    """Who waits gets it in its turn."""

    @pytest.mark.long
    def test_handed_over_to_another_process(self, key: str, elsewhere: Elsewhere, in_thread: InThread) -> None:
        first = elsewhere(key).acquire()
        got = []
        in_thread(lambda: got.append(mongo_lock(key).acquire()))
        assert eventually(lambda: not elsewhere(key).try_acquire())
        first.release()
        assert eventually(lambda: got)
        got[0].release()

    async def test_handed_over_to_a_coroutine(self, key: str, elsewhere: Elsewhere) -> None:
        first = elsewhere(key)
        await first.aacquire()
        waiting = asyncio.create_task(mongo_lock(key).aacquire())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await first.arelease()
        assert (await waiting).held
        await waiting.result().arelease()

    def test_first_come_first_served(self, key: str, world: World, elsewhere: Elsewhere, in_thread: InThread) -> None:
        """Over processes, each of which queues before the next one comes."""
        first, order = elsewhere(key).acquire(), []

        def wait(number: int) -> None:
            with elsewhere(key, wait=20):
                order.append(number)

        for number in range(3):
            in_thread(lambda number=number: wait(number))
            assert eventually(partial(world.is_queued, number + 1))
        first.release()
        assert eventually(lambda: len(order) == 3)
        assert order == [0, 1, 2]

    def test_threads_of_one_process_exclude_one_another(self, key: str, in_thread: InThread) -> None:
        inside, most = [], []

        def work() -> None:
            for _ in range(5):
                with mongo_lock(key, wait=30):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()

        threads = [in_thread(work) for _ in range(4)]
        for thread in threads:
            thread.join(30)
        assert most == [1] * 20

    def test_a_wait_is_cancelled(self, key: str, elsewhere: Elsewhere, in_thread: InThread) -> None:
        lock = mongo_lock(key)
        with elsewhere(key):
            thread = in_thread(lambda: cancelled(lock))
            assert eventually(lambda: own(lock).wanted)
            lock.cancel()
            thread.join(10)

    async def test_a_cancelled_task_leaves_nothing(self, key: str, elsewhere: Elsewhere) -> None:
        """F36."""
        first = elsewhere(key)
        await first.aacquire()
        waiting = asyncio.create_task(mongo_lock(key).aacquire())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await first.arelease()
        await elsewhere(key, wait=5).aacquire()

    def test_the_queue_has_an_end(
        self, key: str, world: World, elsewhere: Elsewhere, in_thread: InThread, settings: Any
    ) -> None:
        """F13."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "MAX_WAITERS": 1}
        with elsewhere(key):
            waiter = mongo_lock(key)
            in_thread(lambda: cancelled(waiter))
            assert eventually(lambda: (wanted := own(waiter).wanted) is not None and wanted.lease.until)
            with pytest.raises(LockQueueFull):
                elsewhere(key).acquire()
            waiter.cancel()

    @pytest.mark.long
    def test_a_deadlock_has_a_victim(self, key: str, elsewhere: Elsewhere, in_thread: InThread) -> None:
        """F45: two processes, each of which waits for what the other one has."""
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
        back._session_now = there._session_now
        threads = [
            in_thread(lambda: take(there, back)),
            in_thread(lambda: take(mongo_lock(two, wait=30), mongo_lock(one, wait=30))),
        ]
        for thread in threads:
            thread.join(30)
        assert len(errors) == 1


class TestTime:
    """Leases, by the clock of whoever keeps the locks."""

    @pytest.mark.long
    def test_a_living_holder_keeps_it(self, key: str, world: World, elsewhere: Elsewhere) -> None:
        with mongo_lock(key, lease=2) as lock:
            world.let_pass(4.5)
            assert lock.held
            assert not elsewhere(key).try_acquire()

    def test_a_lease_that_is_not_renewed_ends(self, key: str, world: World, face: Face, elsewhere: Elsewhere) -> None:
        lost: list[object] = []
        lock = face.acquire(mongo_lock(key, lease=0.3, auto_renew=False, on_lost=lost.append))
        world.let_pass(0.4)
        assert lock.lost
        with pytest.raises(LockLost):
            lock.ensure_held()
        assert eventually(lambda: lost == [lock])
        elsewhere(key, wait=5).acquire()
        assert not face.release(lock)

    def test_leaving_the_block_tells_of_the_loss(self, key: str, world: World, face: Face) -> None:
        with pytest.raises(LockLost), face.block(mongo_lock(key, lease=0.3, auto_renew=False)):
            world.let_pass(0.4)

    @pytest.mark.long
    def test_extend(self, key: str, world: World, face: Face) -> None:
        lock = face.acquire(mongo_lock(key, lease=2, auto_renew=False))
        face.extend(lock, 60)
        world.let_pass(2.2)
        assert lock.held
        assert lock.remaining > 50
        assert face.release(lock)

    @pytest.mark.long
    def test_a_dead_holder_holds_it_for_its_lease(
        self, key: str, world: World, face: Face, elsewhere: Elsewhere
    ) -> None:
        """F27: and no longer."""
        dead = elsewhere(key, lease=0.5).acquire()
        world.kill(dead)
        assert not mongo_lock(key).try_acquire()
        world.let_pass(1.6)  # the lease and its margin
        with face.block(mongo_lock(key, wait=0)):
            pass

    @pytest.mark.long
    def test_who_waits_for_a_dead_holder_gets_it(self, key: str, world: World, elsewhere: Elsewhere) -> None:
        dead = elsewhere(key, lease=0.5).acquire()
        world.kill(dead)
        with mongo_lock(key, wait=60) as lock:
            assert lock.waited < 20
            assert lock.acquired_at > dead.acquired_at + timedelta(seconds=0.5)

    @pytest.mark.long
    def test_max_hold(self, key: str, world: World, elsewhere: Elsewhere) -> None:
        """Renewed until then; told then, and free for others then."""
        told: list[object] = []
        lock = mongo_lock(key, lease=0.6, max_hold=1, on_lost=told.append).acquire()
        world.let_pass(0.8)
        assert lock.held
        world.let_pass(0.4)
        with pytest.raises(LockLost, match="max_hold"):
            lock.ensure_held()
        assert eventually(lambda: told == [lock])
        elsewhere(key, wait=5).acquire()
        assert not lock.release()

    @pytest.mark.long
    def test_min_hold(self, key: str, world: World, face: Face, elsewhere: Elsewhere) -> None:
        face.release(face.acquire(mongo_lock(key, min_hold=1)))
        with pytest.raises(LockNotAcquired, match="minimum hold"):
            elsewhere(key, wait=0).acquire()
        world.let_pass(1.1)
        assert elsewhere(key).try_acquire()

    def test_an_owner_waits_while_its_former_run_lives(self, key: str, face: Face, elsewhere: Elsewhere) -> None:
        """F49: a message that is delivered twice does not take the lock from the run that has it."""
        former = elsewhere(key, owner="task-1").acquire()
        with pytest.raises(LockNotAcquired):
            face.acquire(mongo_lock(key, owner="task-1", wait=0))
        assert former.held
        former.release()
        assert face.release(face.acquire(mongo_lock(key, owner="task-1", wait=0)))


class TestSignals:
    """What is told of a lock: the same, wherever it is kept."""

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

    def test_whatever_was_acquired_ends_once(self, heard: list[Any], key: str, world: World) -> None:
        """Also what nobody released."""
        lock = mongo_lock(key).acquire()
        with pytest.warns(ResourceWarning) as warned:  # noqa: PT031
            del lock
            assert eventually(lambda: len(warned) > 0)
        assert [name for name, _ in heard] == ["acquired", "released"]


class TestDecorator:
    """`mongo_locked`."""

    def test_locked_and_free_after(self, key: str, elsewhere: Elsewhere) -> None:
        @mongo_locked("{key}")
        def work(key: str) -> bool:
            return elsewhere(lock_key("{key}", key=key)).try_acquire()

        assert not work(key)
        assert elsewhere(lock_key("{key}", key=key)).try_acquire()

    async def test_coroutines(self, key: str, elsewhere: Elsewhere) -> None:
        @mongo_locked("{key}")
        async def work(key: str) -> bool:
            return await elsewhere(lock_key("{key}", key=key)).atry_acquire()

        assert not await work(key)
        assert await elsewhere(lock_key("{key}", key=key)).atry_acquire()

    def test_skip(self, key: str, elsewhere: Elsewhere) -> None:
        @mongo_locked("{key}", wait=0, on_contention="skip")
        def work(key: str) -> str:
            return "done"

        with elsewhere(lock_key("{key}", key=key)):
            assert work(key) is SKIPPED
        assert work(key) == "done"

    def test_respond(self, key: str, elsewhere: Elsewhere, rf: RequestFactory) -> None:
        @mongo_locked("{key}", wait=0, on_contention="respond")
        def view(request: HttpRequest, key: str) -> HttpResponse:
            return HttpResponse("ok")

        with elsewhere(lock_key("{key}", key=key)):
            response = view(rf.get("/"), key)
        assert response.status_code == 423
        assert 1 <= int(response["Retry-After"]) <= 33
        assert view(rf.get("/"), key).status_code == 200


def test_a_closed_session_says_so(key: str, world: World, elsewhere: Elsewhere) -> None:
    lock = elsewhere(key).acquire()
    world.sessions[-1].close()
    assert lock.lost
    again = MongoLock(lock._session_now, lock.keys, lock.options)
    with pytest.raises(LockMisused, match="closed"):
        again.acquire()
    began = time.monotonic()
    world.sessions[-1].close()  # once more: what was refused leaves nothing to wait for
    assert time.monotonic() - began < 1
    assert mongo_lock(key).try_acquire()
