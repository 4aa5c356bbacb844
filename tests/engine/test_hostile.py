"""Documents that somebody else wrote into the collection. Their key gets a clear error, and all other keys go on."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import Binary, Code, DatetimeMS, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.raw_bson import RawBSONDocument
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.rule.document import MAX_ENTRIES, MAX_HOLDERS, UNLIMITED, Step, Terms, find_damage
from django_mongolock.engine.rule.document import entry as new_entry
from django_mongolock.engine.rule.expressions import IS_WHOLE
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.exceptions import LockDocumentDamaged, LockError, LockNotAcquired
from django_mongolock.inspection import operations, queries
from tests.engine.conftest import Document, Here, LockMaker, make_lock
from tests.support.lock_documents import clock, document, entry, waiter
from tests.support.waiting import eventually

PLACE = b"PLACE-OF-A-TEXT"
#: Text that is no UTF-8, of the same length.
NO_TEXT = b"\xff\xfe\xc0\x80" + PLACE[4:]


def nested(depth: int) -> Document:
    """Return a document with documents nested in it."""
    inner: Document = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


#: Anything that BSON can say.
STRANGE: list[Any] = [
    None, True, 0, 7, Int64(7), Int64(2**63 - 1), -1.5, float("nan"), float("inf"), "", "text", "x" * 5_000, b"\0",
    Binary(b"x", 4), [], [[]], [7], ["x"], [None], [{}], {}, {"$gt": ""}, nested(90), {"$ref": "a", "$id": 1},
    DBRef("a", 1), ObjectId(), Regex("(a+)+$"), Code("while (1) {}"), Code("x", {"x": 1}), Timestamp(1, 1),
    MinKey(), MaxKey(), Decimal128("NaN"), datetime(2030, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC),
    DatetimeMS(2**62), DatetimeMS(-(2**62)), RawBSONDocument(bson.encode({"a": 1})),
]  # fmt: skip


@dataclass
class World:
    """A collection with one healthy lock, held by us, and room for a hostile document."""

    collection: Collection[Document]
    store: MongoStore
    clock: str

    def put(self, raw: bytes) -> bool:
        """Store a document under the key "bad", and return whether the server takes it."""
        self.collection.delete_one({"_id": "bad"})
        try:
            self.collection.insert_one(RawBSONDocument(raw))
        except (PyMongoError, bson.errors.BSONError):
            return False
        return True

    def raw(self) -> bytes:
        """Return the stored bytes of the bad document, or none if its key became another."""
        plain: Any = self.collection.with_options(bson.CodecOptions(document_class=RawBSONDocument))
        found = plain.find_one({"_id": "bad"})
        return b"" if found is None else bytes(found.raw)

    def is_whole(self) -> bool:
        """Return whether the server takes the document for one of ours."""
        found = self.collection.find_one({"_id": "bad"}, {"_id": 1, "whole": IS_WHOLE})
        return bool(found and found["whole"])


@pytest.fixture
def world(collection: Collection[Document], store: MongoStore) -> World:
    made = World(collection, store, clock(collection.database.client))
    collection.insert_one(document("healthy", [entry(1, grant="mine")], change={"clock": made.clock}))
    return made


#: Everything that is ever done to the document of a key.
STEPS: dict[str, Callable[[MongoStore], object]] = {
    "try": lambda store: store.apply("bad", Step(ask="g", add=new_entry("g", "s", Terms(), {}), trial=True), 5),
    "queue": lambda store: store.apply("bad", Step(ask="g", add=new_entry("g", "s", Terms(), {})), 5),
    "resume": lambda store: store.apply("bad", Step(ask="g", add=new_entry("g", "s", Terms(owner="o"), {})), 5),
    "take free": lambda store: store.take_free("bad", Step(ask="g", add=new_entry("g", "s", Terms(), {})), 5),
    "release alone": lambda store: store.release_uncontended(["bad"], ["secret-grant.1"], 5),
    "release all": lambda store: store.release_uncontended(["bad", "worse"], ["secret-grant.1"], 5),
    "look": lambda store: store.read("bad", "g", 5),
    "extend": lambda store: store.apply("bad", Step(ask="g", renew=("g",), beat=1), 5),
    "release": lambda store: store.apply("bad", Step(remove=("g",), given="g"), 5),
    "ensure removed": lambda store: store.apply(
        "bad", Step(ask="g", remove=("g",), force=True, tombstone_ttl=1_000), 5
    ),
    "deadlock": lambda store: store.deadlock("bad", "g", 5),
    "snapshots": lambda store: list(queries.snapshots(store, {})),
    "deadlocks": lambda store: [str(cycle) for cycle in queries.find_deadlocks(store)],
    "stale": lambda store: list(queries.snapshots(store, queries.chosen(operations.STALE))),
    "clear": lambda store: operations.clear_stale(store, ["bad"]),
    "ask": lambda store: operations.ask_to_release(store, "bad", "somebody"),
    "force": lambda store: operations.force_release(store, "bad", ["secret-grant.1"]),
}


def assert_harmless(world: World) -> None:
    """Assert that every step on the bad key raises at most our errors, that its document stays as it is, and that the
    other lock is renewed."""
    whole, raw = world.is_whole(), world.raw()
    for name, step in STEPS.items():
        with contextlib.suppress(LockError):
            step(world.store)
        assert whole or world.raw() == raw, name
    beat = int(time.monotonic() * 1000)
    found = world.store.renew(["bad", "healthy"], Step(renew=("mine", "g"), beat=beat), 5)
    assert found["healthy"].holders["mine"].number == beat


def lively(change: Document, in_entry: Document) -> Document:
    """Return a document with a holder and a waiter, with *change* and *in_entry* applied."""
    facts = {"label": PLACE.decode(), **in_entry}
    return document("bad", [entry(1, **facts)], [waiter(2, **facts)], {"clock": "c", **change})


FIELDS = sorted(document("bad"))
ENTRY_FIELDS = sorted(entry(1, label="", owner="", beat=1, release_requested_by="", released=None))
FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def test_who_waits_in_a_document_that_becomes_damaged(here: Here) -> None:
    """F55: A waiter is told of the damage when its holder's lease is over, after a few commands, and not after its
    whole wait."""
    here.collection.insert_one(document("k", [entry(1)], change={"clock": clock(here.collection.database.client)}))
    waiting = here.waiter(here.lock("k", wait=10))
    assert eventually(lambda: len(here.entries()) == 2)
    here.collection.update_one({"_id": "k"}, {"$set": {"v": 99, "holders.0.until": datetime.now(UTC)}})
    here.session.waits.wake_all()
    assert isinstance(waiting.end(3).error, LockDocumentDamaged)


@pytest.mark.long
@FUZZ
@given(st.sampled_from([name for name in FIELDS if name != "_id"]), st.sampled_from(STRANGE))
@example("holders", 7)
@example("waiters", {"worker": "x"})
@example("expires_at", DatetimeMS(2**62))
def test_any_value_in_any_field(world: World, field: str, value: Any) -> None:
    """F55: Any value in any field of the document is harmless."""
    assert world.put(bson.encode(lively({field: value}, {})))
    assert_harmless(world)


@pytest.mark.long
@FUZZ
@given(st.sampled_from(ENTRY_FIELDS), st.sampled_from(STRANGE))
@example("until", DatetimeMS(2**62))
@example("release_requested_by", "a\nb" * 1_000)
@example("$ref", "x")
@example("worker", Code("while (1) {}"))
def test_any_value_in_any_field_of_an_entry(world: World, field: str, value: Any) -> None:
    """F55: Any value in any field of a holder or a waiter is harmless."""
    assert world.put(bson.encode(lively({}, {field: value})))
    assert_harmless(world)


@pytest.mark.long
@FUZZ
@given(st.lists(st.tuples(st.integers(16), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_byte_anywhere(world: World, changes: list[tuple[int, int]]) -> None:
    """F55: Any byte of the stored document may be wrong, as far as the server takes it. Types, names, lengths and texts
    break."""
    raw = bytearray(bson.encode(lively({}, {})))
    for place, value in changes:
        raw[16 + place % (len(raw) - 16)] = value
    if world.put(bytes(raw)):
        assert_harmless(world)


@pytest.mark.parametrize(
    ("found", "broken"), [(PLACE, NO_TEXT), (b"\x02label", b"\x02la\xffel")], ids=["value", "name"]
)
def test_text_that_is_no_text(
    world: World, session: Session, caplog: pytest.LogCaptureFixture, found: bytes, broken: bytes
) -> None:
    """F55: A label that is not UTF-8 is harmless. Such a label once raised an error of the driver and ended the round
    of the renewing thread. Unrelated locks were lost."""
    assert world.put(bson.encode(lively({}, {})).replace(found, broken))
    with pytest.raises(LockNotAcquired):
        make_lock(session, "bad", wait=0).acquire()
    assert_harmless(world)
    session.close()
    assert "failed" not in caplog.text


@pytest.mark.parametrize("field", [b"clock", b"mode"])
def test_a_type_that_looks_like_text(world: World, session: Session, field: bytes) -> None:
    """F55: A symbol is text to the driver, but not to the server. The lock counts as damaged, not as full. No caller is
    told that the lock was taken from its holder."""
    raw = bson.encode(lively({}, {})).replace(b"\x02" + field, b"\x0e" + field)
    assert world.put(raw)
    for _ in range(2):
        with pytest.raises(LockDocumentDamaged, match="another type"):
            make_lock(session, "bad", wait=1).acquire()
    with pytest.raises(LockDocumentDamaged):
        operations.force_release(world.store, "bad", ["secret-grant.1"])
    with pytest.raises(LockDocumentDamaged):
        operations.ask_to_release(world.store, "bad", "somebody")
    assert b"\x0e" + field in world.raw()
    assert world.collection.count_documents({"_id": "bad", "changes": 3}) == 1


@pytest.mark.long
def test_a_huge_document_costs_little(world: World, session: Session) -> None:
    """F55, F13: A document with sixteen megabytes of endless holders is reported soon, and does not keep the server
    busy. No time limit stops the server within one document, and such a document once blocked it for minutes."""
    many = [entry(number, mode="shared", capacity=UNLIMITED) for number in range(30_000)]
    world.collection.insert_one(document("bad", many, change={"clock": world.clock}))
    started = time.monotonic()
    with pytest.raises(LockDocumentDamaged, match="30000 holders and waiters"):
        make_lock(session, "bad", terms=Terms(mode="shared", capacity=UNLIMITED), wait=3).acquire()
    for action in (procedures.releasing("bad", many[0]["grant"]), procedures.removal_for_good("bad", "g")):
        with contextlib.suppress(LockError):
            session.commands.call(action)
    assert [seen.damage for seen in queries.snapshots(world.store, {"_id": "bad"})] != [None]
    assert time.monotonic() - started < 30
    world.store.renew(["healthy"], Step(renew=("mine",), beat=3), 2)
    busy = world.collection.database.client.admin.aggregate(
        [{"$currentOp": {}}, {"$match": {"secs_running": {"$gt": 5}}}]
    )
    assert not [op for op in busy if op.get("command", {}).get("findAndModify")]


@pytest.mark.long
def test_as_many_holders_as_a_document_bears(world: World, store: MongoStore) -> None:
    """F13: However many permits a lock has, the number of holders in a document is limited. Later callers wait. No
    document of ours ever looks like a hostile one, and commands stay fast."""
    shared = Terms(mode="shared", capacity=UNLIMITED)
    many = [entry(number, mode="shared", capacity=UNLIMITED) for number in range(MAX_HOLDERS - 1)]
    world.collection.insert_one(document("bad", many, change={"clock": world.clock}))
    started = time.monotonic()
    last = store.apply("bad", Step(ask="last", add=new_entry("last", "s", shared, {})), 5)
    late = store.apply("bad", Step(ask="late", add=new_entry("late", "s", shared, {})), 5)
    assert (last.held, late.held, late.place) == (True, False, 0)
    assert time.monotonic() - started < 4  # measured: 0.1 s each, 1.4 s each before
    assert MAX_HOLDERS + 5_000 < MAX_ENTRIES


def test_the_damage_of_a_huge_document_is_reported() -> None:
    """F55: The damage is reported in words, before the entries are checked one by one."""
    huge = document("bad", [], change={"holders": [7] * (MAX_ENTRIES + 1)})
    assert find_damage(huge) == f"it has {MAX_ENTRIES + 1} holders and waiters"


def test_what_others_wrote_is_one_short_line(world: World, session: Session) -> None:
    """F55, F57: Names from a document go into errors and logs without line breaks, megabytes, or ids of grants."""
    facts: Document = dict.fromkeys(
        ("label", "place", "owner", "user", "host"), "a\nforged line\x1b[31m\u2028" + "x" * 100_000
    )
    world.collection.insert_one(document("bad", [entry(1, **facts)], change={"clock": world.clock}))
    with pytest.raises(LockNotAcquired) as refusal:
        make_lock(session, "bad", wait=0).acquire()
    text = str(refusal.value)
    assert len(text) < 3_000
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "secret" not in text


@pytest.mark.long
def test_the_name_in_a_request_is_one_short_line(
    lock: LockMaker, collection: Collection[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """F55: The name of a requester comes from the document as well."""
    caplog.set_level("INFO", "django_mongolock")
    text = "anna\nlock lost key='forged'" + "x" * 100_000
    with lock("k") as mine:
        collection.update_one({"_id": "k"}, {"$set": {"holders.0.release_requested_by": text}})
        assert eventually(lambda: mine.release_requested)
        assert "anna?lock" in (mine.release_requested or "")
        assert len(mine.release_requested or "") <= 256
    assert "\nlock lost" not in caplog.text


@pytest.mark.parametrize("requested_by", ["", "x" * 257, "x" * 10_000_000, "a\nb", "\ud800"])
def test_a_name_that_cannot_be_stored_is_refused(store: MongoStore, lock: LockMaker, requested_by: str) -> None:
    """F54: The name of the requester is stored in each holder's entry, and has a limit like any other fact."""
    with lock("k"), pytest.raises(ValueError, match="requested_by"):
        operations.ask_to_release(store, "k", requested_by)
