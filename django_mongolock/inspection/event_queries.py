"""Reading the history of the locks: see `history.writer`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import ceil
from typing import Any, Final

from ..engine.store.errors import bounded
from ..engine.store.mongo import MongoStore
from ..exceptions import LockBackendFailed
from .happened import Happened

Document = dict[str, Any]

#: How many of the latest events `usual_holds` looks at, and of how many holds of a kind it needs to know.
EXAMINED: Final = 5_000
ENOUGH: Final = 10
#: What is usual is what so many of these did not exceed.
MOST: Final = 0.9


def read(
    store: MongoStore,
    query: Document,
    sort: Mapping[str, int],
    *,
    skip: int = 0,
    limit: int = 100,
    timeout: float = 5.0,
) -> list[Document]:
    """The events that *query* finds, in that order, each with the server's time in `now`. Raises LockBackendFailed."""
    stages: list[Document] = [
        {"$match": query},
        {"$sort": dict(sort)},
        {"$skip": skip},
        {"$limit": limit},
        {"$addFields": {"now": "$$NOW"}},
    ]
    with _bounded(store, timeout):
        return list(store.events.aggregate(stages))


def count(store: MongoStore, query: Document, limit: int, timeout: float = 5.0) -> int:
    """How many events *query* finds, at most *limit*. Raises LockBackendFailed."""
    with _bounded(store, timeout):
        return store.events.count_documents(query, limit=limit)


def kind_of(key: str) -> str:
    """The kind of a key: what stands before its last part, such as "order:" of "order:5"; else the key itself."""
    return key[: key.rindex(":") + 1] if ":" in key else key


def usual_holds(store: MongoStore, timeout: float = 5.0) -> dict[str, float]:
    """Return for how many seconds keys are usually held, by their kind: nine of ten of the latest holds took no longer.

    A kind of which the history knows too few is left out; without a history, or the right to read it, all are.
    """
    if store.history is None:
        return {}
    stages: list[Document] = [
        {"$sort": {"at": -1, "_id": -1}},
        {"$limit": EXAMINED},
        {"$match": {"event": Happened.RELEASED.value, "held_ms": {"$gte": 0}, "key": {"$type": "string"}}},
        {"$project": {"_id": 0, "key": 1, "held_ms": 1}},
    ]
    holds = defaultdict(list)
    try:
        with _bounded(store, timeout):
            for event in store.events.aggregate(stages, batchSize=EXAMINED):
                holds[kind_of(event["key"])].append(event["held_ms"] / 1_000)
    except LockBackendFailed:  # the locks were read: what can be said without it is said
        return {}
    known = {kind: sorted(seconds) for kind, seconds in holds.items() if len(seconds) >= ENOUGH}
    return {kind: seconds[ceil(MOST * len(seconds)) - 1] for kind, seconds in known.items()}


def _bounded(store: MongoStore, timeout: float) -> AbstractContextManager[None]:
    return bounded(timeout, store.client, needs=f"find on the collection {store.events.name}")
