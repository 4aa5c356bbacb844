"""The locks that a run is about: ours, and two others to compare with, all behind the same few words."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final, Protocol

from pymongo import MongoClient
from pymongo.errors import DuplicateKeyError, PyMongoError
from redis import Redis
from redis.exceptions import LockError as RedisLockError
from redis.exceptions import RedisError

from django_mongolock.engine.document import Mode, Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.per_process import Sessions
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError, LockLost
from verify.faults.documents import STALE, Documents, OurDocument
from verify.faults.records import now

DATABASE: Final = "faults"
COLLECTION: Final = "mongolock_locks"
#: What the clients of the workers call themselves: failpoints aim at it.
APPNAME: Final = "faults-worker"
#: How much longer the server lets a lease live than its holder believes, in seconds.
MARGIN: Final = 0.3
#: The bound on one command, in seconds. Longer than most leases here: only so can an answer come after the lease that
#: it grants.
TIMEOUT: Final = 4.0


class Refused(Exception):
    """The lock was not to be had."""


class Lost(Exception):
    """The lock was given back, and had been somebody else's before, or nobody's."""


class Unknown(Exception):
    """The lock's server did not answer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt: what to ask for, and what to do with it. Times are in seconds.

    document: is it a document that is asked for? work: how long to hold it. manner: how the program ends it: "release",
    "extend" in the middle, "die" (its thread ends), "forget" (its object is collected), "cancel", "fail" (its block
    ends in an error), "fork" in the middle.
    """

    keys: tuple[str, ...]
    mode: Mode = "exclusive"
    capacity: int = 1
    wait: float | None = 5.0
    lease: float = 1.5
    waiter_lease: float = 1.5
    min_hold: float = 0.0
    owner: str | None = None
    renew: bool = True
    reentrant: bool = False
    work: float = 0.1
    manner: str = "release"
    document: bool = False
    weight: int = 1

    @property
    def terms(self) -> Terms:
        waiter_lease = min(self.waiter_lease, self.lease)
        terms = Terms(self.mode, self.capacity, self.lease, MARGIN, waiter_lease, self.min_hold, self.owner)
        return replace(terms, weight=self.weight)

    def facts(self) -> dict[str, Any]:
        """What the checker needs to know of it."""
        server_lease = STALE if self.document else max(self.terms.server_lease, self.min_hold)
        names = ("keys", "mode", "capacity", "weight", "wait", "owner", "renew")
        kind = "document" if self.document else "lock"
        return {name: getattr(self, name) for name in names} | {"server_lease": server_lease, "kind": kind}


class Lock(Protocol):
    """One acquisition, as the workers use it. They catch `Refused`, `Lost` and `Unknown`, and whatever else comes."""

    def acquire(self) -> object: ...
    def release(self) -> bool: ...
    def look(self) -> tuple[bool, float]: ...
    def extend(self) -> None: ...
    @property
    def tokens(self) -> Mapping[str, int | None]: ...


class Site(Protocol):
    """What one process needs to make locks of a kind.

    kinds: the workers that can use it. whole: does it have modes, owners, fencing tokens, callbacks, fairness?
    """

    kinds: ClassVar[tuple[str, ...]]
    whole: ClassVar[bool]

    def __init__(self, uri: str) -> None: ...

    def lock(self, plan: Plan, on_lost: Callable[[], None]) -> Lock: ...
    def close(self) -> None: ...


class Ours:
    """django_mongolock's engine, without Django."""

    kinds: ClassVar[tuple[str, ...]] = ("sync", "async", "threads", "prefork", "janitor")
    whole: ClassVar[bool] = True

    def __init__(self, uri: str) -> None:
        client = {"host": uri, "appname": APPNAME, "heartbeatFrequencyMS": 1000}
        self.config = StoreConfig(client, DATABASE, COLLECTION)
        self.sessions = Sessions(lambda: Session(MongoStore(self.config), command_timeout=TIMEOUT))
        self.documents = Documents(DATABASE, client, TIMEOUT)

    def lock(self, plan: Plan, on_lost: Callable[[], None]) -> "OurLock | OurDocument":
        if plan.document:
            return OurDocument(self.documents, plan.keys[0], plan.owner)
        options = Options(
            plan.terms, plan.wait, reentrant=plan.reentrant, auto_renew=plan.renew, on_lost=lambda _: on_lost()
        )
        return OurLock(self.sessions.current, plan.keys, options, lambda: {"pid": os.getpid()})

    def close(self) -> None:
        self.sessions.close()


