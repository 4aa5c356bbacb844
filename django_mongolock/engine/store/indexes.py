"""The indexes of the locks collection, and those of what apps keep beside it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import pymongo
from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from .. import clock
from .bells import LOOK_EVERY

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


class IndexKeeper:
    """Makes the indexes again after the collection was dropped or restored, where the user has the right to.

    looked: when they were looked for last, by the local clock. At first they are there: `migrate` has made them.
    """

    def __init__(self) -> None:
        self.looked = clock.now()

    def see_to(self, collection: Collection[dict[str, Any]]) -> None:
        """Have missing indexes made, in the background, once in a minute at most: a document of *collection* is new."""
        if clock.now() - self.looked >= LOOK_EVERY:
            self.looked = clock.now()
            threading.Thread(target=_make_missing, args=[collection], name="mongolock-indexes", daemon=True).start()


def _make_missing(collection: Collection[dict[str, Any]]) -> None:
    with contextlib.suppress(PyMongoError), pymongo.timeout(LOOK_EVERY):
        if missing := missing_indexes(collection):
            ensure_indexes(collection, missing)
