"""What a document keeps: its last token, also where it was removed or restored from an older copy (F78); itself, for a
while; and tombstones, not too many of them (F77).

The limit of tokens: where the document is gone, or an older one, *and* the server's clock is behind the last token that
was given, nobody is left who knows that token. docs/explanation/promises.md says so.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from bson.int64 import Int64

from django_mongolock.engine.protocol.procedures import TOMBSTONE_TTL
from django_mongolock.engine.rule.document import BRIEF_RETENTION, MAX_ENTRIES, UNLIMITED, Limits, Step
from django_mongolock.engine.store.base import Store
from django_mongolock.engine.store.mongo import MongoStore
from tests.engine.conftest import Document, LockMaker
from tests.engine.twins import CALM, TIMEOUT, Twin

ROOT = Path(__file__).parents[2]
READER = replace(CALM, mode="shared", capacity=UNLIMITED)
OWNED = replace(CALM, owner="$bob")

Act = Callable[[Twin], object]

_numbers = count(1)


def tokens(twin: Twin) -> list[int]:
    """Those of its holders."""
    return [int(holder["token"]) for holder in twin.read()["holders"]]


def several(*acts: Act) -> Act:
    """Do them one after the other."""
    return lambda twin: [act(twin) for act in acts]


FREE = several(lambda twin: twin.add("g0"), lambda twin: twin.release("g0"))
HELD = several(lambda twin: twin.add("g0", OWNED))
QUEUED = several(*(partial(Twin.add, grant=grant) for grant in ("g0", "g1")))
READERS = several(lambda twin: twin.add("g0"), *(partial(Twin.add, grant=f"g{n}", terms=READER) for n in (1, 2, 3)))

#: How the lock may be granted: what prepares the document that is copied, and what gives it away then.
WAYS: dict[str, tuple[Act, Act]] = {
    "asked for": (FREE, lambda twin: twin.add("new")),
    "tried": (FREE, lambda twin: twin.add("new", trial=True)),
    "short form": (FREE, lambda twin: twin.take_free("new")),
    "handed over": (HELD, lambda twin: twin.add("new", remove=("g0",), force=True, given="g0")),
    "resumed": (HELD, lambda twin: twin.add("new", OWNED, remove=("g0",), force=True, resumes=True)),
    "from the queue": (QUEUED, lambda twin: twin.release("g0")),
    "three readers from the queue": (READERS, lambda twin: twin.release("g0")),
}


def use(twin: Twin) -> int:
    """Empty the key, and give it to somebody a few times more; return the last token."""
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
    """F78, P2: a backup is restored: the next tokens are larger than all that were given since it was made. Or the
    clock was set back by an hour, and is behind the last token: the next are one more each."""
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


# For how long the document of a free lock is kept


HOUR, WEEK = timedelta(hours=1), timedelta(days=7)


def kept(document: Document) -> timedelta:
    """How long the document is kept after its last write."""
    span: timedelta = document["purge_at"] - document["written_at"]
    return span


def test_a_key_without_a_queue_is_kept_for_an_hour(twin: Twin) -> None:
    """F72: a key that a stranger made up; also if it is taken again and again, by one after another."""
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
    """F17: what was removed stays out for as long as its tombstone says, which may be longer than an hour."""
    twin.apply(ask="g.1", remove=("g.1",), force=True, tombstone_ttl=10 * BRIEF_RETENTION)
    assert twin.read()["purge_at"] >= twin.read()["tombstones"][0]["until"]


def test_a_short_retention_stays_short() -> None:
    assert Limits(retention=1_000).brief(0) == 1_000


# Tombstones are bounded


Stored = Callable[..., Document]

#: For so many grants, one command leaves tombstones here; a program's for one.
BATCH = 100
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
    """F77, F17: after thousands of given-up commands on one key. The oldest go: of a command that was given up last, a
    copy comes soonest."""
    leave_tombstones(twin.store, 0, 5_000)
    assert len(tombstones(twin.read())) <= MOST
    leave_tombstones(twin.store, 5_000, 5_100, batch=1)
    assert len(tombstones(twin.read())) <= MOST
    assert tombstones(twin.read())[-100:] == [f"0123456789ab.{number}" for number in range(5_000, 5_100)]
    assert not twin.add("0123456789ab.5099").held
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
