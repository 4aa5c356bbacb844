"""Results that are kept under the key of a lock, for later calls with that key.

A run marks the key with its fencing token before it begins, and its result is stored only where no later run has left
its mark: so the result of a run that lost its lock never takes the place of a later one's. A mark without a result
lives for as long as the lease of its run and a margin; in a longer run, it may be gone.
"""

from __future__ import annotations

from typing import Any, Final, cast

from bson import Int64
from pymongo import ReturnDocument
from pymongo.collection import Collection

Document = dict[str, Any]

#: How much longer than the lease of its run a mark lives, in seconds: longer than any command takes.
MARGIN: Final = 30.0
#: Whether there is a result whose time is not over.
_IS_KEPT: Final = {"$and": [{"$gt": ["$purge_at", "$$NOW"]}, {"$ne": [{"$type": "$result"}, "missing"]}]}


class Results:
    """The documents. Each command may be sent again."""

    def __init__(self, collection: Collection[Document]) -> None:
        self._collection = collection

    def find(self, key: str) -> Document | None:
        """Return the document of *key* if it has a result."""
        return self._collection.find_one({"_id": {"$eq": key}, "$expr": _IS_KEPT})

    def begin(self, key: str, token: int, seconds: float) -> Document:
        """Return the document of *key* if it has a result; otherwise mark it for the run with this *token*.

        The mark in what is returned is that of a later run, if there is one. seconds: the lease of the run.
        """
        mark = {"_id": "$_id", "token": {"$max": ["$token", Int64(token)]}, "purge_at": _from_now(seconds + MARGIN)}
        return self._update(key, {"$cond": [_IS_KEPT, "$$ROOT", mark]})

    def keep(self, key: str, token: int, result: Document, seconds: float) -> bool:
        """Keep *result* for so many seconds unless a later run has begun than that with this *token*; return whether
        it is kept."""
        mine = {"_id": "$_id", "token": Int64(token), "result": {"$literal": result}, "purge_at": _from_now(seconds)}
        is_newest = {"$lte": [{"$ifNull": ["$token", Int64(0)]}, Int64(token)]}
        return bool(self._update(key, {"$cond": [is_newest, mine, "$$ROOT"]})["token"] == token)

    def _update(self, key: str, new: Document) -> Document:
        found = self._collection.find_one_and_update(
            {"_id": {"$eq": key}}, [{"$replaceWith": new}], upsert=True, return_document=ReturnDocument.AFTER
        )
        return cast("Document", found)  # it is there: upsert


def _from_now(seconds: float) -> Document:
    return {"$add": ["$$NOW", Int64(seconds * 1_000)]}


def results_beside(locks: Collection[Document]) -> Collection[Document]:
    """The collection of the results."""
    return locks.database.get_collection(f"{locks.name}_results", codec_options=locks.codec_options)
