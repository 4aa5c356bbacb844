"""What the database has beside documents: the indexes of the locks collection and of what apps keep beside it, and
collections of a fixed size, in which new documents push out the oldest."""

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

#: How often to look whether something is still there, in seconds.
LOOK_EVERY: Final = 60.0
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

#: Error codes of MongoDB.
_EXISTS, _UNAUTHORIZED = 48, 13


def ensure_indexes(collection: Collection[Document]) -> None:
    """Create the indexes that are missing. Needs the right createIndex."""
    collection.create_indexes(list(INDEXES.values()))


def missing_indexes(collection: Collection[Document]) -> list[str]:
    """Return the names of the missing indexes."""
    return sorted(set(INDEXES) - set(collection.index_information()))


class IndexKeeper:
    """Makes the indexes again after the collection was dropped or restored, where the user has the right to.

    looked: when they were looked for last, by the local clock. At first they are there: `migrate` has made them.
    """

    def __init__(self) -> None:
        self.looked = clock.now()

    def see_to(self, collection: Collection[Document]) -> None:
        """Have missing indexes made, in the background, once in a minute at most: a document of *collection* is new."""
        if clock.now() - self.looked >= LOOK_EVERY:
            self.looked = clock.now()
            thread = threading.Thread(target=_make_missing, args=[collection], name="mongolock-indexes", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started: the lock was granted all the same
                thread.start()


def _make_missing(collection: Collection[Document]) -> None:
    with contextlib.suppress(PyMongoError), pymongo.timeout(LOOK_EVERY):
        if missing_indexes(collection):
            ensure_indexes(collection)


def make_capped(collection: Collection[Document], size: int, *, resize: bool = False) -> None:
    """Make the collection of *size* bytes, if it is missing. resize: if it is not missing, give it that size.

    Raises OperationFailure if it is missing and may not be made, or has no limit to its size: then it would grow for
    ever.
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
    """Return whether the collection exists. Needs no right but one to something in it."""
    mine = {"name": collection.name}
    return bool(collection.database.list_collection_names(filter=mine, authorizedCollections=True))


def stays_open(collection: Collection[Document]) -> bool | None:
    """Return whether a cursor stays open at the end of the collection: not if it is empty, or not there; None if the
    server refuses it: the collection is not capped, or may not be read. Needs no right but find."""
    try:
        with collection.find({"_id": None}, cursor_type=CursorType.TAILABLE) as cursor:
            next(cursor, None)
            return cursor.alive
    except OperationFailure:
        return None
