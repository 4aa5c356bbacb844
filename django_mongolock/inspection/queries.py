"""Read-only queries for snapshots, counts and deadlocks. The server's own clock judges the times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from ..engine.session.session import off_main_thread
from ..engine.store.errors import bare, is_out_of_reach, translate
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_key
from ..keys import as_key
from .kinds import EVERY_KEY, Choice, KeyMatch
from .snapshot import LockSnapshot, Obstacle, ShownState, read_snapshot

__all__ = ["alock_info", "lock_info"]

Document = dict[str, Any]
T = TypeVar("T")

#: The seconds for which servers that refuse every connection are asked again.
QUICK: Final = 0.5
#: The number of locks in one batch.
READ_BATCH: Final = 1_000
#: The number of locks with waiters that are searched for deadlocks.
MAX_LOCKS_FOR_DEADLOCKS: Final = 1_000
#: The largest size in bytes of a holder, of a waiter and of the rest of a document, with the longest names that are
#: stored. A larger entry was not written by this package, and is not read.
ENTRY_BYTES: Final = 12_000
#: The same limit for the name of a thread or task.
WORKER_BYTES: Final = 200


def array(field: str) -> Document:
    """Return an expression for the array *field*, [] if the field holds anything else."""
    return {"$cond": [{"$isArray": f"${field}"}, f"${field}", []]}


#: The waiters whose place in the queue has not expired.
QUEUE: Final[Document] = {"$filter": {"input": array("waiters"), "as": "e", "cond": {"$gt": ["$$e.until", "$$NOW"]}}}
#: An expression for the moment since which the first of the `$$queue` has waited.
FIRST: Final[Document] = {"$min": "$$queue.since"}
_IS_RELEASED: Final[Document] = {"$eq": [{"$type": "$$this.released"}, "date"]}
#: An expression that is true if all holders have released the lock. Such a lock is kept for a minimum hold. It is not
#: held, and is not stale when the minimum hold ends.
WAS_RELEASED: Final[Document] = {
    "$and": [
        {"$ne": [array("holders"), []]},
        {"$allElementsTrue": [{"$map": {"input": array("holders"), "in": _IS_RELEASED}}]},
    ]
}


#: The moment when the first of the holders that have not released the lock acquired it.
_SINCE: Final[Document] = {
    "$min": {
        "$map": {
            "input": {"$filter": {"input": array("holders"), "cond": {"$not": [_IS_RELEASED]}}},
            "in": "$$this.acquired_at",
        }
    }
}
#: The times of the holder whose lease ends last. A second copy of its whole entry could be too large.
_LATEST: Final[Document] = {
    "$map": {
        "input": {"$filter": {"input": array("holders"), "cond": {"$eq": ["$$this.until", "$expires_at"]}, "limit": 1}},
        "in": {name: f"$$this.{name}" for name in ("until", "acquired_at", "lease", "server_lease", "released")},
    }
}
#: Locks with a lease, running or ended. The type keeps a search in the index away from the many documents with null
#: there.
LEASED: Final[Document] = {"expires_at": {"$type": "date"}}
#: Milliseconds after which no dead waiter keeps its place in a queue.
_DEAD_WAITERS_GONE: Final = 3_600_000


def in_state(state: str, over: float = 0.0) -> Document:
    """Return the condition that a lock is in *state*, by the server's clock.

    A waiter gets a lock soon after its lease ends. A lock that has been stale for long therefore has no waiters.

    - state: "held", "kept", "stale", "waited", "leased" (one of these), "free", "damaged" or "all". "over" selects the
      free locks that were kept.
    - over: least number of seconds for which a lock has been stale.
    """
    runs: Document = {"$gt": ["$expires_at", "$$NOW"]}
    ended: Document = {"$lte": ["$expires_at", {"$subtract": ["$$NOW", round(over * 1000)]}]}
    recent: Document = {"$gt": ["$expires_at", {"$subtract": ["$$NOW", _DEAD_WAITERS_GONE]}]}
    at_work: Document = {"$not": [WAS_RELEASED]}
    # Most queues are empty. This condition decides about them at once.
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
    """Return the condition that a lock is chosen."""
    conditions = [in_state(choice.state, choice.older_than)]
    if choice.key is not None:
        conditions.append(choice.key.query())
    if choice.ids is not None:
        conditions.append({"_id": {"$in": list(choice.ids)}})
    if choice.owner is not None:
        conditions.append({**in_state("leased"), "holders.owner": {"$eq": choice.owner}})
    return {"$and": found} if (found := [each for each in conditions if each]) else {}


def waiting(waiters: Document | str) -> Document:
    """Return an expression for the number of waiters. Each waiter stands also for those of its process behind it."""
    behind = {"$sum": "$$waiters.behind"}
    return {"$let": {"vars": {"waiters": waiters}, "in": {"$add": [{"$size": "$$waiters"}, behind]}}}


#: The number of locks that are sorted without an index. The query takes the first of them in its own order.
MAX_SORTED: Final = 10_000
_NEVER: Final = datetime(9999, 1, 1, tzinfo=UTC)
ORDERS: Final[Document] = {
    "since": {"$ifNull": [_SINCE, _NEVER]},
    "waited": {"$ifNull": [{"$let": {"vars": {"queue": QUEUE}, "in": FIRST}}, _NEVER]},
    "waiting": waiting(QUEUE),
}


class Bounds(TypedDict, total=False):
    """The limits of a read.

    - limit: number of locks, 0 for all.
    - holders, waiters: numbers of holders and of waiters of each lock.
    - owner: only owner whose holders are read.
    - workers: only threads or tasks whose waiters are read.
    - timeout: seconds for each batch.
    - by: one of `ORDERS` and its direction, 1 or -1. Without it, the locks have the order of the query.
    """

    by: tuple[str, int]
    skip: int
    limit: int
    holders: int
    owner: str | None
    waiters: int
    workers: Sequence[str] | None
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
    stages += projection(holders, waiters, bounds.get("owner"), bounds.get("workers"))
    # Ask for one more than is wanted. The server then closes the cursor with the first batch.
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


def with_obstacles(
    store: MongoStore, locks: Iterable[LockSnapshot], match: KeyMatch = EVERY_KEY, timeout: float = 60.0
) -> Iterator[LockSnapshot]:
    """Yield these locks, each with the lock that one of its holders waits for. Raises LockBackendFailed.

    A command for each batch reads the locks with waiters whose keys match. Without holders, no command is sent. A
    holder is not found if it waits behind another thread of its process.
    """
    left = iter(locks)
    while batch := list(islice(left, READ_BATCH)):
        held = [lock for lock in batch if lock.state is ShownState.HELD]
        workers = sorted({holder.worker for lock in held for holder in lock.holders if holder.worker})
        query = {"expires_at": {"$gt": EARLIEST_END}, "waiters.worker": {"$in": workers}, **match.query()}
        bounds = Bounds(limit=READ_BATCH, holders=1, waiters=MOST_SHOWN, workers=workers, timeout=timeout)
        found = snapshots(store, query, **bounds) if workers else ()
        obstacles = {
            waiter.worker: Obstacle(lock.key, next(iter(lock.holders), None), waiter)
            for lock in found
            if type(lock.key) is str
            for waiter in lock.waiters
        }
        for lock in batch:
            known = [obstacles[holder.worker] for holder in lock.holders if holder.worker in obstacles]
            yield replace(lock, obstacle=next((each for each in known if each.key != lock.key), None))


@off_main_thread
def sent_bounded(store: MongoStore, timeout: float, call: Callable[[], T]) -> T:
    """Make a *call* of the driver within *timeout* seconds. Raises LockBackendFailed."""
    with store.bounded(timeout):
        return call()


@off_main_thread
def count(store: MongoStore, query: Document, limit: int, timeout: float) -> int:
    """Count the locks that match *query*, up to *limit*. The count is an estimate if the query matches every lock.

    Raises LockBackendFailed.
    """
    with store.bounded(timeout):
        if not query:
            return min(store.collection.estimated_document_count(), limit)
        return store.collection.count_documents(query, limit=limit)


@off_main_thread
def find_deadlocks(store: MongoStore, key: KeyMatch = EVERY_KEY, timeout: float = 60.0) -> list[Cycle]:
    """Find deadlocks among the locks with waiters whose keys match, at most `MAX_LOCKS_FOR_DEADLOCKS`.

    A deadlock may end a moment later, when its youngest waiter gives up. Raises LockBackendFailed.
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
    """Return a stage that leaves out documents whose entries are larger than *size* on average."""
    entries: Document = {"$add": [{"$size": array("holders")}, {"$size": array("waiters")}, 1]}
    return {"$match": {"$expr": {"$lte": [{"$bsonSize": "$$ROOT"}, {"$multiply": [entries, size]}]}}}


