"""Old and new processes at one document: fields are added as optional ones, with a default in the rule (F53).

So a release that does not know a field keeps it, in the document and in its entries, for as long as these last; and a
release that knows it works where it is missing.
"""

import datetime as dt
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64
from django.core.management import call_command
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from django_mongolock.engine.document import (
    DOCUMENT_FIELDS,
    HOLDER_FIELDS,
    UNLIMITED,
    WAITER_FIELDS,
    Terms,
    entry,
    find_damage,
)
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.memory_server import MemoryServer, MemoryStore
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.step import Limits, Step
from django_mongolock.engine.store import Store
from django_mongolock.exceptions import LockDocumentDamaged, LockLost
from django_mongolock.inspection.operations import ask_to_release, force_release
from django_mongolock.models import Lock
from tests.engine.conftest import Document, LockMaker
from tests.engine.faces import Face
from tests.engine.waiters import InThread, Waiter
from tests.support.lock_documents import Locks
from tests.support.lock_documents import entry as stored_entry
from tests.support.lock_documents import waiter as stored_waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually

Stored = Callable[..., Document]

CALM = Terms(lease=60, margin=1, waiter_lease=60)
HELD = Terms(lease=60, margin=1, waiter_lease=60, min_hold=30)
OWNED = Terms(lease=60, margin=1, waiter_lease=60, owner="$bob")
READER = Terms("shared", UNLIMITED, lease=60, margin=1, waiter_lease=60)
TIMEOUT = 10.0

#: What the next version writes in addition, into a document and into each of its entries.
NEW: Document = {
    "next": {"list": [1, {"$name": "$$NOW"}], "empty": None},
    "next_time": Timestamp(1_900_000_000, 7),
    "next_number": Int64(2**40),
    "next_text": "$holders",
}


class Key:
    """The key "k" in one of the two that carry the rule out, with fields of the next version in its document."""

    def __init__(self, store: Store, read: Callable[[], Document], write: Callable[[Document], object]) -> None:
        self.store, self.read, self.write = store, read, write

    def add(self, grant: str, terms: Terms = CALM, **step: Any) -> bool:
        """Ask for a grant as a process of the next version does; is it held?"""
        new = {**entry(grant, "s", terms, {}), **NEW}
        return self.store.apply("k", Step(ask=grant, add=new, **step), TIMEOUT).held

    def apply(self, **step: Any) -> None:
        self.store.apply("k", Step(**step), TIMEOUT)

    def holders(self) -> list[str]:
        """Who holds it; and all that the next version wrote is there."""
        document = self.read()
        assert find_damage(document) is None
        for place in (document, *document["holders"], *document["waiters"]):
            assert {name: place.get(name) for name in NEW} == NEW
        return [e["grant"] for e in document["holders"]]


@pytest.fixture(params=["mongodb", "memory"])
def key(request: pytest.FixtureRequest, store: MongoStore) -> Key:
    """Both twins of the rule."""
    if request.param == "mongodb":
        # A release is not confirmed by the majority, and looked at all the same.
        locks = store.collection.with_options(read_concern=ReadConcern("local"))

        def write(document: Document) -> None:
            locks.replace_one({"_id": "k"}, document, upsert=True)

        made = Key(store, lambda: dict(locks.find_one({"_id": "k"}) or {}), write)
    else:
        documents = (server := MemoryServer()).documents
        made = Key(MemoryStore(server, Limits()), lambda: documents["k"], lambda new: documents.update(k=new))
    made.add("first")
    made.apply(remove=("first",))
    made.write({**made.read(), **NEW})
    return made


# What is not known is kept


def test_kept_by_taking_and_giving_back(key: Key) -> None:
    """F53: by the whole command and by the short form, both ways."""
    assert key.add("g1")
    assert key.holders() == ["g1"]
    assert key.store.apply("k", Step(remove=("g1",), given="g1"), TIMEOUT).found
    assert key.holders() == []
    new = {**entry("g2", "s", CALM, {}), **NEW}
    assert key.store.take_free("k", Step(ask="g2", add=new), TIMEOUT)
    assert key.holders() == ["g2"]
    assert key.store.release_uncontended("k", "g2", TIMEOUT)
    assert key.holders() == []
    assert {name: key.read()["last_holder"][name] for name in NEW} == NEW


