"""Tombstones are bounded, and cost nothing noticeable: thousands of commands on one key were given up (F77)."""

import statistics
import time
from collections.abc import Callable

import pytest

from django_mongolock.engine.document import MAX_ENTRIES, Terms
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.protocol import TOMBSTONE_TTL
from django_mongolock.engine.step import Step
from django_mongolock.engine.store import Store
from tests.engine.conftest import Document, LockMaker
from tests.engine.twins import CALM, TIMEOUT, Twin

Stored = Callable[..., Document]

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


def tombstones(document: Document) -> list[str]:
    return [tombstone["grant"] for tombstone in document["tombstones"]]


@pytest.mark.long
def test_their_number_is_bounded(twin: Twin) -> None:
    """F77: after thousands of given-up commands on one key, and it grows no more after more of them."""
    leave_tombstones(twin.store, 0, 5_000)
    assert len(tombstones(twin.read())) <= MOST
    leave_tombstones(twin.store, 5_000, 6_000)
    assert len(tombstones(twin.read())) <= MOST


@pytest.mark.long
def test_the_newest_stay(twin: Twin) -> None:
    """F77, F17: where they are too many, the oldest go: of a command that was given up last, a copy comes soonest."""
    leave_tombstones(twin.store, 0, 5_000)
    leave_tombstones(twin.store, 5_000, 5_100, batch=1)
    assert tombstones(twin.read())[-100:] == [f"0123456789ab.{number}" for number in range(5_000, 5_100)]
    late = "0123456789ab.5099"
    assert not twin.add(late).held
    assert twin.read()["holders"] == []


def test_those_that_are_needed_stay(twin: Twin) -> None:
    """F17: a bound that is reached only by what nobody does on purpose: two hundred within ten minutes all stay."""
    leave_tombstones(twin.store, 0, 200)
    assert len(tombstones(twin.read())) == 200


def test_a_document_full_of_them_stays_usable(store: MongoStore, lock: LockMaker, stored: Stored) -> None:
    """F77, F55: nobody takes it for damaged, whatever an earlier release has left there."""
    leave_tombstones(store, 0, 1)
    (tombstone,) = stored()["tombstones"]
    many = [{**tombstone, "grant": f"old.{number}"} for number in range(MAX_ENTRIES + 2_000)]
    store.collection.update_one({"_id": "k"}, {"$set": {"tombstones": many}})
    with lock(terms=CALM) as mine:
        assert mine.held
    leave_tombstones(store, 1, 2)
    assert len(tombstones(stored())) <= MOST


@pytest.mark.long
def test_a_pair_costs_not_noticeably_more(store: MongoStore, lock: LockMaker, other: LockMaker) -> None:
    """F77: acquire and release a key with the tombstones of thousands of commands, and one without any, in turns. A
    reader is there, so the whole rule is sent, and not the short forms."""
    terms, keys = Terms("shared", 9, lease=60, margin=1, waiter_lease=60), ("many", "none")
    leave_tombstones(store, 0, MANY, "many")
    times: dict[str, list[float]] = {key: [] for key in keys}
    with other("many", terms=terms), other("none", terms=terms):
        for _ in range(60):
            for key in keys:
                started = time.perf_counter()
                lock(key, terms=terms).acquire().release()
                times[key].append(time.perf_counter() - started)
    many, none = (statistics.median(times[key][5:]) for key in keys)
    assert many < 1.5 * none, f"{many * 1000:.2f} ms with tombstones, {none * 1000:.2f} ms without"