def _workers(field: str, waits_for: str | None) -> Document:
    return {"$map": {"input": array(field), "in": {"worker": "$$this.worker", "waits_for": waits_for}}}


#: The keys of the locks with a waiter that holds another of them. Only such locks can be in a deadlock. Thousands of
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


@off_main_thread
def ping(store: MongoStore, timeout: float = 5.0) -> None:
    """Raise LockBackendFailed if the server does not answer within *timeout*. Raise it at once if no server can be
    reached.
    """
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


def projection(
    holders: int, waiters: int, owner: str | None = None, workers: Sequence[str] | None = None
) -> list[Document]:
    """Return the stages that leave the fields for `read_snapshot`.

    - holders, waiters: numbers to read. Only waiters with a place that has not expired count.
    - owner, workers: see `Bounds`.
    """
    theirs: Document = {"$in": ["$$this.worker", {"$literal": workers}]}
    queue = QUEUE if workers is None else {"$filter": {"input": QUEUE, "as": "this", "cond": theirs}}
    live: Document = {"$slice": [queue, waiters]}
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
    """Return a stage that reduces a document larger than *most* to its size and its counts."""
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
    """Return an expression for the first entries of an array. A field that holds no array keeps its value.

    - owner: only owner whose entries are taken.
    """
    theirs = {"$eq": ["$$this.owner", {"$literal": owner}]}
    entries = f"${field}" if owner is None else {"$filter": {"input": f"${field}", "as": "this", "cond": theirs}}
    return {"$cond": [{"$isArray": f"${field}"}, {"$slice": [entries, count]}, f"${field}"]}


#: The number of holders and of waiters that `lock_info` reads.
MOST_SHOWN: Final = 100


def lock_info(key: str | Model, *, using: str | None = None) -> LockSnapshot:
    """Return a snapshot of the lock on *key*, with its state, its holders and its waiters.

    The call locks nothing, and the answer may be out of date when it arrives. To find out whether a lock can be
    acquired, try to acquire it. A key that nothing has used is free. Raises LockBackendFailed.

    - using: DATABASES alias. Default: MONGOLOCK["DATABASE"].
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
    """Return the snapshot of a document in memory, as `projection` returns one from MongoDB."""
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
