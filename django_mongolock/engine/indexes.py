"""The three indexes of the locks collection."""

from __future__ import annotations

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


def ensure_indexes(collection: Collection[dict[str, Any]]) -> None:
    """Create the indexes that are missing. Needs the right createIndex."""
    collection.create_indexes(list(INDEXES.values()))


def missing_indexes(collection: Collection[dict[str, Any]]) -> list[str]:
    """Names of the missing indexes."""
    return sorted(set(INDEXES) - set(collection.index_information()))
