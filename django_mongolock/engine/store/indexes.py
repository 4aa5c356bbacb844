"""The indexes of the locks collection, and those of what apps keep beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from pymongo import IndexModel
from pymongo.collection import Collection

#: `expires_at` finds held and stale locks; by `purge_at` the server removes documents that are not used any more;
#: `contended` finds the locks with the most waits: only an acquisition that waited writes to it.
INDEXES: Final = {
    "mongolock_expires_at": IndexModel([("expires_at", 1)], name="mongolock_expires_at"),
    "mongolock_purge_at": IndexModel([("purge_at", 1)], name="mongolock_purge_at", expireAfterSeconds=0),
    "mongolock_contended": IndexModel(
        [("contended", -1), ("_id", 1)],
        name="mongolock_contended",
        partialFilterExpression={"contended": {"$gt": 0}},
    ),
}


#: That of other collections whose documents have a `purge_at`.
PURGE: Final = "mongolock_purge_at"
#: These collections: each is found for that of the locks.
purged: Final[list[Callable[[Collection[Any]], Collection[Any]]]] = []


def ensure_indexes(collection: Collection[dict[str, Any]], names: Iterable[str] = INDEXES) -> None:
    """Create the indexes that are missing. Needs the right createIndex."""
    collection.create_indexes([INDEXES[name] for name in names])


def missing_indexes(collection: Collection[dict[str, Any]], names: Iterable[str] = INDEXES) -> list[str]:
    """Names of the missing indexes."""
    return sorted(set(names) - set(collection.index_information()))
