"""Locks as projects write them for themselves, in a few lines of PyMongo, and the minimum that a lock has to send.

No recipe renews a lease, so too short a lease gives two holders. No recipe shows the waiters. The next poller gets the
lock, not the first arrival. The recipes are shown as found, with majority writes.
"""

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.errors import DuplicateKeyError

from bench.peers import DATABASE, Peer


class Recipe(Peer):
    """The common base of the recipes.

    - uri: address of a MongoDB.
    """

    collection: str
    package = "pymongo"

    def open(self) -> None:
        self._client: MongoClient[dict[str, Any]] = MongoClient(self.uri)
        majority = WriteConcern(w="majority")
        self._locks = self._client[DATABASE].get_collection(self.collection, write_concern=majority)
        self._me = random.getrandbits(63)

    def close(self) -> None:
        self._client.close()

    def acquire(self, key: str) -> None:
        while not self.attempt(key):
            time.sleep(self.pause())

    def attempt(self, key: str) -> bool:
        raise NotImplementedError

    def pause(self) -> float:
        return 0.1

    def ends(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.lease)


class InsertDelete(Recipe):
    """A document as the lock. To acquire is to insert it, and to release is to delete it. A TTL index removes abandoned
    documents."""

    collection = "recipe_insert"

    def open(self) -> None:
        super().open()
        self._locks.create_index("until", expireAfterSeconds=0)

    def attempt(self, key: str) -> bool:
        try:
            self._locks.insert_one({"_id": key, "aid": self._me, "until": self.ends()})
        except DuplicateKeyError:
            return False
        return True

    def release(self, key: str) -> None:
        self._locks.delete_one({"_id": key, "aid": self._me})


class Upsert(InsertDelete):
    """An upsert with $setOnInsert. The lock is taken if the upsert changed nothing. A TTL index works as above."""

    collection = "recipe_upsert"

    def attempt(self, key: str) -> bool:
        mine = {"aid": self._me, "until": self.ends()}
        return self._locks.update_one({"_id": key}, {"$setOnInsert": mine}, upsert=True).upserted_id is not None


class Lease(Recipe):
    """A lease that the server's clock ends, taken by an upsert, with a backoff with jitter between the attempts."""

    collection = "recipe_lease"
    waits = "polls every 25–100 ms"

    def attempt(self, key: str) -> bool:
        free = {"_id": key, "$expr": {"$lte": ["$until", "$$NOW"]}}
        mine = {"until": {"$add": ["$$NOW", int(self.lease * 1000)]}, "aid": {"$literal": self._me}}
        if self._locks.update_one(free, [{"$set": mine}]).modified_count:
            return True
        try:
            self._locks.insert_one({"_id": key, "aid": self._me, "until": self.ends()})
        except DuplicateKeyError:
            return False
        return True

    def pause(self) -> float:
        return random.uniform(0.025, 0.1)

    def release(self, key: str) -> None:
        self._locks.update_one({"_id": key, "aid": self._me}, [{"$set": {"until": "$$NOW"}}])


class LockedBy(Recipe):
    """A field of the business document as the lock. Only its holder, or a person, ends it."""

    collection = "recipe_locked_by"

    def attempt(self, key: str) -> bool:
        free = {"_id": key, "lockedBy": None}
        if self._locks.update_one(free, {"$set": {"lockedBy": self._me}}).modified_count:
            return True
        try:
            self._locks.insert_one({"_id": key, "lockedBy": self._me})  # the document is there in earnest
        except DuplicateKeyError:
            return False
        return True

    def release(self, key: str) -> None:
        self._locks.update_one({"_id": key, "lockedBy": self._me}, {"$set": {"lockedBy": None}})


class BareWrites(Recipe):
    """Two majority writes of a small existing document, the minimum that a durable lock has to send.

    This is no lock.
    """

    collection = "bare"
    waits = ""

    def acquire(self, key: str) -> None:
        self._locks.update_one({"_id": key}, {"$inc": {"n": 1}}, upsert=True)

    release = acquire
