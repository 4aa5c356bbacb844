"""The compared locks behind a common interface. Ours are in `ours`, recipes in `recipes`."""

import importlib
import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from django.db import connections
from pymongo import MongoClient

from django_mongolock.engine import clock

DATABASE: Final = "mongolock_benchmarks"
#: The seconds for which a lock outlives its holder, where that can be set.
LEASE: Final = 30


class Peer:
    """A way to lock, in one process.

    Subclasses have `acquire`, without a limit of the wait, and `release`.

    - uri: address of its server.
    - lease: seconds that a lock outlives its holder.
    """

    package: str = ""  # whose version the report names
    needs: str = "mongo"  # the server; see `bench.world`
    waits: str = "polls every 100 ms"  # how it learns that the lock is free

    def __init__(self, uri: str, lease: float = LEASE) -> None:
        self.uri = uri
        self.lease = lease
        self.open()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def acquire(self, key: str) -> None:
        raise NotImplementedError

    def release(self, key: str) -> None:
        raise NotImplementedError

    def pairs(self, keys: list[str]) -> list[float]:
        """Return the seconds of each acquire and release, of these keys after one another."""
        return [timed(self, key) for key in keys]

    @classmethod
    def missing(cls) -> str | None:
        """Return the reason why it cannot run here, or None."""
        if not cls.package:
            return None
        try:
            version(cls.package)
        except PackageNotFoundError:
            return f"{cls.package} is not installed"
        return None


def timed(peer: Peer, key: str) -> float:
    before = clock.now()
    peer.acquire(key)
    peer.release(key)
    return clock.now() - before


class Made(Peer):
    """A peer that makes a lock object for each acquisition."""

    def __init__(self, uri: str, lease: float = LEASE) -> None:
        self._locks: dict[str, Any] = {}
        super().__init__(uri, lease)

    def make(self, key: str) -> Any:
        raise NotImplementedError

    def acquire(self, key: str) -> None:
        lock = self._locks[key] = self.make(key)
        if lock.acquire() is False:
            raise RuntimeError("not acquired")

    def release(self, key: str) -> None:
        self._locks.pop(key).release()


class RedisPy(Made):
    """The lock of redis-py: SET NX PX, and a script that compares and deletes."""

    package = "redis"
    needs = "redis"

    def open(self) -> None:
        self._client: Any = load("redis").Redis.from_url(self.uri)

    def make(self, key: str) -> Any:
        return self._client.lock(key, timeout=self.lease)


class RedisPyDurable(RedisPy):
    needs = "redis-always"


class PythonRedisLock(RedisPy):
    """python-redis-lock: SET NX EX, with a list (BLPOP) that wakes waiters."""

    package = "python-redis-lock"
    waits = "woken (BLPOP)"

    def make(self, key: str) -> Any:
        return load("redis_lock").Lock(self._client, key, expire=int(self.lease))


class PythonRedisLockDurable(PythonRedisLock):
    needs = "redis-always"


class Kazoo(Made):
    """The lock recipe of kazoo, an ephemeral sequential node with a watch on the one before it."""

    package = "kazoo"
    needs = "zookeeper"
    waits = "woken (watch)"

    def open(self) -> None:
        self._client: Any = load("kazoo.client").KazooClient(hosts=self.uri, timeout=4.0)
        self._client.start()

    def close(self) -> None:
        self._client.stop()
        self._client.close()

    def make(self, key: str) -> Any:
        return self._client.Lock(f"/locks/{key}", str(os.getpid()))


class PgLock(Made):
    """Session-level advisory locks of PostgreSQL through django-pglock."""

    package = "django-pglock"
    needs = "postgres"
    waits = "woken (by PostgreSQL)"

    @classmethod
    def missing(cls) -> str | None:
        missing = super().missing()
        return missing or (None if importlib.util.find_spec("psycopg") else "psycopg is not installed")

    def open(self) -> None:
        import environ

        made: dict[str, Any] = environ.Env.db_url_config(self.uri)
        connections.settings["postgres"] = connections.configure_settings({"default": {}, "postgres": made})["postgres"]

    def close(self) -> None:
        connections["postgres"].close()

    def make(self, key: str) -> Any:
        return load("pglock").advisory(key, using="postgres")


class FileLock(Made):
    """filelock with flock(2), for the processes of one machine."""

    package = "filelock"
    needs = "directory"
    waits = "polls every 50 ms"

    def make(self, key: str) -> Any:
        return load("filelock").FileLock(Path(self.uri, f"{key.replace('/', '_')}.lock"))


class MongoElector(Peer):
    """The lock of mongoelector. To acquire is an insert, with a find and 250 ms of sleep after a failure. To release is
    a delete."""

    package = "mongoelector"
    waits = "polls every 250 ms"

    def open(self) -> None:
        self._client: MongoClient[dict[str, Any]] = MongoClient(self.uri)
        self._made: dict[str, Any] = {}

    def close(self) -> None:
        self._client.close()

    def acquire(self, key: str) -> None:
        if key not in self._made:  # each asks for its index, so it is used again
            self._made[key] = load("mongoelector").MongoLocker(key, self._client[DATABASE], ttl=self.lease)
        self._made[key].acquire()

    def release(self, key: str) -> None:
        self._made[key].release()


def load(name: str) -> Any:
    """Import a package that only a benchmark needs. Some of these are not typed."""
    return importlib.import_module(name)
