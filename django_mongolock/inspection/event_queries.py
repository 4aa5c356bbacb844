"""Reading the history of the locks: see `engine.history`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.mongo_store import MongoStore

Document = dict[str, Any]


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
    with store.bounded(timeout):
        return list(store.events.aggregate(stages))


def count(store: MongoStore, query: Document, limit: int, timeout: float = 5.0) -> int:
    """How many events *query* finds, at most *limit*. Raises LockBackendFailed."""
    with store.bounded(timeout):
        return store.events.count_documents(query, limit=limit)
