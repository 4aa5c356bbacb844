"""Results that are kept under the key of a lock, for later calls with that key: in MongoDB, or in memory for tests.

A run marks the key with its fencing token before it begins, and its result is stored only where that mark still stands:
so the result of a run that lost its lock never takes the place of a later one's.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, Protocol, cast

from bson import Int64
from pymongo import ReturnDocument
from pymongo.collection import Collection

from .memory_server import MemoryStore

Document = dict[str, Any]

#: For how long a mark without a result is there, in seconds: longer than any run.
MARK: Final = 30 * 86_400.0

#: Whether there is a result whose time is not over.
_IS_KEPT: Final = {"$and": [{"$gt": ["$purge_at", "$$NOW"]}, {"$ne": [{"$type": "$result"}, "missing"]}]}


class Results(Protocol):
    """The documents. Each command may be sent again."""

    def find(self, key: str) -> Document | None:
        """Return the document of *key* if it has a result."""

    def begin(self, key: str, token: int) -> Document:
        """Return the document of *key* if it has a result; otherwise mark it for the run with this *token*.

        The mark in what is returned is that of a later run, if there is one.
        """

    def keep(self, key: str, token: int, result: Document, seconds: float) -> bool:
        """Keep *result* for so many seconds if the mark is that of the run with this *token*; return whether it is."""


class MongoResults:
    """See Results."""

    def __init__(self, collection: Collection[Document]) -> None:
        self._collection = collection

    def find(self, key: str) -> Document | None:
        return self._collection.find_one({"_id": {"$eq": key}, "$expr": _IS_KEPT})

    def begin(self, key: str, token: int) -> Document:
        mark = {"_id": "$_id", "token": {"$max": ["$token", Int64(token)]}, "purge_at": _from_now(MARK)}
        begun = {"$replaceWith": {"$cond": [_IS_KEPT, "$$ROOT", mark]}}
        found = self._collection.find_one_and_update(
            {"_id": {"$eq": key}}, [begun], upsert=True, return_document=ReturnDocument.AFTER
        )
        return cast("Document", found)  # it is there: upsert

    def keep(self, key: str, token: int, result: Document, seconds: float) -> bool:
        kept = {"result": {"$literal": result}, "purge_at": _from_now(seconds)}
        mine = {"_id": {"$eq": key}, "token": {"$eq": Int64(token)}}
        return self._collection.update_one(mine, [{"$set": kept}]).matched_count == 1


def _from_now(seconds: float) -> Document:
    return {"$add": ["$$NOW", Int64(seconds * 1_000)]}


class MemoryResults:
    """See Results."""

    def __init__(self, store: MemoryStore) -> None:
        store.answer()
        self._server, self._documents = store.server, store.server.results

    def find(self, key: str) -> Document | None:
        document = self._documents.get(key, {})
        return document if "result" in document and document["purge_at"] > self._server.time else None

    def begin(self, key: str, token: int) -> Document:
        with self._server.mutex:
            if (found := self.find(key)) is None:
                newest = self._documents.get(key, {}).get("token", 0)
                found = self._documents[key] = {"token": max(newest, token)}
            return found

    def keep(self, key: str, token: int, result: Document, seconds: float) -> bool:
        with self._server.mutex:
            if mine := self._documents[key]["token"] == token:
                purge_at = self._server.time + timedelta(seconds=seconds)
                self._documents[key] = {"token": token, "result": result, "purge_at": purge_at}
            return bool(mine)
