"""Looking at many locks without touching them: what the server knows of each, judged by the server's own clock.

A document may hold anything, written by anybody. So what is read here is bounded in size, and every value is taken
for what it is only where it has the right type: a damaged document is reported as such and stops nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Any, Final, TypedDict, Unpack

from ..engine.deadlock import EVER, Cycle, cycles
from ..engine.document import DOCUMENT_FIELDS, find_damage
from ..engine.rule import IS_WHOLE
from ..engine.store import MongoStore
from .patterns import EVERY_KEY, KeyMatch

Document = dict[str, Any]


#: Among how many locks that somebody waits for deadlocks are looked for.
MOST_WAITED: Final = 1_000


class State(StrEnum):
    """held: a lease runs. stale: the lease is over and nobody released it; the next who asks gets the lock."""

    HELD = "held"
    STALE = "stale"
    FREE = "free"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Seen:
    """One lock as the server saw it at the moment *now*.

    holders and waiters are the first few; holding and waiting tell how many there are (of the waiters: whose place
    in the queue has not run out, with those of their processes who stand behind them). damage: why the document
    cannot be used, None if it can. last: who held it before.
    """

    key: Any
    now: datetime
    state: State
    holders: tuple[Entry, ...]
    waiters: tuple[Entry, ...]
    holding: int
    waiting: int
    token: int | None
    expires_at: datetime | None
    purge_at: datetime | None
    acquisitions: int
    contended: int
    expired: int
    waited_ms: int
    held_ms: int
    longest_wait_ms: int
    longest_hold_ms: int
    damage: str | None
    last: Entry | None = None

    @property
    def left(self) -> float | None:
        """Seconds until the last lease ends, negative where it is over; None where there is none."""
        return None if self.expires_at is None else (self.expires_at - self.now).total_seconds()

    @property
    def since(self) -> datetime | None:
        """Since when the holder shown that has held it for longest has done so."""
        return min((holder.acquired_at for holder in self.holders if holder.acquired_at), default=None)

    @property
    def tokens(self) -> list[int]:
        """The fencing tokens of the holders shown: what tells their grants from later ones."""
        return [holder.token for holder in self.holders if holder.token is not None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A holder, or somebody who waits, in its own words. Without the id of the grant, which is nobody's business.

    worker: a name of the thread or task, the same wherever it holds or waits. behind: how many more of its process
    wait for the same, behind this waiter, who stands for them in the queue.
    """

    label: str | None
    place: str | None
    user: str | None
    owner: str | None
    host: str | None
    pid: int | None
    thread: str | None
    mode: str | None
    capacity: int | None
    token: int | None
    since: datetime | None
    acquired_at: datetime | None
    until: datetime | None
    worker: str | None = None
    behind: int = 0


#: How many locks are read at a time.
READ_BATCH: Final = 1_000

_COUNTERS: Final = (
    "acquisitions",
    "contended",
    "expired",
    "waited_ms",
    "held_ms",
    "longest_wait_ms",
    "longest_hold_ms",
)


def _list(field: str) -> Document:
    return {"$cond": [{"$isArray": f"${field}"}, f"${field}", []]}


def _first(field: str, count: int) -> Document:
    return {"$cond": [{"$isArray": f"${field}"}, {"$slice": [f"${field}", count]}, f"${field}"]}


#: The holders of a lock that was released, and only kept for a minimum hold: it is not stale when that is over.
RELEASED: Final[Document] = {"$elemMatch": {"released": {"$type": "date"}}}


def _projection(holders: int, waiters: int) -> Document:
    living = {"$filter": {"input": _list("waiters"), "as": "e", "cond": {"$gt": ["$$e.until", "$$NOW"]}}}
    return {
        **dict.fromkeys((*DOCUMENT_FIELDS, "expires_at", "last_holder"), 1),
        "now": "$$NOW",
        "whole": IS_WHOLE,
        "released": {"$in": ["date", {"$map": {"input": _list("holders"), "in": {"$type": "$$this.released"}}}]},
        "holders": _first("holders", holders),
        "waiters": _first("waiters", waiters),
        "tombstones": _first("tombstones", 1),
        "holding": {"$size": _list("holders")},
        "waiting": count_of(living),
    }


def count_of(waiters: Document | str) -> Document:
    """How many wait: an entry stands also for those of its process behind it."""
    behind = {"$sum": "$$waiters.behind"}
    return {"$let": {"vars": {"waiters": waiters}, "in": {"$add": [{"$size": "$$waiters"}, behind]}}}


class Bounds(TypedDict, total=False):
    """How much of it to read. limit 0: all. holders, waiters: of each lock. timeout: for each batch, in seconds."""

    skip: int
    limit: int
    holders: int
    waiters: int
    timeout: float


