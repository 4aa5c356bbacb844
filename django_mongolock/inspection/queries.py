"""Reading locks without touching them: snapshots, counts, deadlocks; judged by the server's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, TypedDict, TypeVar, Unpack

import pymongo
from asgiref.sync import sync_to_async
from django.db.models import Model
from pymongo.errors import PyMongoError

from ..backends import get_backend, mongo_store
from ..conf import get_settings
from ..engine import clock
from ..engine.rule.deadlock import EARLIEST_END, Cycle, cycles
from ..engine.rule.document import DOCUMENT_FIELDS, weight
from ..engine.rule.expressions import IS_WHOLE
from ..engine.session.session import sent_apart
from ..engine.store.errors import bare, is_out_of_reach, translate
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_key
from ..keys import as_key
from .kinds import EVERY_KEY, Choice, KeyMatch
from .snapshot import LockSnapshot, read_snapshot

__all__ = ["alock_info", "lock_info"]

Document = dict[str, Any]
T = TypeVar("T")

#: For how long servers that refuse every connection are asked again, in seconds.
QUICK: Final = 0.5
#: How many locks are read at a time.
READ_BATCH: Final = 1_000
#: How many locks with waiters are searched for deadlocks.
MAX_LOCKS_FOR_DEADLOCKS: Final = 1_000
#: How many bytes a holder, a waiter or the rest of a document has at most, with the longest names that are stored: what
#: has more was not written by this package, and is not read.
ENTRY_BYTES: Final = 12_000
#: The same of the name of a thread or task.
WORKER_BYTES: Final = 200


def array(field: str) -> Document:
    """An expression for the array *field*; [] if the field holds anything else."""
    return {"$cond": [{"$isArray": f"${field}"}, f"${field}", []]}


#: The waiters whose place in the queue has not expired.
QUEUE: Final[Document] = {"$filter": {"input": array("waiters"), "as": "e", "cond": {"$gt": ["$$e.until", "$$NOW"]}}}
#: An expression for since when the first of the `$$queue` has waited.
FIRST: Final[Document] = {"$min": "$$queue.since"}
_IS_RELEASED: Final[Document] = {"$eq": [{"$type": "$$this.released"}, "date"]}
#: All holders have released the lock, which is only kept for a minimum hold: it is not held, nor stale when that ends.
WAS_RELEASED: Final[Document] = {
    "$and": [
        {"$ne": [array("holders"), []]},
        {"$allElementsTrue": [{"$map": {"input": array("holders"), "in": _IS_RELEASED}}]},
    ]
}


#: When the first of the holders that have not released the lock acquired it. The holder whose lease ends last.
_SINCE: Final[Document] = {
    "$min": {
        "$map": {
            "input": {"$filter": {"input": array("holders"), "cond": {"$not": [_IS_RELEASED]}}},
            "in": "$$this.acquired_at",
        }
    }
}
_LATEST: Final[Document] = {
    "$filter": {"input": array("holders"), "cond": {"$eq": ["$$this.until", "$expires_at"]}, "limit": 1}
}
#: Locks with a lease, which runs or has ended. The type keeps a search in the index away from the many documents with
#: null there.
LEASED: Final[Document] = {"expires_at": {"$type": "date"}}
#: Milliseconds for which no dead waiter keeps its place in a queue.
_DEAD_WAITERS_GONE: Final = 3_600_000


def in_state(state: str, over: float = 0.0) -> Document:
    """The condition that a lock is "held", "kept", "stale", "waited" for, "leased" (one of these), "free", "damaged",
    or any of "all", by the server's clock; "over" are those of the free that were kept. over: of the stale, for how
    many seconds at least.

    A waiter gets a lock soon after its lease ends: so a lock that has been stale for long is not waited for.
    """
    runs: Document = {"$gt": ["$expires_at", "$$NOW"]}
    ended: Document = {"$lte": ["$expires_at", {"$subtract": ["$$NOW", round(over * 1000)]}]}
    recent: Document = {"$gt": ["$expires_at", {"$subtract": ["$$NOW", _DEAD_WAITERS_GONE]}]}
    at_work: Document = {"$not": [WAS_RELEASED]}
    # Most queues are empty, which is decided at once.
    conditions: dict[str, list[Document]] = {
        "held": [runs, at_work],
        "kept": [runs, WAS_RELEASED],
        "stale": [ended, at_work],
        "over": [ended, WAS_RELEASED],
        "leased": [{"$or": [runs, at_work]}],
        "waited": [recent, {"$ne": ["$waiters", []]}, {"$ne": [QUEUE, []]}],
    }
    if state in conditions:
        return {**LEASED, "$expr": {"$and": conditions[state]}}
    if state == "free":
        return {"$or": [{"expires_at": None}, in_state("over")]}
    return {"all": {}, "damaged": {"$expr": {"$not": [IS_WHOLE]}}}[state]


def chosen(choice: Choice) -> Document:
    """The condition that a lock is meant."""
    conditions = [in_state(choice.state, choice.older_than)]
    if choice.key is not None:
        conditions.append(choice.key.query())
    if choice.ids is not None:
        conditions.append({"_id": {"$in": list(choice.ids)}})
    if choice.owner is not None:
        conditions.append({**in_state("leased"), "holders.owner": {"$eq": choice.owner}})
    return {"$and": found} if (found := [each for each in conditions if each]) else {}


def waiting(waiters: Document | str) -> Document:
    """An expression for how many wait: each waiter stands also for those of its process behind it."""
    behind = {"$sum": "$$waiters.behind"}
    return {"$let": {"vars": {"waiters": waiters}, "in": {"$add": [{"$size": "$$waiters"}, behind]}}}


#: What locks can be sorted by without an index: so many of them at most, the first in the order of the query.
MAX_SORTED: Final = 10_000
_NEVER: Final = datetime(9999, 1, 1, tzinfo=UTC)
ORDERS: Final[Document] = {
    "since": {"$ifNull": [_SINCE, _NEVER]},
    "waited": {"$ifNull": [{"$let": {"vars": {"queue": QUEUE}, "in": FIRST}}, _NEVER]},
    "waiting": waiting(QUEUE),
}


class Bounds(TypedDict, total=False):
    """How much to read. limit: 0 for all. holders, waiters: of each lock. owner: of the holders, only theirs. passed:
    waiters at the head of the queue that are left out. timeout: for each batch, in seconds.

    by: one of `ORDERS` and its direction, 1 or -1; without it, the locks have the order of the query.
    """

    by: tuple[str, int]
    skip: int
    limit: int
    holders: int
    owner: str | None
    waiters: int
    passed: int
    timeout: float


def snapshots(
    store: MongoStore, query: Document, sort: Mapping[str, int] | None = None, **bounds: Unpack[Bounds]
) -> Iterator[LockSnapshot]:
    """Read the locks that match *query*, in batches. Raises LockBackendFailed."""
    limit, timeout = bounds.get("limit", 0), bounds.get("timeout", 60.0)
    stages: list[Document] = [{"$match": query}]
    stages += [{"$sort": dict(sort)}] if sort else []
    if (by := bounds.get("by")) is not None:
        stages += [
            {"$limit": MAX_SORTED},
            {"$addFields": {"order": ORDERS[by[0]]}},
            {"$sort": {"order": by[1], "_id": 1}},
        ]
    stages += [{"$skip": skip}] if (skip := bounds.get("skip")) else []
    stages += [{"$limit": limit}] if limit else []
    holders, waiters = bounds.get("holders", 3), bounds.get("waiters", 1)
    stages += projection(holders, waiters, bounds.get("passed", 0), bounds.get("owner"))
    # One more than is wanted: the server then closes the cursor with the first batch.
    size = min(limit or READ_BATCH, READ_BATCH) + 1
    cursor = sent_bounded(store, timeout, lambda: store.latest.aggregate(stages, batchSize=size))
    try:
        while True:
            batch = sent_bounded(store, timeout, lambda: list(islice(cursor, READ_BATCH)))
            yield from map(read_snapshot, batch)
            if len(batch) < READ_BATCH:
                return
    finally:
        sent_bounded(store, timeout, cursor.close)


@sent_apart
def sent_bounded(store: MongoStore, timeout: float, call: Callable[[], T]) -> T:
    """Make a *call* of the driver, which takes no longer than that. Raises LockBackendFailed."""
    with store.bounded(timeout):
        return call()


@sent_apart
def count(store: MongoStore, query: Document, limit: int, timeout: float) -> int:
    """Count the locks that match *query*, up to *limit*; for a query that matches all, the count is an estimate.

    Raises LockBackendFailed.
    """
    with store.bounded(timeout):
        if not query:
            return min(store.collection.estimated_document_count(), limit)
        return store.collection.count_documents(query, limit=limit)


@sent_apart
def find_deadlocks(store: MongoStore, key: KeyMatch = EVERY_KEY, timeout: float = 60.0) -> list[Cycle]:
    """Find deadlocks among at most `MAX_LOCKS_FOR_DEADLOCKS` locks with waiters whose keys match.

    A deadlock that is found may be over a moment later, when its youngest waiter gives up. Raises LockBackendFailed.
    """
    query = {"expires_at": {"$gt": EARLIEST_END}, "waiters.0": {"$exists": True}, **key.query()}
    with store.bounded(timeout):
        names: list[Document] = [{"$match": query}, {"$limit": MAX_LOCKS_FOR_DEADLOCKS}, *_ENTANGLED]
        entangled = [each["_id"] for each in store.latest.aggregate(names)]
        if not entangled:
            return []
        fields = {"holders": 1, "waiters": 1, "now": "$$NOW"}
        whole: list[Document] = [{"$match": {"_id": {"$in": entangled}}}, {"$project": fields}, bounded_entries()]
        found = list(store.latest.aggregate(whole))
    return cycles(found, found[0]["now"]) if found else []


def bounded_entries(size: int = ENTRY_BYTES) -> Document:
    """A stage that leaves out documents whose entries are larger than *size*, on average."""
    entries: Document = {"$add": [{"$size": array("holders")}, {"$size": array("waiters")}, 1]}
    return {"$match": {"$expr": {"$lte": [{"$bsonSize": "$$ROOT"}, {"$multiply": [entries, size]}]}}}


def _workers(field: str, waits_for: str | None) -> Document:
    return {"$map": {"input": array(field), "in": {"worker": "$$this.worker", "waits_for": waits_for}}}


#: The keys of the locks for which a worker waits that holds another of them: the only ones in a deadlock. Thousands of
#: waiters stay on the server. A holder waits for nothing (null).
_ENTANGLED: Final[list[Document]] = [
    {"$project": {"holders.worker": 1, "waiters.worker": 1}},
    bounded_entries(WORKER_BYTES),
    {"$project": {"entry": {"$concatArrays": [_workers("holders", None), _workers("waiters", "$_id")]}}},
    {"$unwind": "$entry"},
    {"$match": {"entry.worker": {"$type": "string", "$ne": ""}}},
    {"$group": {"_id": "$entry.worker", "waits_for": {"$addToSet": "$entry.waits_for"}}},
    {"$match": {"waits_for": None}},
    {"$unwind": "$waits_for"},
    {"$match": {"waits_for": {"$ne": None}}},
    {"$group": {"_id": "$waits_for"}},
]


@sent_apart
def ping(store: MongoStore, timeout: float = 5.0) -> None:
    """Raise LockBackendFailed if the server does not answer within *timeout*; at once if none can be reached."""
    began = clock.now()
    while True:
        try:
            with pymongo.timeout(min(QUICK, timeout)):
                store.client.admin.command("ping")
                return
        except PyMongoError as error:
            waited = clock.now() - began
            if not error.timeout or waited >= timeout or is_out_of_reach(store.client):
                raise translate(error, waited, client=store.client) from bare(error)


def projection(holders: int, waiters: int, passed: int = 0, owner: str | None = None) -> list[Document]:
    """The stages that leave what `read_snapshot` reads: with so many holders, and so many of the waiters whose places
    have not expired. owner: no other holders."""
    live: Document = {"$slice": [QUEUE, passed, waiters]}
    read: Document = {
        **dict.fromkeys((*DOCUMENT_FIELDS, "expires_at", "last_holder"), 1),
        "now": "$$NOW",
        "whole": IS_WHOLE,
        "released": WAS_RELEASED,
        "holders": first("holders", holders, owner),
        "waiters": {"$cond": [{"$isArray": "$waiters"}, live, "$waiters"]},
        "tombstones": first("tombstones", 1),
        "holding": {"$size": array("holders")},
        "more_permits": {"$sum": "$holders.more_permits"},
        "since": _SINCE,
        "latest": _LATEST,
        "queue": {"$let": {"vars": {"queue": QUEUE}, "in": {"waiting": waiting("$$queue"), "since": FIRST}}},
    }
    return [{"$project": read}, _without_giants((holders + waiters + 4) * ENTRY_BYTES)]


def _without_giants(most: int) -> Document:
    """A stage that leaves nothing of a document that is larger than *most* but what can be said of it."""
    size: Document = {"$bsonSize": "$$ROOT"}
    giant: Document = {
        "_id": {"$cond": [{"$gt": [{"$bsonSize": {"_id": "$_id"}}, most]}, None, "$_id"]},
        "now": "$now",
        "giant": size,
        "whole": {"$literal": False},
        "holding": "$holding",
        "more_permits": "$more_permits",
        "queue": {"waiting": "$queue.waiting"},
    }
    return {"$replaceWith": {"$cond": [{"$gt": [size, most]}, giant, "$$ROOT"]}}


def first(field: str, count: int, owner: str | None = None) -> Document:
    """An expression for the first of an array, or of its entries with this owner; whatever else is in the field, as it
    is."""
    theirs = {"$eq": ["$$this.owner", {"$literal": owner}]}
    entries = f"${field}" if owner is None else {"$filter": {"input": f"${field}", "as": "this", "cond": theirs}}
    return {"$cond": [{"$isArray": f"${field}"}, {"$slice": [entries, count]}, f"${field}"]}


#: How many holders and waiters `lock_info` reads.
MOST_SHOWN: Final = 100


def lock_info(key: str | Model, *, using: str | None = None) -> LockSnapshot:
    """Return what is known of the lock on *key* at this moment: its state, who holds it, and who waits.

    Nothing is locked, and the answer may be out of date when it arrives: to find out whether a lock can be had, try to
    acquire it. A key that nothing has used is free. using: the DATABASES alias, if not MONGOLOCK["DATABASE"]. Raises
    LockBackendFailed.
    """
    name: Any = as_key(key)
    settings = get_settings()
    stored = check_key(name, settings.KEY_PREFIX)
    if (here := get_backend(using).read_here(stored)) is not None:
        return _in_memory(stored, *here)
    found = snapshots(
        mongo_store(using), {"_id": {"$eq": stored}}, limit=1, holders=MOST_SHOWN, waiters=MOST_SHOWN,
        timeout=settings.COMMAND_TIMEOUT,
    )  # fmt: skip
    return next(found, None) or _in_memory(stored, None, datetime.now(UTC))


async def alock_info(key: str | Model, *, using: str | None = None) -> LockSnapshot:
    """See lock_info()."""
    return await sync_to_async(lock_info, thread_sensitive=False)(key, using=using)


def _in_memory(key: str, document: Mapping[str, Any] | None, now: datetime) -> LockSnapshot:
    """The snapshot of a document in memory, as `projection` has it of one in MongoDB."""
    document = document or {}
    holders = document.get("holders", [])
    queue = [waiter for waiter in document.get("waiters", []) if waiter["until"] > now]
    since = min((waiter["since"] for waiter in queue), default=None)
    return read_snapshot(
        {
            **document,
            "_id": key,
            "now": now,
            "whole": True,
            "released": bool(holders) and all("released" in holder for holder in holders),
            "waiters": queue[:MOST_SHOWN],
            "holding": len(holders),
            "latest": sorted(holders, key=lambda holder: holder["until"])[-1:],
            "since": min((each["acquired_at"] for each in holders if "released" not in each), default=None),
            "more_permits": sum(map(weight, holders)) - len(holders),
            "queue": {"waiting": sum(1 + waiter.get("behind", 0) for waiter in queue), "since": since},
        }
    )
