"""Tombstones are bounded, and cost nothing noticeable: thousands of commands on one key were given up (F77)."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable

import pytest

from django_mongolock.engine.document import MAX_ENTRIES, Terms, entry
from django_mongolock.engine.memory_server import MemoryServer, MemoryStore
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.protocol import TOMBSTONE_TTL
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.step import Limits, Step
from django_mongolock.engine.store import Store
from tests.engine.conftest import Document, LockMaker, make_lock
from tests.support.waiting import eventually

Stored = Callable[..., Document]

TERMS = Terms(lease=60, margin=1, waiter_lease=60)
TIMEOUT = 20.0
#: So many commands are given up; one command leaves tombstones for as many as `BATCH`, a program's for one.
MANY, BATCH = 14_000, 100
#: No document may have more tombstones. (Measured on 6.0.5: a pair takes 1.3 times as long with a thousand of them, 1.9
#: to 2.5 times with four thousand, five times with fourteen thousand.)
MOST = 1_000


def leave_tombstones(store: Store, first: int, last: int, key: str = "k", batch: int = BATCH) -> None:
    """Give up the commands of the grants g*first* to g*last* - 1."""
    for start in range(first, last, batch):
        grants = tuple(f"0123456789ab.{number}" for number in range(start, min(last, start + batch)))
        store.apply(key, Step(ask=grants[0], remove=grants, force=True, tombstone_ttl=TOMBSTONE_TTL), TIMEOUT)


@pytest.fixture(params=["mongodb", "memory"])
def twin(request: pytest.FixtureRequest, store: MongoStore, stored: Stored) -> tuple[Store, Stored]:
    """Both that carry the rule out: a store, and what reads the document of a key."""
    if request.param == "mongodb":
        return store, stored
    server = MemoryServer()
    return MemoryStore(server, Limits()), lambda key="k": server.documents[key]


def tombstones(document: Document) -> list[str]:
    return [tombstone["grant"] for tombstone in document["tombstones"]]


def test_their_number_is_bounded(twin: tuple[Store, Stored]) -> None:
    """F77: after thousands of given-up commands on one key, and it grows no more after more of them."""
    store, read = twin
    leave_tombstones(store, 0, 5_000)
    assert len(tombstones(read())) <= MOST
    leave_tombstones(store, 5_000, 6_000)
    assert len(tombstones(read())) <= MOST


def test_a_single_command_that_buries_too_many(twin: tuple[Store, Stored]) -> None:
    """F77: the bound is one of the document, however many one command gives up."""
    store, read = twin
    leave_tombstones(store, 0, 2 * MOST, batch=2 * MOST)
    assert 0 < len(tombstones(read())) <= MOST


@pytest.mark.long
def test_the_newest_stay(twin: tuple[Store, Stored]) -> None:
    """F77, F17: where they are too many, the oldest go: of a command that was given up last, a copy comes soonest."""
    store, read = twin
    leave_tombstones(store, 0, 5_000)
    leave_tombstones(store, 5_000, 5_100, batch=1)
    assert tombstones(read())[-100:] == [f"0123456789ab.{number}" for number in range(5_000, 5_100)]
    late = "0123456789ab.5099"
    assert not store.apply("k", Step(ask=late, add=entry(late, "s", TERMS, {})), TIMEOUT).held
    assert read()["holders"] == []


def test_those_that_are_needed_stay(twin: tuple[Store, Stored]) -> None:
    """F17: a bound that is reached only by what nobody does on purpose: two hundred within ten minutes all stay."""
    store, read = twin
    leave_tombstones(store, 0, 200)
    assert len(tombstones(read())) == 200


def test_a_document_full_of_them_stays_usable(store: MongoStore, lock: LockMaker, stored: Stored) -> None:
    """F77, F55: nobody takes it for damaged, whatever an earlier release has left there."""
    leave_tombstones(store, 0, 1)
    (tombstone,) = stored()["tombstones"]
    many = [{**tombstone, "grant": f"old.{number}"} for number in range(MAX_ENTRIES + 2_000)]
    store.collection.update_one({"_id": "k"}, {"$set": {"tombstones": many}})
    with lock(terms=TERMS) as mine:
        assert mine.held
    leave_tombstones(store, 1, 2)
    assert len(tombstones(stored())) <= MOST


def pair(lock: LockMaker, key: str) -> float:
    """How many seconds it takes to acquire and release *key*."""
    started = time.perf_counter()
    lock(key, terms=TERMS).acquire().release()
    return time.perf_counter() - started


@pytest.mark.long
@pytest.mark.parametrize("face", ["alone", "contended"])
def test_a_pair_costs_not_noticeably_more(store: MongoStore, lock: LockMaker, other: LockMaker, face: str) -> None:
    """F77: acquire and release a key with the tombstones of thousands of commands, and one without any, in turns."""
    keys = ("many", "none")
    for key in keys:
        lock(key).acquire().release()
    leave_tombstones(store, 0, MANY, "many")
    times: dict[str, list[float]] = {key: [] for key in keys}
    with contextlib.ExitStack() as stack:
        if face == "contended":  # then the whole rule is sent, not the short forms
            for key in keys:
                stack.enter_context(other(key, terms=Terms("shared", 9, lease=60, margin=1, waiter_lease=60)))
        for _ in range(60):
            for key in keys:
                times[key].append(_step_pair(store, key) if face == "contended" else pair(lock, key))
    many, none = (statistics.median(times[key][5:]) for key in keys)
    assert many < 1.5 * none, f"{many * 1000:.2f} ms with tombstones, {none * 1000:.2f} ms without"


def _step_pair(store: MongoStore, key: str) -> float:
    """How many seconds it takes a reader to join another one and leave again."""
    terms = Terms("shared", 9, lease=60, margin=1, waiter_lease=60)
    started = time.perf_counter()
    store.apply(key, Step(ask="reader", add=entry("reader", "s", terms, {})), TIMEOUT)
    store.apply(key, Step(remove=("reader",), given="reader"), TIMEOUT)
    return time.perf_counter() - started


@pytest.mark.long
async def test_tasks_that_are_cancelled(session: Session, other: LockMaker, stored: Stored) -> None:
    """F77, P6: a web server whose clients go away while their commands are on their way: what they leave is bounded."""

    def quiet() -> bool:
        return not (session.cleanup.pending or session.registry.grants)

    async with other(terms=TERMS):
        for _ in range(8):
            tasks = [asyncio.create_task(make_lock(session, terms=TERMS, wait=0).aacquire()) for _ in range(250)]
            await asyncio.sleep(0.03)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.to_thread(eventually, quiet, 80)
        document = await asyncio.to_thread(stored)
        assert len(tombstones(document)) <= MOST
        assert len(document["holders"] + document["waiters"]) == 1
