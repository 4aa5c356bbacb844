"""What is done to locks from outside, by people and by jobs: force release, clearing what is stale.

Nobody here compares a time: the server does, in the update itself. So a lock that is renewed in the same moment
stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pymongo

from ..exceptions import LockDocumentError
from .document import find_damage
from .step import Step
from .store import CLOCK, MongoStore

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Which:
    """Which stale locks are meant. pattern: a regular expression for the key. owner: of one of the holders.
    older_than: for how many seconds the lease has been over, at least."""

    pattern: str | None = None
    owner: str | None = None
    older_than: float = 0.0

    def filter(self) -> Document:
        """The query. It must not be part of an upsert."""
        end = {"$subtract": ["$$NOW", round(self.older_than * 1000)]}
        query: Document = {
            "expires_at": {"$type": "date"},
            "$expr": {"$lte": ["$expires_at", end]},
        }
        if self.pattern is not None:
            query["_id"] = {"$regex": self.pattern}
        if self.owner is not None:
            query["holders.owner"] = {"$eq": self.owner}
        return query


def stale(store: MongoStore, which: Which, limit: int = 0, timeout: float = 60.0) -> Iterator[Document]:
    """The documents of stale locks, longest over first, each with the server's time in `now`.

    Damaged documents are left out: they are never cleared.
    """
    fields: Document = {"holders": 1, "waiters": 1, "expires_at": 1, "now": "$$NOW"}
    found = store.collection.find(which.filter(), limit=limit).sort("expires_at", 1)
    del fields
    with pymongo.timeout(timeout):
        for document in found:
            if find_damage(document) is None:
                yield document


def clear_stale(store: MongoStore, keys: Sequence[str], which: Which, timeout: float = 60.0) -> int:
    """Clear those of *keys* that are stale when the server gets to them; return how many that were.

    Their holders are pruned, and whoever waits for them is granted.
    """
    step = Step()
    where = {"$and": [which.filter(), {"_id": {"$in": list(keys)}}]}
    with pymongo.timeout(timeout):
        result = store.collection.update_many(where, step.pipeline(), let=step.arguments(store.config.limits, CLOCK))
    return result.modified_count


def force_release(store: MongoStore, key: str, grants: Sequence[str] | None = None, timeout: float = 5.0) -> list[str]:
    """Take the lock from its holders (from those with one of *grants*, if given), also during a minimum hold.

    Returns the ids that it was taken from. The holder learns of it at its next renewal; what it does until then
    is only stopped where its fencing token is compared. Raises LockDocumentError, LockBackendError.
    """
    document = store.collection.find_one({"_id": {"$eq": key}})
    if document is None:
        return []
    if damage := find_damage(document):
        raise LockDocumentError(key, damage)
    ids = [holder["grant"] for holder in document["holders"] if grants is None or holder["grant"] in grants]
    if ids and store.give_back(key, Step(remove=tuple(ids), force=True), timeout):
        return ids
    return []