def test_kept_by_renewals(key: Key) -> None:
    """F53: of holders and waiters, one by one, in bulk, with a longer lease, and by asking for the release."""
    key.add("g1")
    key.add("g2")
    key.apply(ask="g1", renew=("g1", "g2"), beat=1)
    key.store.renew(["k"], Step(renew=("g1", "g2"), beat=2), TIMEOUT)
    key.apply(ask="g1", renew=("g1",), beat=3, lease=90_000, server_lease=99_000)
    key.apply(request_release_of=("g1",), requested_by="somebody")
    assert key.holders() == ["g1"]
    assert [e["beat"] for e in (*key.read()["holders"], *key.read()["waiters"])] == [3, 2]


def test_kept_by_grants_from_the_queue(key: Key) -> None:
    """F53: whoever gives the lock back, several at once too."""
    key.add("g1")
    key.add("g2")
    for name in ("r1", "r2"):
        key.add(name, READER)
    key.store.apply("k", Step(remove=("g1",), given="g1"), TIMEOUT)
    assert key.holders() == ["g2"]
    key.store.apply("k", Step(remove=("g2",), given="g2"), TIMEOUT)
    assert key.holders() == ["r1", "r2"]


def test_kept_by_hand_overs_resumes_and_tries(key: Key) -> None:
    """F53: what is added takes nothing away."""
    key.add("g1", OWNED)
    key.add("g2", remove=("g1",), given="g1", force=True)
    assert key.holders() == ["g2"]
    assert not key.add("g3", trial=True)
    assert key.add("g4", OWNED, remove=("g2",), force=True, resumes=True)
    assert key.holders() == ["g4"]


def test_kept_through_a_minimum_hold_and_a_failover(key: Key) -> None:
    """F53: entries that are changed without having been asked for."""
    key.add("g1", HELD)
    key.add("g2")
    key.store.apply("k", Step(remove=("g1",), given="g1"), TIMEOUT)
    assert key.holders() == ["g1"]
    assert "released" in key.read()["holders"][0]
    key.write({**key.read(), "clock": "another election"})
    key.apply()
    assert key.holders() == ["g1"]


def test_kept_with_tombstones(key: Key) -> None:
    """F53: a tombstone of the next version is one, and keeps what it has."""
    later = dt.datetime.now(dt.UTC).replace(microsecond=0) + dt.timedelta(hours=1)
    key.write({**key.read(), "tombstones": [{"grant": "dead", "until": later, **NEW}]})
    assert not key.add("dead")
    key.apply(ask="g1", remove=("g1",), force=True, tombstone_ttl=60_000)
    first, second = key.read()["tombstones"]
    assert first == {"grant": "dead", "until": later, **NEW}
    assert second["grant"] == "g1"


# Lock objects of this release, beside processes of the next


@pytest.fixture
def next_version(store: MongoStore, collection: Collection[Document], lock: LockMaker) -> Callable[[], None]:
    """Makes the document of "k" one of the next version, with all who hold the key or wait for it."""
    lock().acquire().release()

    def mark() -> None:
        fields = {name: {"$literal": value} for name, value in NEW.items()}
        entries = {
            name: {"$map": {"input": f"${name}", "in": {"$mergeObjects": ["$$this", fields]}}}
            for name in ("holders", "waiters")
        }
        collection.update_one({"_id": "k"}, [{"$set": {**fields, **entries}}])

    mark()
    return mark


@pytest.mark.long
def test_lock_objects(
    next_version: Callable[[], None],
    lock: LockMaker,
    other: LockMaker,
    *,
    in_thread: InThread,
    face: Face,
    stored: Stored,
) -> None:
    """F53: acquired, renewed, extended, waited for, handed over and released, all as if nothing more was there."""
    mine = lock(terms=Terms(lease=1.5, margin=0.5, waiter_lease=1.5))
    face.acquire(mine)
    waiters = []
    for make in (other, lock):
        waiters.append(Waiter(in_thread, make(terms=CALM, wait=30)))
        assert eventually(lambda: len(stored()["waiters"]) == len(waiters))
    next_version()
    number = stored()["holders"][0].get("beat", 0)
    assert eventually(lambda: stored()["holders"][0].get("beat", 0) > number)
    face.extend(mine, 20)
    for e in (*stored()["holders"], *stored()["waiters"]):
        assert {name: e[name] for name in NEW} == NEW
    assert face.release(mine)
    for waiter in waiters:
        assert waiter.end().has_it
        (holder,) = stored()["holders"]
        assert {name: holder[name] for name in NEW} == NEW
        waiter.let_go()
    assert eventually(lambda: stored()["holders"] == [])
    assert {name: stored()[name] for name in NEW} == NEW