def survey(
    store: MongoStore, query: Document, sort: Mapping[str, int] | None = None, **bounds: Unpack[Bounds]
) -> Iterator[Seen]:
    """The locks that *query* finds, read in batches. Raises LockBackendFailed."""
    limit, timeout = bounds.get("limit", 0), bounds.get("timeout", 60.0)
    stages: list[Document] = [{"$match": query}]
    stages += [{"$sort": dict(sort)}] if sort else []
    stages += [{"$skip": skip}] if (skip := bounds.get("skip")) else []
    stages += [{"$limit": limit}] if limit else []
    stages.append({"$project": _projection(bounds.get("holders", 3), bounds.get("waiters", 1))})
    with store.bounded(timeout):
        # One more than is wanted: the server then closes the cursor with the first batch.
        cursor = store.latest.aggregate(stages, batchSize=min(limit or READ_BATCH, READ_BATCH) + 1)
    with cursor:
        while True:
            with store.bounded(timeout):
                batch = list(islice(cursor, READ_BATCH))
            yield from map(read, batch)
            if len(batch) < READ_BATCH:
                return


def count(store: MongoStore, query: Document, limit: int | None = None, timeout: float = 60.0) -> int:
    """How many locks *query* finds, at most *limit*; about how many there are, where it finds all.

    Raises LockBackendFailed.
    """
    with store.bounded(timeout):
        if not query:
            total = store.collection.estimated_document_count()
            return total if limit is None else min(total, limit)
        bound: Document = {} if limit is None else {"limit": limit}
        return store.collection.count_documents(query, **bound)


def find_deadlocks(
    store: MongoStore, key: KeyMatch = EVERY_KEY, timeout: float = 60.0, among: Sequence[str] | None = None
) -> list[Cycle]:
    """Deadlocks among the locks that somebody waits for, and whose keys are like that; at most `MOST_WAITED` of them.

    among: the keys of all that somebody waits for, if they are known. A deadlock that is there now is gone in a moment,
    once its youngest waiter gives up. Raises LockBackendFailed.
    """
    query = {"expires_at": {"$gt": EVER}, "waiters.0": {"$exists": True}, **key.query()}
    if among is not None:
        query = {"_id": {"$in": list(among)}}
    with store.bounded(timeout):
        found = list(store.latest.find(query, {"holders": 1, "waiters": 1, "now": "$$NOW"}).limit(MOST_WAITED))
    return cycles(found, found[0]["now"]) if found else []


def ping(store: MongoStore, timeout: float = 5.0) -> None:
    """Raises LockBackendFailed if the server does not answer."""
    with store.bounded(timeout):
        store.client.admin.command("ping")


def read(document: Document) -> Seen:
    """What a document of the projection says. Never raises, whatever is in it."""
    damage = _damage(document)
    now, expires_at = document["now"], _date(document.get("expires_at"))
    if damage is not None:
        state = State.DAMAGED
    elif expires_at is None:
        state = State.FREE
    else:
        state = State.HELD if expires_at > now else State.FREE if document["released"] else State.STALE
    return Seen(
        key=document["_id"],
        now=now,
        state=state,
        holders=_entries(document.get("holders")),
        waiters=_entries(document.get("waiters")),
        holding=document["holding"],
        waiting=document["waiting"],
        token=_number(document.get("token")),
        expires_at=expires_at,
        purge_at=_date(document.get("purge_at")),
        damage=damage,
        last=next(iter(_entries([document.get("last_holder")])), None),
        **{name: _number(document.get(name)) or 0 for name in _COUNTERS},
    )


def _damage(document: Document) -> str | None:
    if type(document["_id"]) is not str:
        return f"its key is {type(document['_id']).__name__}, not str"
    if not document["whole"]:
        return find_damage(document) or "an entry further down in its holders or waiters is damaged"
    end = document.get("expires_at")
    return None if end is None or _date(end) else f"its field 'expires_at' is {type(end).__name__}, not datetime"


def _entries(value: object) -> tuple[Entry, ...]:
    return tuple(_entry(item) for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _entry(item: Document) -> Entry:
    return Entry(
        label=_text(item.get("label")),
        place=_text(item.get("place")),
        user=_text(item.get("user")),
        owner=_text(item.get("owner")),
        host=_text(item.get("host")),
        pid=_number(item.get("pid")),
        thread=_text(item.get("thread")),
        mode=_text(item.get("mode")),
        capacity=_number(item.get("capacity")),
        token=_number(item.get("token")),
        since=_date(item.get("since")),
        acquired_at=_date(item.get("acquired_at")),
        until=_date(item.get("until")),
        worker=_text(item.get("worker")),
        behind=max(0, _number(item.get("behind")) or 0),
    )


def _text(value: object) -> str | None:
    return value[:256] if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _date(value: object) -> datetime | None:
    return value if isinstance(value, datetime) else None
