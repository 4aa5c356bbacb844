"""Lock documents made by hand: held, stale, free, damaged, and strange ones."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.engine.rule.document import DOCUMENT_FIELDS, HOLDER_FIELDS, SCHEMA
from django_mongolock.engine.store.layout import ensure_indexes

Document = dict[str, Any]
TOKEN = 1_763_676_000_000

#: Keys that would break a careless page, query or command line.
HOSTILE_KEYS = [
    '<script>alert("x")</script>',
    "a'b\"c&amp;d",
    "order/5/../6",
    "../change/",
    "add",
    "force-release/",
    ".",
    "..",
    "_2E",
    "100%25 %s %(x)s {{ 7 }} {% now %}",
    "a_b__c_5F",
    "?state=all#x",
    "日本語 ключ é 🔒",
    "x\u202eevil",
    " spaced ",
    "(a+)+$",
    "$where",
    "y" * 512,
]

#: Values that somebody else may have written into one field of a held lock, and a word of the error about each.
DAMAGE: dict[str, tuple[Document, str]] = {
    "token is a double": ({"token": 1.5}, "token"),
    "token is too large": ({"token": Int64(2**63 - 1)}, "token"),
    "holders is text": ({"holders": "nobody"}, "holders"),
    "holders has a number": ({"holders": [7]}, "holders"),
    "holders is missing": ({"holders": None}, "holders"),
    "waiters is an object": ({"waiters": {"0": "x"}}, "waiters"),
    "waiters has text": ({"waiters": ["x"]}, "waiters"),
    "a counter is text": ({"acquisitions": "many"}, "acquisitions"),
    "a date is text": ({"purge_at": "tomorrow"}, "purge_at"),
    "another version": ({"v": 99}, "version"),
    "no version": ({"v": None}, "'v'"),
}


#: A value of every type, for the fields that no test is about.
_BLANK: dict[type, Any] = {str: "", int: 0, Int64: Int64(0), list: [], datetime: datetime(2030, 1, 1, tzinfo=UTC)}


def _blank(fields: Mapping[str, type]) -> Document:
    return {name: _BLANK[kind] for name, kind in fields.items()}


def clock(client: MongoClient[Document]) -> str:
    """The name of today's primary, as the engine writes it into a document."""
    return str(client.admin.command("hello").get("electionId", ""))


def now() -> datetime:
    """Return the server's time in milliseconds. Tests and server share a clock."""
    return datetime.now(UTC).replace(microsecond=0)


def entry(number: int = 1, *, left: float = 600, held_for: float = 75, **facts: Any) -> Document:
    """Return a holder with a lease that ends in *left* seconds."""
    moment = now()
    return {
        **_blank(HOLDER_FIELDS),
        "grant": f"secret-grant.{number}",
        "session": "secret-session",
        "mode": "exclusive",
        "capacity": 1,
        "lease": Int64(30_000),
        "server_lease": Int64(33_000),
        "waiter_lease": Int64(10_000),
        "min_hold": Int64(0),
        "host": "web-1",
        "pid": 4_000 + number,
        "thread": "MainThread",
        "since": moment - timedelta(seconds=held_for),
        "acquired_at": moment - timedelta(seconds=held_for),
        "token": Int64(TOKEN + number),
        "until": moment + timedelta(seconds=left),
        **facts,
    }


def waiter(number: int = 100, *, left: float = 600, **facts: Any) -> Document:
    """Somebody who waits, and whose place in the queue ends in *left* seconds."""
    made = entry(number, left=left, **facts)
    del made["acquired_at"], made["token"]
    return made


def document(
    key: Any, holders: Sequence[Document] = (), waiters: Sequence[Document] = (), change: Document | None = None
) -> Document:
    """Return a whole lock document, with the fields of *change* replaced."""
    made: Document = {
        **_blank(DOCUMENT_FIELDS),
        "_id": key,
        "v": SCHEMA,
        "holders": list(holders),
        "waiters": list(waiters),
        "token": Int64(TOKEN + 50),
        "written_at": now(),
        "purge_at": now() + timedelta(days=7),
        "changes": Int64(3),
        "acquisitions": Int64(41),
        "contended": Int64(7),
        "expired": Int64(1),
        "waited_ms": Int64(8_400),
        "held_ms": Int64(100_000),
        "longest_wait_ms": Int64(4_100),
        "longest_hold_ms": Int64(91_000),
        "expires_at": max((holder["until"] for holder in holders if "until" in holder), default=None),
    }
    return {**made, **(change or {})}


class Locks:
    """The collection of the test, and ways to fill it."""

    def __init__(self, collection: Collection[Document], clock: str) -> None:
        self.collection = collection
        self.clock = clock

    def add(
        self,
        key: Any,
        holders: Sequence[Document] = (),
        waiters: Sequence[Document] = (),
        change: Document | None = None,
    ) -> None:
        """Add one document."""
        self.collection.insert_one(document(key, holders, waiters, {"clock": self.clock, **(change or {})}))

    def held(self, *keys: str, left: float = 600) -> None:
        """Add held locks."""
        for number, key in enumerate(keys, 1):
            self.add(key, [entry(number, left=left)])

    def stale(self, *keys: str, over: float = 60, change: Document | None = None) -> None:
        """Add locks whose lease is over."""
        for number, key in enumerate(keys, 1):
            self.add(key, [entry(number, left=-over)], change=change)

    def free(self, *keys: str) -> None:
        """Add locks that nobody holds."""
        for key in keys:
            self.add(key)

    def many(self, free: int, held: int) -> None:
        """Add a lot of them."""
        holder = entry(1)
        for start in range(0, free, 5_000):
            self.collection.insert_many(
                document(f"free:{number:07d}", change={"clock": self.clock})
                for number in range(start, min(free, start + 5_000))
            )
        self.collection.insert_many(
            document(f"held:{number:07d}", [holder], change={"clock": self.clock}) for number in range(held)
        )

    def renew_indexes(self) -> None:
        """Make the indexes again. An index remembers for ever that it has once seen an array."""
        self.collection.drop_indexes()
        ensure_indexes(self.collection)

    def explain(self, sent: Document) -> Document:
        """Return the statistics of a sent aggregation, and assert that it does not scan the whole collection."""
        asked = {"aggregate": sent["aggregate"], "pipeline": sent["pipeline"], "cursor": {}}
        found = self.collection.database.command("explain", asked, verbosity="executionStats")
        assert "COLLSCAN" not in str(found)
        statistics: Document = (found["stages"][0]["$cursor"] if "stages" in found else found)["executionStats"]
        return statistics

    def read(self, key: str) -> Document:
        """The document of *key*."""
        found = self.collection.find_one({"_id": key})
        assert found is not None
        return found
