"""A minimum hold ends when it was to end: a renewal that comes after the release leaves it alone (F64)."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from pymongo.collection import Collection

from django_mongolock.engine.document import Terms, entry
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.memory_server import MemoryServer, MemoryStore
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.step import Limits, Step
from django_mongolock.engine.store import Store
from tests.engine.conftest import Commands, Document, LockMaker
from tests.engine.waiters import InThread
from tests.support.waiting import eventually

Read = Callable[[], Document]

#: The hold is longer than the lease, as that of a job is which runs once a day.
HELD = Terms(lease=3, margin=1, waiter_lease=3, min_hold=60)
TIMEOUT = 10.0
#: How long the server holds up a renewal, in milliseconds: less than a third of the lease, after which it times out.
DELAY = 700


@pytest.fixture(params=["mongodb", "memory"])
def twin(request: pytest.FixtureRequest, store: MongoStore, collection: Collection[Document]) -> tuple[Store, Read]:
    """Both that carry the rule out: a store, and what reads the only holder of the key "k" from it."""
    if request.param == "mongodb":
        return store, lambda: only_holder(collection.find_one({"_id": "k"}))
    server = MemoryServer()
    return MemoryStore(server, Limits()), lambda: only_holder(server.documents["k"])


def only_holder(document: Document | None) -> Document:
    assert document is not None
    (holder,) = document["holders"]
    return dict(holder)


#: The renewals that may be on their way when the lock is given back: that of the heartbeat, and an extension.
RENEWALS: dict[str, dict[str, Any]] = {"renewal": {}, "extension": {"lease": 90_000, "server_lease": 99_000}}


@pytest.mark.parametrize("kind", RENEWALS)
@pytest.mark.parametrize("way", ["one", "in bulk"])
def test_a_renewal_after_the_release_leaves_the_end_alone(twin: tuple[Store, Read], way: str, kind: str) -> None:
    """F64: the entry of a released lock is the same, to the millisecond, after a renewal that was on its way."""
    store, read = twin
    store.apply("k", Step(ask="g", add=entry("g", "s", HELD, {})), TIMEOUT)
    store.apply("k", Step(remove=("g",), given="g"), TIMEOUT)
    released = read()
    time.sleep(0.05)  # so that an end that is counted from now is another one
    renewal = Step(ask="g" if way == "one" else "", renew=("g",), beat=7, **RENEWALS[kind])
    if way == "one":
        store.apply("k", renewal, TIMEOUT)
    else:
        store.renew(["k"], renewal, TIMEOUT)
    assert read()["until"] - released["acquired_at"] == timedelta(seconds=HELD.min_hold)
    assert read() == released


@pytest.mark.parametrize("kind", RENEWALS)
def test_others_get_it_when_it_was_to_end(kind: str) -> None:
    """F64: with the clock of the rule in Python, which a test can move: refused a moment before, granted after it."""
    server = MemoryServer()
    store = MemoryStore(server, Limits())
    store.apply("k", Step(ask="g1", add=entry("g1", "s", HELD, {})), TIMEOUT)
    server.advance(3)
    store.apply("k", Step(ask="g1", renew=("g1",), beat=1), TIMEOUT)
    server.advance(2)
    store.apply("k", Step(remove=("g1",), given="g1"), TIMEOUT)
    store.renew(["k"], Step(renew=("g1",), beat=2, **RENEWALS[kind]), TIMEOUT)
    server.advance(54)
    assert not store.apply("k", Step(ask="g2", add=entry("g2", "s", HELD, {}), trial=True), TIMEOUT).held
    server.advance(1.5)
    assert store.apply("k", Step(ask="g3", add=entry("g3", "s", HELD, {}), trial=True), TIMEOUT).held


def test_a_renewal_of_many_renews_the_others(twin: tuple[Store, Read]) -> None:
    """F64: what was released stays as it is; whoever else is in the same renewal is renewed."""
    store, _ = twin
    shared = Terms("shared", 5, lease=2, margin=1, waiter_lease=2, min_hold=60)
    for name in ("g1", "g2"):
        store.apply("k", Step(ask=name, add=entry(name, "s", shared, {})), TIMEOUT)
    store.apply("k", Step(remove=("g1",), given="g1"), TIMEOUT)
    found = store.renew(["k"], Step(renew=("g1", "g2"), beat=7), TIMEOUT)["k"].holders
    assert found["g2"].number == 7
    assert found["g1"].number == 0


@pytest.mark.long
def test_a_heartbeat_that_is_late_does_not_lengthen_the_hold(
    lock: LockMaker, failpoint: Callable[..., None], commands: Commands, entries: Callable[..., list[Any]]
) -> None:
    """F64: the server holds the heartbeat's renewal up until the lock has been given back; the hold ends as it was
    to."""
    mine = lock(terms=HELD).acquire()
    failpoint(["update"], times=1, blockConnection=True, blockTimeMS=DELAY)
    commands.clear()
    assert eventually(lambda: "update" in commands.names)
    mine.release()
    time.sleep(DELAY / 1000 + 0.3)  # it has arrived by now
    (kept,) = entries()
    assert kept["until"] - kept["acquired_at"] == timedelta(seconds=HELD.min_hold)


@pytest.mark.long
def test_no_hold_is_lengthened_in_the_race_of_heartbeat_and_release(
    lock: LockMaker, collection: Collection[Document], commands: Commands
) -> None:
    """F64: three hundred locks are given back while their heartbeat renews them: each hold lasts as long as it was
    to."""
    terms = Terms(lease=3, margin=10, waiter_lease=3, min_hold=600)
    locks = [lock(f"k{number:03}", terms=terms).acquire() for number in range(300)]
    commands.clear()
    assert eventually(lambda: "update" in commands.names)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(MongoLock.release, reversed(locks)))  # the renewal goes by the order of the keys
    time.sleep(1)
    holders = [holder for document in collection.find() for holder in document["holders"]]
    spans = [holder["until"] - holder["acquired_at"] for holder in holders]
    lengthened = [span.total_seconds() for span in spans if span != timedelta(seconds=600)]
    assert (len(spans), lengthened) == (300, [])


@pytest.mark.parametrize("early", [False, True])
def test_a_release_without_an_answer_leaves_the_hold_alone(
    lock: LockMaker, failpoint: Callable[..., None], entries: Callable[..., list[Any]], early: bool
) -> None:
    """F64: the release is made again in the background, and the hold ends as it was to, unless it was to end early."""
    mine = lock(terms=HELD).acquire()
    failpoint(["findAndModify"], times=1, errorCode=50)
    assert mine.release(early=early)
    assert eventually(lambda: not any("released" not in holder for holder in entries()))
    spans = [holder["until"] - holder["acquired_at"] for holder in entries()]
    assert spans == ([] if early else [timedelta(seconds=HELD.min_hold)])


def lasts(entries: Callable[..., list[Any]]) -> bool:
    """Whether the only holder is released, and its hold ends as it was to."""
    found = entries()
    return [(holder["until"] - holder["acquired_at"], "released" in holder) for holder in found] == [
        (timedelta(seconds=HELD.min_hold), True)
    ]


@pytest.mark.long
async def test_a_release_that_is_cancelled_leaves_the_hold_alone(
    lock: LockMaker, failpoint: Callable[..., None], entries: Callable[..., list[Any]]
) -> None:
    """F64: the release is made again in the background."""
    mine = await lock(terms=HELD).aacquire()
    failpoint(["findAndModify"], times=1, blockConnection=True, blockTimeMS=DELAY)
    releasing = asyncio.create_task(mine.arelease())
    await asyncio.sleep(0.1)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert await asyncio.to_thread(eventually, lambda: lasts(entries))
    assert not await asyncio.to_thread(eventually, lambda: not lasts(entries), 1.5)


def test_a_thread_that_ends_while_it_holds_leaves_the_hold_alone(
    lock: LockMaker, in_thread: InThread, entries: Callable[..., list[Any]]
) -> None:
    """F64: its lock is released for it, and kept until the hold ends."""
    mine = lock(terms=HELD)
    in_thread(mine.acquire).join(10)
    assert eventually(lambda: lasts(entries))


def test_what_the_caller_never_had_is_not_kept(lock: LockMaker, entries: Callable[..., list[Any]]) -> None:
    """Of two keys the second is busy: the first is free again at once."""
    with lock("b", terms=Terms(lease=30)):
        assert not lock("a", "b", terms=HELD).try_acquire()
        assert entries("a") == []