def test_from_outside(next_version: Callable[[], None], lock: LockMaker, store: MongoStore, stored: Stored) -> None:
    """F53: asked for its release, and taken away by force."""
    mine = lock(terms=CALM).acquire()
    next_version()
    assert ask_to_release(store, "k", "somebody")
    assert {name: stored()["holders"][0][name] for name in NEW} == NEW
    assert force_release(store, "k", [stored()["holders"][0]["grant"]])
    assert {name: stored()[name] for name in NEW} == NEW
    with pytest.raises(LockLost):
        mine.__exit__(None, None, None)


@WITH_MONGO
def test_looked_at(locks: Locks) -> None:
    """F53: in the model, the snapshots and the commands, which show what they know."""
    new = dict(NEW)
    locks.add("held", [stored_entry(**new)], [stored_waiter(**new)], change=new)
    locks.add("stale", [stored_entry(left=-60, **new)], change=new)
    lock = Lock.objects.get(pk="held")
    assert [(holder.host, holder.pid) for holder in lock.holders] == [("web-1", 4001)]
    assert [waiter.pid for waiter in lock.waiters] == [4100]
    assert {lock.key for lock in Lock.objects.all().snapshots()} == {"held", "stale"}
    out = StringIO()
    call_command("list_locks", "--all", stdout=out)
    assert "held" in out.getvalue()
    assert Lock.objects.filter(pk="held").force_release() == 1
    found = locks.read("held")
    assert [e["grant"] for e in found["holders"]] == ["secret-grant.100"]
    assert {name: found["holders"][0][name] for name in NEW} == NEW
    call_command("clear_stale_locks", "--no-input", stdout=out)
    found = locks.read("stale")
    assert found["holders"] == []
    assert {name: found[name] for name in NEW} == NEW


# What is known, and not there


def reduced(document: Document) -> Document:
    """The document as a release has left it that knew only what every document must have."""
    lists = {
        name: [{field: e[field] for field in fields} for e in document[name]]
        for name, fields in (("holders", HOLDER_FIELDS), ("waiters", WAITER_FIELDS))
    }
    tombstones = [{field: tombstone[field] for field in ("grant", "until")} for tombstone in document["tombstones"]]
    return {
        "_id": document.get("_id", "k"),
        **{name: document[name] for name in DOCUMENT_FIELDS},
        **lists,
        "tombstones": tombstones,
    }


def test_what_is_optional_may_be_missing(key: Key) -> None:
    """F53: whatever a release adds, it works with what was written without it, at every step."""

    def forget() -> list[str]:
        key.write(reduced(key.read()))
        document = key.read()
        assert find_damage(document) is None
        return [e["grant"] for e in (*document["holders"], *document["waiters"])]

    new = {name: entry(name, "s", CALM, {}) for name in ("g1", "g2", "g3", "g4")}
    forget()
    assert key.store.apply("k", Step(ask="g1", add=new["g1"]), TIMEOUT).held
    forget()
    assert key.store.apply("k", Step(ask="g2", add=new["g2"]), TIMEOUT).place == 0
    forget()
    found = key.store.renew(["k"], Step(renew=("g1", "g2"), beat=1), TIMEOUT)["k"]
    assert (found.holders["g1"].number, found.waiters["g2"].number) == (1, 1)
    forget()
    assert key.store.apply("k", Step(ask="g3", add=new["g3"], remove=("g1",), given="g1"), TIMEOUT).place == 0
    assert forget() == ["g2", "g3"]
    assert key.store.apply("k", Step(remove=("g2",), given="g2"), TIMEOUT).found
    assert forget() == ["g3"]
    assert key.store.read("k", "g3", TIMEOUT).held
    assert key.store.release_uncontended("k", "g3", TIMEOUT)
    assert forget() == []
    assert key.store.take_free("k", Step(ask="g4", add=new["g4"]), TIMEOUT)
    assert forget() == ["g4"]
    key.apply(ask="g4", remove=("g4",), force=True, tombstone_ttl=60_000)
    assert forget() == []
    assert not key.store.apply("k", Step(ask="g4", add=new["g4"], trial=True), TIMEOUT).held


def test_another_version_is_not_guessed_at(store: MongoStore, lock: LockMaker, stored: Stored) -> None:
    """F53, F55: what cannot be added so gets a new number, and whoever does not know that leaves the document alone."""
    lock().acquire().release()
    store.collection.update_one({"_id": "k"}, {"$inc": {"v": 1}})
    before = stored()
    taken: MongoLock = lock(wait=0)
    with pytest.raises(LockDocumentDamaged, match="version"):
        taken.acquire()
    assert stored() == before
