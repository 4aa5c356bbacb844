"""Reading the history of the locks: see `backends.history`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..engine.store.errors import bounded
from ..engine.store.mongo import MongoStore

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
    with _bounded(store, timeout):
        return list(store.events.aggregate(stages))


def count(store: MongoStore, query: Document, limit: int, timeout: float = 5.0) -> int:
    """How many events *query* finds, at most *limit*. Raises LockBackendFailed."""
    with _bounded(store, timeout):
        return store.events.count_documents(query, limit=limit)


def _bounded(store: MongoStore, timeout: float) -> AbstractContextManager[None]:
    return bounded(timeout, store.client, needs=f"find on the collection {store.events.name}")
