"""The retention of documents.

A document keeps its last token, also after it was removed or restored from an older copy (F78). The document itself
stays for a while. Tombstones stay, within a limit (F77). A minimum hold stays (F64), and so do fields of other releases
(F53).

The limit of tokens: if the document is gone or restored from an older copy, *and* the server's clock is behind the last
token, nobody knows that token any more. docs/explanation/promises.md says so.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64

from django_mongolock.engine.protocol.procedures import TOMBSTONE_TTL
from django_mongolock.engine.rule.document import (
    BRIEF_RETENTION,
    DOCUMENT_FIELDS,
    HOLDER_FIELDS,
    MAX_ENTRIES,
    UNLIMITED,
    WAITER_FIELDS,
    Limits,
    Step,
    Terms,
    find_damage,
)
from django_mongolock.engine.store.base import Store
from django_mongolock.engine.store.mongo import MongoStore
from tests.engine.conftest import Document, LockMaker
from tests.engine.twins import CALM, TIMEOUT, Twin

OWNED = replace(CALM, owner="$bob")
READER = replace(CALM, mode="shared", capacity=UNLIMITED)

Act = Callable[[Twin], object]

_numbers = count(1)


def tokens(twin: Twin) -> list[int]:
    """Return the tokens of the holders."""
    return [int(holder["token"]) for holder in twin.read()["holders"]]


def several(*acts: Act) -> Act:
    """Do them one after the other."""
    return lambda twin: [act(twin) for act in acts]


FREE = several(lambda twin: twin.add("g0"), lambda twin: twin.release("g0"))
READERS = several(lambda twin: twin.add("g0"), *(partial(Twin.add, grant=f"g{n}", terms=READER) for n in (1, 2, 3)))

#: The ways to grant the lock. Each has a step that prepares the document to be copied, and a step that grants the lock.
WAYS: dict[str, tuple[Act, Act]] = {
    "asked for": (FREE, lambda twin: twin.add("new")),
    "short form": (FREE, lambda twin: twin.take_free("new")),
    "three readers from the queue": (READERS, lambda twin: twin.release("g0")),
}


def use(twin: Twin) -> int:
    """Empty the key, acquire it a few more times, and return the last token."""
    token = 0
    for e in (*twin.read()["holders"], *twin.read()["waiters"]):
        twin.apply(remove=(e["grant"],), force=True)
    for _ in range(5):
        grant = f"more{next(_numbers)}"
        token = twin.add(grant).token
        twin.release(grant)
    return token


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_older_copy_of_the_document(twin: Twin, way: str, behind: bool) -> None:
    """F78, P2: After a backup is restored, the next tokens are larger than all tokens given since the backup. If the
    clock was set back by an hour and is behind the last token, each next token is one more."""
    prepare, give = WAYS[way]
    prepare(twin)
    copy = twin.read()
    last = round(time.time() * 1000) + 3_600_000 if behind else use(twin)
    time.sleep(0.02)  # in memory, more than one grant fits into a millisecond
    twin.write({**copy, "token": Int64(last)} if behind else copy)
    give(twin)
    found = tokens(twin)
    assert found
    assert [last, *found] == (list(range(last, last + 1 + len(found))) if behind else sorted({last, *found}))
    assert twin.read()["token"] == found[-1]


# The retention of the document of a free lock


HOUR, WEEK = timedelta(hours=1), timedelta(days=7)


def kept(document: Document) -> timedelta:
    """Return the time for which the document is kept after its last write."""
    span: timedelta = document["purge_at"] - document["written_at"]
    return span


def test_a_key_without_a_queue_is_kept_for_an_hour(twin: Twin) -> None:
    """F72: A key that a stranger made up is kept for an hour, also if it is acquired again and again."""
    for grant in ("g.1", "g.2", "g.3"):
        twin.add(grant)
        twin.release(grant)
        assert HOUR < kept(twin.read()) < 2 * HOUR + timedelta(minutes=2)
    twin.write({**twin.read(), "purge_at": twin.read()["written_at"]})
    assert twin.take_free("g.4") is not None
    assert HOUR < kept(twin.read()) < 2 * HOUR + timedelta(minutes=2)


def test_a_key_with_a_queue_is_kept_for_a_week(twin: Twin) -> None:
    """A lock that is really shared keeps its statistics."""
    for grant in ("g.1", "g.2"):
        twin.add(grant)
    time.sleep(0.01)
    for grant in ("g.1", "g.2"):
        twin.release(grant)
    twin.add("g.3")
    assert twin.read()["contended"] == 1
    assert kept(twin.read()) > WEEK


def test_a_document_outlives_its_tombstones(twin: Twin) -> None:
    """F17: A removed grant stays out until its tombstone ends, even if that takes longer than an hour."""
    twin.apply(ask="g.1", remove=("g.1",), force=True, tombstone_ttl=10 * BRIEF_RETENTION)
    assert twin.read()["purge_at"] >= twin.read()["tombstones"][0]["until"]


def test_a_short_retention_stays_short() -> None:
    assert Limits(retention=1_000).brief(0) == 1_000


# Tombstones are bounded


Stored = Callable[..., Document]

#: The number of grants for which one command leaves tombstones here. A program's command does so for one.
BATCH = 100
#: The largest number of tombstones in a document. (Measured on 6.0.5. A pair takes 1.3 times as long with a thousand of
#: them, 1.9 to 2.5 times with four thousand, five times with fourteen thousand.)
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
    """F77, F17: The number is limited after thousands of abandoned commands on one key. The oldest tombstones are
    removed, because a copy of the last abandoned command comes soonest."""
    leave_tombstones(twin.store, 0, 5_000)
    assert len(tombstones(twin.read())) <= MOST
    leave_tombstones(twin.store, 5_000, 5_100, batch=1)
    assert len(tombstones(twin.read())) <= MOST
    assert tombstones(twin.read())[-100:] == [f"0123456789ab.{number}" for number in range(5_000, 5_100)]
    assert not twin.add("0123456789ab.5099").held
    assert twin.read()["holders"] == []


def test_those_that_are_needed_stay(twin: Twin) -> None:
    """F17: The limit is only reached by an attack. Two hundred tombstones within ten minutes all stay."""
    leave_tombstones(twin.store, 0, 200)
    assert len(tombstones(twin.read())) == 200


def test_a_document_full_of_them_stays_usable(store: MongoStore, lock: LockMaker, stored: Stored) -> None:
    """F77, F55: A full document does not count as damaged, whatever an earlier release has left there."""
    leave_tombstones(store, 0, 1)
    (tombstone,) = stored()["tombstones"]
    many = [{**tombstone, "grant": f"old.{number}"} for number in range(MAX_ENTRIES + 2_000)]
    store.collection.update_one({"_id": "k"}, {"$set": {"tombstones": many}})
    with lock(terms=CALM) as mine:
        assert mine.held
    leave_tombstones(store, 1, 2)
    assert len(tombstones(stored())) <= MOST


# A minimum hold ends at its time. A renewal that comes after the release does not change the end (F64)


#: The hold is longer than the lease, as that of a job is which runs once a day.
HELD = Terms(lease=3, margin=1, waiter_lease=3, min_hold=60)


#: The renewals that may be on their way at the release. One is of the heartbeat, and one is an extension.
RENEWALS: dict[str, dict[str, Any]] = {"renewal": {}, "extension": {"lease": 90_000, "server_lease": 99_000}}


@pytest.mark.parametrize("kind", RENEWALS)
@pytest.mark.parametrize("way", ["one", "in bulk"])
def test_a_renewal_after_the_release_leaves_the_end_alone(twin: Twin, way: str, kind: str) -> None:
    """F64: The entry of a released lock is unchanged, to the millisecond, after a late renewal. Another entry in the
    same renewal is renewed."""
    shared = replace(HELD, mode="shared", capacity=5)
    twin.add("g", shared)
    twin.add("other", shared)
    twin.release("g")
    released = twin.read()["holders"][0]
    time.sleep(0.05)  # so that an end that is counted from now is another one
    if way == "one":
        twin.apply(ask="g", renew=("g",), beat=7, **RENEWALS[kind])
    else:
        found = twin.renew("g", "other", beat=7, **RENEWALS[kind]).holders
        assert (found["g"].number, found["other"].number) == (0, 7)
    kept = twin.read()["holders"][0]
    assert kept["until"] - released["acquired_at"] == timedelta(seconds=HELD.min_hold)
    assert kept == released


def test_a_release_after_the_end_hands_the_lock_over(twin: Twin) -> None:
    """P5: Nothing is kept of a hold that is over. The release itself grants the lock to the waiter."""
    twin.add("g", replace(HELD, min_hold=0.001))
    twin.add("next")
    time.sleep(0.05)
    assert twin.release("g")
    assert [holder["grant"] for holder in twin.read()["holders"]] == ["next"]


def test_what_the_caller_never_had_is_not_kept(lock: LockMaker, entries: Callable[..., list[Any]]) -> None:
    """If the second of two keys is busy, the first is free again at once."""
    with lock("b", terms=Terms(lease=30)):
        assert not lock("a", "b", terms=HELD).try_acquire()
        assert entries("a") == []


# Fields of other releases (F53) are added as optional fields, with a default in the rule. A release that does not know
# a field keeps it in the document and in its entries. A release that knows the field works without it


#: Fields that the next version writes in addition, into a document and into each of its entries.
NEW: Document = {
    "next": {"list": [1, {"$name": "$$NOW"}], "empty": None},
    "next_time": Timestamp(1_900_000_000, 7),
    "next_number": Int64(2**40),
    "next_text": "$holders",
}

_LATER = datetime(2100, 1, 1, tzinfo=UTC)
#: The steps in order, with the holders and the waiters after each step.
STEPS: dict[str, list[tuple[Callable[[Twin], object], str, str]]] = {
    "taken and given back": [
        (lambda k: k.add("g1", new=NEW), "g1", ""),
        (lambda k: k.release("g1"), "", ""),
        (lambda k: k.take_free("g2", new=NEW), "g2", ""),
        (lambda k: k.store.release_uncontended(["k"], ["g2"], 5), "", ""),
    ],
    "renewed": [
        (lambda k: k.add("g1", new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW), "g1", "g2"),
        (lambda k: k.apply(ask="g1", renew=("g1", "g2"), beat=1), "g1", "g2"),
        (lambda k: k.renew("g1", "g2", beat=2), "g1", "g2"),
        (lambda k: k.apply(ask="g1", renew=("g1",), beat=3, lease=90_000, server_lease=99_000), "g1", "g2"),
        (lambda k: k.apply(request_release_of=("g1",), requested_by="somebody"), "g1", "g2"),
    ],
    "granted from the queue": [
        (lambda k: k.add("g1", new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW), "g1", "g2"),
        (lambda k: k.add("r1", READER, new=NEW), "g1", "g2 r1"),
        (lambda k: k.add("r2", READER, new=NEW), "g1", "g2 r1 r2"),
        (lambda k: k.release("g1"), "g2", "r1 r2"),
        (lambda k: k.release("g2"), "r1 r2", ""),
    ],
    "handed over, tried, and resumed": [
        (lambda k: k.add("g1", OWNED, new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW, remove=("g1",), given="g1", force=True), "g2", ""),
        (lambda k: k.add("g3", new=NEW, trial=True), "g2", ""),
        (lambda k: k.add("g4", OWNED, new=NEW, remove=("g2",), force=True, resumes=True), "g4", ""),
    ],
    "kept for a minimum hold, through a failover": [
        (lambda k: k.add("g1", replace(CALM, min_hold=30), new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW), "g1", "g2"),
        (lambda k: k.release("g1"), "g1", "g2"),
        (lambda k: k.write({**k.read(), "clock": "another election"}), "g1", "g2"),
        (lambda k: k.apply(), "g1", "g2"),
    ],
    "refused by a tombstone": [
        (lambda k: k.write({**k.read(), "tombstones": [{"grant": "dead", "until": _LATER, **NEW}]}), "", ""),
        (lambda k: k.add("dead", new=NEW), "", ""),
    ],
}


def grants(document: Document, name: str) -> str:
    return " ".join(e["grant"] for e in document[name])


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_what_is_not_known_is_kept(twin: Twin, steps: list[tuple[Callable[[Twin], object], str, str]]) -> None:
    """F53: The fields of the next release stay in the document and in its entries, whatever this release does."""
    twin.add("first", new=NEW)
    twin.release("first")
    twin.write({**twin.read(), **NEW})
    for act, holders, waiters in steps:
        act(twin)
        document = twin.read()
        assert find_damage(document) is None
        assert (grants(document, "holders"), grants(document, "waiters")) == (holders, waiters)
        for place in (document, document["last_holder"], *document["holders"], *document["waiters"]):
            assert {name: place.get(name) for name in NEW} == NEW


def reduced(document: Document) -> Document:
    """Return the document as left by a release that knew only the required fields."""
    lists = {
        name: [{field: e[field] for field in fields} for e in document[name]]
        for name, fields in (("holders", HOLDER_FIELDS), ("waiters", WAITER_FIELDS), ("tombstones", ("grant", "until")))
    }
    return {"_id": "k", **{name: document[name] for name in DOCUMENT_FIELDS}, **lists}


def test_what_is_optional_may_be_missing(twin: Twin) -> None:
    """F53: Every step of a release works on documents that lack its added fields."""
    twin.add("first")
    twin.release("first")
    steps: list[tuple[Callable[[], Any], str]] = [
        (lambda: twin.add("g1").held, "g1"),
        (lambda: twin.add("g2").place == 0, "g1 g2"),
        (lambda: twin.renew("g1", "g2", beat=1).holders["g1"].number == 1, "g1 g2"),
        (lambda: twin.add("g3", remove=("g1",), given="g1").place == 0, "g2 g3"),
        (lambda: twin.release("g2"), "g3"),
        (lambda: twin.store.read("k", "g3", 5).held, "g3"),
        (lambda: not twin.store.release_uncontended(["k"], ["g3"], 5), ""),
        (lambda: twin.take_free("g4"), "g4"),
        (lambda: twin.apply(ask="g4", remove=("g4",), force=True, tombstone_ttl=60_000), ""),
        (lambda: not twin.add("g4", trial=True).held, ""),
    ]
    for act, left in steps:
        twin.write(reduced(twin.read()))
        assert find_damage(twin.read()) is None
        assert act()
        assert f"{grants(twin.read(), 'holders')} {grants(twin.read(), 'waiters')}".strip() == left
