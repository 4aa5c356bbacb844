"""Who does not pay for another key, and for the program's own code: F108 to F112, F116, F157, F158."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import Options
from django_mongolock.engine.session.ending import ABANDONED
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.notifications import CALLBACK_THREADS
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockBackendFailed, LockError, LockNotAcquired
from tests.engine.conftest import Document
from tests.engine.parties import Parties, Party
from tests.engine.stuck import stuck
from tests.engine.waiters import InThread
from tests.support.failpoints import failpoint
from tests.support.grants import grant_of, new_grant
from tests.support.waiting import eventually

SHORT = Terms(lease=8, margin=0.8, waiter_lease=8)
CALM = Terms(lease=60, margin=1)


async def took(lock: MongoLock) -> float:
    """How long it takes to acquire the lock and to release it, or to fail."""
    began = clock.now()
    with contextlib.suppress(LockError):
        async with lock:
            pass
    return clock.now() - began


# Other keys


@pytest.mark.long
async def test_tries_of_a_stuck_key(process: Party, collection: Collection[Document]) -> None:
    """F110: sixteen coroutines try a key whose document is in a transaction. Two commands are under way; other keys go
    on at once, and everybody is back in the time of one command."""
    process.lock(CALM, "k").acquire().release()
    process.lock(CALM, "free").acquire().release()
    with stuck(collection, "k"):
        trying = [asyncio.create_task(took(process.lock(CALM, "k", wait=0))) for _ in range(16)]
        await asyncio.sleep(0.1)
        assert await took(process.lock(CALM, "free")) < 2
        assert max(await asyncio.gather(*trying)) < 5 + 2


@pytest.mark.long
def test_many_stuck_keys_and_a_few_others(process: Party, collection: Collection[Document]) -> None:
    """F111, F66: thirty-two documents that cannot be renewed cost no other lock of their process its lease."""
    keys = [f"k{number:02}" for number in range(32)]
    held = [process.lock(SHORT, key).acquire() for key in keys]
    others = [process.lock(SHORT, key).acquire() for key in ("a", "b", "k15b", "y", "z")]
    with stuck(collection, *keys):
        end = clock.now() + 2 * SHORT.lease
        while clock.now() < end:
            assert [lock.key for lock in others if not lock.held] == []
            time.sleep(0.05)
        assert not any(lock.held for lock in held)
    assert all(lock.release() for lock in others)


# The end of a process


@pytest.mark.parametrize(
    ("count", "stuck_keys"),
    [
        pytest.param(300, ["k0"], marks=pytest.mark.witness),
        pytest.param(10_000, ["k0", "k5000", "k9999"], marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_many_locks_at_exit(
    process: Party, collection: Collection[Document], count: int, stuck_keys: list[str]
) -> None:
    """F108: some cannot be released in the time allowed; all others are."""
    held = [process.lock(CALM, f"k{number}").acquire() for number in range(count)]
    with stuck(collection, *stuck_keys):
        process.session.close(4)  # on a quiet machine a fraction of that is enough
        left = {each["_id"] for each in collection.find({"holders": {"$ne": []}}, {"_id": 1})}
    assert left == set(stuck_keys)
    assert not any(lock.held for lock in held)


def test_all_kinds_at_exit(process: Party, parties: Parties, collection: Collection[Document]) -> None:
    """F108: waiters, permits and minimum holds: places go, permits are free, a minimum hold lasts."""
    holder = parties.new().lock(CALM, "queue").acquire()
    waiter = parties.waiter(process.lock(CALM, "queue"))
    permits = Terms(lease=60, margin=1, mode="semaphore", capacity=3)
    for terms, key in ((permits, "permits"), (permits, "permits"), (CALM, "plain")):
        process.lock(terms, key).acquire()
    process.lock(Terms(lease=60, margin=1, min_hold=30), "minimum").acquire()
    assert eventually(lambda: collection.find_one({"_id": "queue", "waiters.0": {"$exists": True}}))
    process.session.close()
    documents = {each["_id"]: each for each in collection.find()}
    assert documents["queue"]["waiters"] == documents["permits"]["holders"] == documents["plain"]["holders"] == []
    assert "released" in documents["minimum"]["holders"][0]
    assert waiter.end().error is not None
    assert holder.release()


# The program's own code


@pytest.mark.long
def test_a_slow_receiver(new_session: Callable[..., Session], collection: Collection[Document]) -> None:
    """F109: a receiver of `lock_lost` that takes its time delays no renewal, no release and no other event."""
    told: list[str] = []
    go = threading.Event()

    def observe(event: str, grant: Grant) -> None:
        if event == "lost":
            told.append(grant.key)
            go.wait(30)

    session = new_session(observer=observe)
    locks = [MongoLock(lambda: session, (f"k{number}",), Options(SHORT)).acquire() for number in range(6)]
    collection.update_many({"_id": {"$in": ["k0", "k1"]}}, {"$set": {"holders": []}})
    try:
        assert eventually(lambda: sorted(told) == ["k0", "k1"])
        time.sleep(SHORT.lease * 1.2)
        assert all(lock.held for lock in locks[2:])
        assert all(lock.release() for lock in locks[2:])
    finally:
        go.set()


@pytest.mark.long
def test_many_slow_callbacks(new_session: Callable[..., Session], collection: Collection[Document]) -> None:
    """F112: more of them are called than there are threads at first, and none waits for the others."""
    told: list[str] = []
    go = threading.Event()

    def on_lost(lock: MongoLock) -> None:
        told.append(lock.key)
        go.wait(30)

    session, count = new_session(), CALLBACK_THREADS + 1
    options = Options(Terms(lease=1, margin=0.1), on_lost=on_lost)
    locks = [MongoLock(lambda: session, (f"k{number}",), options).acquire() for number in range(count)]
    collection.update_many({}, {"$set": {"holders": []}})
    try:
        assert eventually(lambda: len(told) == count, 5)
    finally:
        go.set()
    assert not any(lock.held for lock in locks)


# Closed event loops


@pytest.mark.parametrize("held", [True, False], ids=["holding", "waiting"])
def test_a_task_of_a_closed_loop(
    process: Party, parties: Parties, collection: Collection[Document], held: bool
) -> None:
    """F116: a task whose event loop was closed goes on never more. Somebody refers to it still; its lock and its place
    in the queue go even so."""
    short = Terms(lease=1.2, margin=0.1, waiter_lease=1.2)
    holder = None if held else parties.new().lock(CALM).acquire()
    loop = asyncio.new_event_loop()

    async def take() -> None:
        async with process.lock(short):
            await asyncio.sleep(60)

    task = loop.create_task(take())
    where = {"_id": "k", "holders.session" if held else "waiters.session": process.session.id}
    end = clock.now() + 10
    while not collection.count_documents(where) and clock.now() < end:
        loop.run_until_complete(asyncio.sleep(0.02))
    loop.close()
    assert collection.count_documents(where)
    assert eventually(lambda: not collection.count_documents(where), 5)
    assert not process.session.queue.waiting
    del task
    if holder is not None:
        assert holder.release()


# Several keys


@pytest.mark.long
@pytest.mark.parametrize("wait", [0, 1])
def test_eight_keys_have_one_deadline(parties: Parties, collection: Collection[Document], wait: float) -> None:
    """F157: back within the wait and the time of one command; what it had goes in the background."""
    process, other = parties.new(timeout=2.0), parties.new()
    holder = other.lock(CALM, "k7").acquire()
    lock = MongoLock(lambda: process.session, tuple(f"k{number}" for number in range(8)), Options(CALM, wait))
    data = {"failCommands": ["findAndModify", "update"], "appName": process.appname}
    with failpoint(collection.database.client, "failCommand", {**data, "blockConnection": True, "blockTimeMS": 800}):
        began = clock.now()
        with pytest.raises(LockBackendFailed):
            lock.acquire()
        assert clock.now() - began < wait + 2 + 1.5
    assert eventually(lambda: collection.count_documents({"holders": {"$ne": []}}) == 1)
    assert holder.release()


def test_what_is_given_back_is_given_back_at_once(process: Party, parties: Parties, commands: Any) -> None:
    """F157: in one command, so that a try of one of these keys that follows finds it free."""
    holder = parties.new().lock(CALM, "k7").acquire()
    keys = tuple(f"k{number}" for number in range(8))
    lock = MongoLock(lambda: process.session, keys, Options(CALM, 0))
    with pytest.raises(LockNotAcquired):
        lock.acquire()
    for key in keys[:7]:
        assert process.lock(CALM, key, wait=0).acquire().release()
    assert holder.release()


# Permits


def test_permits_are_handed_to_those_whom_no_other_command_serves(
    process: Party, parties: Parties, in_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F158: while the first of the line asks for itself, a permit that is released goes to the one behind it. Handed to
    the first, it would be free until that has been answered."""
    terms = Terms(lease=60, margin=1, mode="semaphore", capacity=2)
    apply, asks, go = process.session.store.apply, threading.Event(), threading.Event()
    held = process.lock(terms).acquire()

    def slow(key: str, step: Any, timeout: float) -> Any:
        if step.add is not None and not step.given and not asks.is_set():
            asks.set()
            go.wait(10)
        return apply(key, step, timeout)

    monkeypatch.setattr(process.session.store, "apply", slow)
    monkeypatch.setattr(process.session.store, "take_free", lambda *arguments: None)
    first = parties.waiter(process.lock(terms))
    assert asks.wait(10)
    second = parties.waiter(process.lock(terms))
    assert eventually(lambda: len(process.session.queue.waiting) == 2)
    assert held.release()
    assert second.end(5).has_it
    assert not first.done
    go.set()
    assert first.end().has_it


def test_a_permit_is_handed_to_one_whose_hand_over_had_no_answer(process: Party) -> None:
    """F158: nothing asks for it until its place is renewed, so the next permit is handed to it."""
    terms = Terms(lease=60, margin=1, mode="semaphore", capacity=2)
    session, lock = process.session, process.lock(terms)
    with process.lock(terms) as held:
        waiter = new_grant(session, lock, object())
        session.queue.join(waiter, trial=False)
        assert session.queue.reserve_handover(grant_of(held)) is waiter
        waiter.waiting.sent = True
        session.queue.finish_handover(waiter, None)
        assert session.queue.reserve_handover(grant_of(held)) is waiter
        session.queue.finish_handover(waiter, None)
        session.queue.leave(waiter)
        session.ending.end(waiter, ABANDONED)