class OurLock(MongoLock):
    """A MongoLock that can be looked at in the harness' words."""

    def look(self) -> tuple[bool, float]:
        return self.held, self.remaining

    @property
    def tokens(self) -> Mapping[str, int | None]:
        return self.fencing_tokens

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the block, as `with` does."""
        self.__exit__(type(error) if error else None, error, None)


class Leased:
    """What the two peers have in common: a lease that the program counts itself, from before it asked."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.key = plan.keys[0]
        self._until = 0.0

    def look(self) -> tuple[bool, float]:
        left = self._until - now()
        return left > 0, max(0.0, left)

    @property
    def tokens(self) -> Mapping[str, int | None]:
        return {self.key: None}

    def acquire(self) -> None:
        end = float("inf") if self.plan.wait is None else now() + self.plan.wait
        while True:
            before = now()
            if self.take():
                self._until = before + self.plan.lease
                return
            if now() >= end:
                raise Refused
            time.sleep(0.05)

    def extend(self) -> None:
        before = now()
        self.prolong()
        self._until = before + self.plan.lease

    def take(self) -> bool:
        """Try once."""
        raise NotImplementedError

    def prolong(self) -> None:
        """Begin the lease anew. Raises Lost."""
        raise NotImplementedError


class RedisSite:
    """redis-py's Lock on one Redis."""

    kinds: ClassVar[tuple[str, ...]] = ("sync", "threads", "prefork")
    whole: ClassVar[bool] = False

    def __init__(self, uri: str) -> None:
        self._connect = partial(Redis.from_url, uri, socket_timeout=TIMEOUT)
        self._local = threading.local()

    def lock(self, plan: Plan, on_lost: Callable[[], None]) -> "RedisLock":
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid, self._local.client = os.getpid(), self._connect()
        return RedisLock(plan, self._local.client)

    def close(self) -> None:
        pass


class RedisLock(Leased):
    """redis-py's Lock, with its `timeout`."""

    def __init__(self, plan: Plan, client: Any) -> None:
        super().__init__(plan)
        self._lock = client.lock(self.key, timeout=plan.lease, blocking=False)

    def take(self) -> bool:
        try:
            return bool(self._lock.acquire())
        except RedisError as error:
            raise Unknown from error

    def prolong(self) -> None:
        try:
            self._lock.reacquire()
        except RedisLockError as error:
            self._until = 0.0
            raise Lost from error
        except RedisError as error:
            raise Unknown from error

    def release(self) -> bool:
        try:
            self._lock.release()
        except RedisLockError:
            return False
        except RedisError as error:
            raise Unknown from error
        return True


class ShedLockSite:
    """ShedLock's MongoLockProvider, written out: `lockUntil` by the clock of the client."""

    kinds: ClassVar[tuple[str, ...]] = ("sync", "threads", "prefork")
    whole: ClassVar[bool] = False

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._pid = 0
        self._client: MongoClient[dict[str, Any]]

    def lock(self, plan: Plan, on_lost: Callable[[], None]) -> "ShedLock":
        if self._pid != os.getpid():
            self._client = MongoClient(self._uri, appname=APPNAME, timeoutMS=round(TIMEOUT * 1000))
            self._pid = os.getpid()
        return ShedLock(plan, self._client[DATABASE]["shedLock"])

    def close(self) -> None:
        pass


class ShedLock(Leased):
    """One document: {_id, lockUntil, lockedAt, lockedBy}. It is free when `lockUntil` is over."""

    def __init__(self, plan: Plan, collection: Any) -> None:
        super().__init__(plan)
        self._collection = collection
        self._me = uuid.uuid4().hex

    def _update(self, where: dict[str, Any], until: datetime, **options: Any) -> bool:
        change = {"$set": {"lockUntil": until, "lockedAt": _wall(), "lockedBy": self._me}}
        try:
            return self._collection.find_one_and_update({"_id": self.key, **where}, change, **options) is not None
        except DuplicateKeyError:
            return False
        except PyMongoError as error:
            raise Unknown from error

    def take(self) -> bool:
        until = _wall() + timedelta(seconds=self.plan.lease)
        return self._update({"lockUntil": {"$lte": _wall()}}, until, upsert=True, return_document=True)

    def prolong(self) -> None:
        until = _wall() + timedelta(seconds=self.plan.lease)
        if not self._update({"lockUntil": {"$gt": _wall()}, "lockedBy": self._me}, until):
            self._until = 0.0
            raise Lost

    def release(self) -> bool:
        # As ShedLock does: whose it is now is not asked.
        return self._update({}, _wall())


def _wall() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)


SITES: Final[dict[str, type[Site]]] = {"mongolock": Ours, "redis": RedisSite, "shedlock": ShedLockSite}
#: What a worker may meet that is no fault of its own.
ERRORS: Final = (LockError, Refused, Lost, Unknown)
LOSSES: Final = (LockLost, Lost)
