"""Slow keys and slow user code do not delay other keys: F108 to F112, F116, F157, F158."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.notifications import CALLBACK_THREADS
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockBackendFailed, LockError, LockNotAcquired
from tests.engine.conftest import Document, Here, HoldUp, LockMaker, make_lock
from tests.support.waiting import eventually

SHORT = Terms(lease=8, margin=0.8, waiter_lease=8)
CALM = Terms(lease=60, margin=1)


@contextlib.contextmanager
def stuck(collection: Collection[Document], *keys: str) -> Iterator[None]:
    """Write to the documents of *keys* in a transaction that ends with the block, as the fence of `MongoLock.atomic`
    does.

    A write to such a document waits after its command was parsed.
    """
    client = collection.database.client
    with client.start_session() as session, session.start_transaction():
        found = collection.update_many({"_id": {"$in": keys}}, {"$inc": {"fence": 1}}, session=session)
        assert found.matched_count == len(keys)
        yield
        session.abort_transaction()


async def took(lock: MongoLock) -> float:
    """Return the seconds to acquire the lock and to release it, or to fail."""
    began = clock.now()
    with contextlib.suppress(LockError):
        async with lock:
            pass
    return clock.now() - began


# Other keys


@pytest.mark.long
async def test_tries_of_a_stuck_key(lock: LockMaker, collection: Collection[Document]) -> None:
    """F110: Sixteen coroutines try a key with a document in a transaction. Two commands are under way. Other keys go on
    at once, and all coroutines return in the time of one command."""
    lock(terms=CALM).acquire().release()
    lock("free", terms=CALM).acquire().release()
    with stuck(collection, "k"):
        trying = [asyncio.create_task(took(lock(terms=CALM, wait=0))) for _ in range(16)]
        await asyncio.sleep(0.1)
        assert await took(lock("free", terms=CALM)) < 2
        assert max(await asyncio.gather(*trying)) < 5 + 2


@pytest.mark.long
def test_many_stuck_keys_and_a_few_others(lock: LockMaker, collection: Collection[Document]) -> None:
    """F111, F66: Thirty-two documents that cannot be renewed cost no other lock of their process its lease."""
    keys = [f"k{number:02}" for number in range(32)]
    held = [lock(key, terms=SHORT).acquire() for key in keys]
    others = [lock(key, terms=SHORT).acquire() for key in ("a", "b", "k15b", "y", "z")]
    with stuck(collection, *keys):
        end = clock.now() + 2 * SHORT.lease
        while clock.now() < end:
            assert [each.key for each in others if not each.held] == []
            time.sleep(0.05)
        assert not any(each.held for each in held)
    assert all(each.release() for each in others)


# The end of a process


@pytest.mark.parametrize(
    ("count", "stuck_keys"),
    [
        pytest.param(300, ["k0"], marks=pytest.mark.witness, id="one"),
        pytest.param(300, [f"k{number}" for number in range(0, 300, 5)], marks=pytest.mark.long, id="many"),
        pytest.param(10_000, ["k0", "k5000", "k9999"], marks=[pytest.mark.long, pytest.mark.timeout(600)], id="three"),
    ],
)
def test_many_locks_at_exit(here: Here, count: int, stuck_keys: list[str]) -> None:
    """F108: A few locks cannot be released in the allowed time, and all others are."""
    held = [here.lock(f"k{number}", terms=CALM).acquire() for number in range(count)]
    with stuck(here.collection, *stuck_keys):
        here.session.close(4)  # on a quiet machine a fraction of that is enough
        left = {each["_id"] for each in here.collection.find({"holders": {"$ne": []}}, {"_id": 1})}
    assert left == set(stuck_keys)
    assert not any(lock.held for lock in held)


def test_all_kinds_at_exit(here: Here) -> None:
    """F108: At exit, places of waiters are removed, permits are released, and minimum holds last."""
    holder = here.other("queue", terms=CALM).acquire()
    waiter = here.waiter(here.lock("queue", terms=CALM, wait=60))
    permits = Terms(lease=60, margin=1, mode="semaphore", capacity=3)
    for terms, key in ((permits, "permits"), (permits, "permits"), (CALM, "plain")):
        here.lock(key, terms=terms).acquire()
    here.lock("minimum", terms=Terms(lease=60, margin=1, min_hold=30)).acquire()
    assert eventually(lambda: len(here.entries("queue")) == 2)
    here.session.close()
    documents = {each["_id"]: each for each in here.collection.find()}
    assert documents["queue"]["waiters"] == documents["permits"]["holders"] == documents["plain"]["holders"] == []
    assert "released" in documents["minimum"]["holders"][0]
    assert waiter.end().error is not None
    assert holder.release()


# The program's own code


@pytest.mark.long
def test_a_slow_receiver(new_session: Callable[..., Session], collection: Collection[Document]) -> None:
    """F109: A slow receiver of `lock_lost` delays no renewal, no release and no other event."""
    told: list[str] = []
    go = threading.Event()

    def observe(event: str, grant: Grant) -> None:
        if event == "lost":
            told.append(grant.key)
            go.wait(30)

    session = new_session(observer=observe)
    locks = [make_lock(session, f"k{number}", terms=SHORT).acquire() for number in range(6)]
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
    """F112: More callbacks are called than there are threads at first. None waits for the others."""
    told: list[str] = []
    go = threading.Event()

    def on_lost(lock: MongoLock) -> None:
        told.append(lock.key)
        go.wait(30)

    session, count = new_session(), CALLBACK_THREADS + 1
    terms = Terms(lease=1, margin=0.1)
    locks = [make_lock(session, f"k{number}", terms=terms, on_lost=on_lost).acquire() for number in range(count)]
    collection.update_many({}, {"$set": {"holders": []}})
    try:
        assert eventually(lambda: len(told) == count, 5)
    finally:
        go.set()
    assert not any(lock.held for lock in locks)


# Closed event loops


@pytest.mark.parametrize("held", [True, False], ids=["holding", "waiting"])
def test_a_task_of_a_closed_loop(here: Here, held: bool) -> None:
    """F116: A task of a closed event loop never goes on. The task's lock and its place in the queue are removed,
    although references to it still exist."""
    short = Terms(lease=1.2, margin=0.1, waiter_lease=1.2)
    holder = None if held else here.other(terms=CALM).acquire()
    loop = asyncio.new_event_loop()

    async def take() -> None:
        async with here.lock(terms=short):
            await asyncio.sleep(60)

    task = loop.create_task(take())
    where = {"_id": "k", "holders.session" if held else "waiters.session": here.session.id}
    end = clock.now() + 10
    while not here.collection.count_documents(where) and clock.now() < end:
        loop.run_until_complete(asyncio.sleep(0.02))
    loop.close()
    assert here.collection.count_documents(where)
    assert eventually(lambda: not here.collection.count_documents(where), 5)
    assert not here.session.queue.waiting
    del task
    if holder is not None:
        assert holder.release()


# Several keys

EIGHT = [f"k{number}" for number in range(8)]


@pytest.mark.long
@pytest.mark.parametrize(("wait", "limit"), [(0, 2.0), (1, 2.0), (0, 5.0)])
def test_eight_keys_have_one_deadline(here: Here, failpoint: Callable[..., None], wait: float, limit: float) -> None:
    """F157, F197: The caller is back within the wait and the time of one command. The background releases the rest."""
    holder = here.other("k7", terms=CALM).acquire()
    lock = make_lock(here.new_session(command_timeout=limit), *EIGHT, terms=CALM, wait=wait)
    failpoint(["findAndModify", "update"], blockConnection=True, blockTimeMS=800)
    began = clock.now()
    with pytest.raises(LockBackendFailed):
        lock.acquire()
    assert clock.now() - began < wait + limit + 1.5
    failpoint([])
    assert eventually(lambda: here.collection.count_documents({"holders": {"$ne": []}}) == 1)
    assert holder.release()


def test_what_is_given_back_is_given_back_at_once(lock: LockMaker, other: LockMaker) -> None:
    """F157: The first keys are released in one command, so that a following try of one of them finds it free."""
    holder = other("k7", terms=CALM).acquire()
    with pytest.raises(LockNotAcquired):
        lock(*EIGHT, terms=CALM, wait=0).acquire()
    for key in EIGHT[:7]:
        assert lock(key, terms=CALM, wait=0).acquire().release()
    assert holder.release()


# Permits


def test_permits_are_handed_to_those_whom_no_other_command_serves(
    here: Here, hold_up: HoldUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F158: While the first of the line asks for itself, a released permit goes to the one behind it. Handed to the
    first, the permit would be unused until the answer."""
    terms = Terms(lease=60, margin=1, mode="semaphore", capacity=2)
    held = here.lock(terms=terms).acquire()

    gate = hold_up(here.session.store, "apply", lambda key, step, timeout: step.add is not None and not step.given)
    monkeypatch.setattr(here.session.store, "take_free", lambda *arguments: None)
    first = here.waiter(here.lock(terms=terms, wait=60))
    assert gate.there.wait(10)
    second = here.waiter(here.lock(terms=terms, wait=60))
    assert eventually(lambda: len(here.session.queue.waiting) == 2)
    assert held.release()
    assert second.end(5).has_it
    assert not first.done
    gate.go.set()
    assert first.let_go().end().has_it
    second.let_go()
