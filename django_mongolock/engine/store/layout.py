"""The indexes of the locks collection, and capped collections beside it.

A capped collection has a fixed size. New documents push out the oldest.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

import pymongo
from pymongo import CursorType, IndexModel
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from .. import clock

Document = dict[str, Any]

#: Seconds between two checks whether an index or a collection is still there.
LOOK_EVERY: Final = 60.0
#: The indexes by name. `expires_at` finds held and stale locks. By `purge_at` the server removes unused documents.
#: `contended` finds the locks with the most waits. Only an acquisition that waited writes to this index.
INDEXES: Final = {
    "mongolock_expires_at": IndexModel([("expires_at", 1)], name="mongolock_expires_at"),
    "mongolock_purge_at": IndexModel([("purge_at", 1)], name="mongolock_purge_at", expireAfterSeconds=0),
    "mongolock_contended": IndexModel(
        [("contended", -1), ("_id", 1)],
        name="mongolock_contended",
        partialFilterExpression={"contended": {"$gt": 0}},
    ),
}

#: Error codes of MongoDB.
_EXISTS, _UNAUTHORIZED = 48, 13


def ensure_indexes(collection: Collection[Document]) -> None:
    """Create the missing indexes. The user needs the right createIndex."""
    collection.create_indexes(list(INDEXES.values()))


def missing_indexes(collection: Collection[Document]) -> list[str]:
    """Return the names of the missing indexes."""
    return sorted(set(INDEXES) - set(collection.index_information()))


class IndexKeeper:
    """Makes the indexes again after the collection was dropped or restored, if the user has the right to.

    - looked: moment of the last check, by the local clock. The first check is not needed, because `migrate` has made
      the indexes.
    """

    def __init__(self) -> None:
        self.looked = clock.now()

    def look_after(self, collection: Collection[Document]) -> None:
        """Make missing indexes in the background, once a minute at most.

        Called when a document of *collection* is new.
        """
        if clock.now() - self.looked >= LOOK_EVERY:
            self.looked = clock.now()
            thread = threading.Thread(target=_make_missing, args=[collection], name="mongolock-indexes", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started, but the lock was granted all the same
                thread.start()


def _make_missing(collection: Collection[Document]) -> None:
    with contextlib.suppress(PyMongoError), pymongo.timeout(LOOK_EVERY):
        if missing_indexes(collection):
            ensure_indexes(collection)


def make_capped(collection: Collection[Document], size: int, *, resize: bool = False) -> None:
    """Make the collection of *size* bytes, if it is missing.

    Raise OperationFailure if the collection is missing and may not be made. Raise it too if the collection has no limit
    to its size, because it would grow for ever.

    - resize: whether an existing collection gets that size.
    """
    database, name = collection.database, collection.name
    try:
        database.create_collection(name, check_exists=False, capped=True, size=size)
    except OperationFailure as error:
        if error.code == _UNAUTHORIZED and not exists(collection):
            raise
        if error.code not in (_EXISTS, _UNAUTHORIZED) or stays_open(collection) is None:
            raise
        if resize:
            database.command("collMod", name, cappedSize=size)


def exists(collection: Collection[Document]) -> bool:
    """Return whether the collection exists. The user needs any right on it."""
    mine = {"name": collection.name}
    return bool(collection.database.list_collection_names(filter=mine, authorizedCollections=True))


def stays_open(collection: Collection[Document]) -> bool | None:
    """Return whether a cursor stays open at the end of the collection. False if the collection is empty or missing.

    Return None if the server refuses the cursor. The collection is then not capped, or may not be read. The user needs
    the right find.
    """
    try:
        with collection.find({"_id": None}, cursor_type=CursorType.TAILABLE) as cursor:
            next(cursor, None)
            return cursor.alive
    except OperationFailure:
        return None
