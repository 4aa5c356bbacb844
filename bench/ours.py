"""This library among the peers, as a project uses it, and in its variants."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from django.db import connections
from pymongo.errors import OperationFailure

from bench.peers import DATABASE, Peer
from django_mongolock import mongo_lock
from django_mongolock.backends import close_backends, mongo_store
from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.store.layout import ensure_indexes
from django_mongolock.engine.store.mongo import MongoStore

#: The alias of `testproject.settings` that keeps the locks.
ALIAS: Final = "mongo"


class Ours(Peer):
    """`mongo_lock`, as a project uses it."""

    package = "django-mongolock"
    waits = "woken (bell)"

    def open(self) -> None:
        connections.settings[ALIAS].update(HOST=self.uri, NAME=DATABASE)
        self._held: dict[str, MongoLock] = {}
        ensure_indexes(mongo_store(ALIAS).collection)

    def close(self) -> None:
        close_backends()

    def make(self, key: str) -> MongoLock:
        return mongo_lock(key, wait=None, lease=self.lease)

    def acquire(self, key: str) -> None:
        self._held[key] = self.make(key).acquire()

    def release(self, key: str) -> None:
        self._held.pop(key).release()


class OursInThread(Ours):
    """The lock outside the main thread, as in a server with threads."""

    def pairs(self, keys: list[str]) -> list[float]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(super().pairs, keys).result()


class OursAsync(Ours):
    """The lock with `async with`."""

    def pairs(self, keys: list[str]) -> list[float]:
        async def one(key: str) -> float:
            before = clock.now()
            async with self.make(key):
                pass
            return clock.now() - before

        async def all_() -> list[float]:
            return [await one(key) for key in keys]

        return asyncio.run(all_())


class OursPolling(Ours):
    """The lock without the right to listen."""

    waits = "reads, one for all waiters"

    def open(self) -> None:
        super().open()
        logging.getLogger("django_mongolock").setLevel(logging.ERROR)  # it warns of things that are meant here
        MongoStore.listen = refuse_to_listen  # type: ignore[method-assign, assignment]


def refuse_to_listen(store: MongoStore, session: str) -> Any:
    raise OperationFailure("not in this measurement", 13)
