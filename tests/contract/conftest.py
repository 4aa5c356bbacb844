"""The same tests on both backends. The meaning of a lock does not depend on its store."""

import time
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from django_mongolock import mongo_lock, mongo_semaphore
from django_mongolock.backends import get_backend, mongo_store
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.testing import override_locks
from tests.support.grants import own


class Elsewhere(Protocol):
    """A lock of another process, on the same backend."""

    def __call__(self, *keys: str, **options: Any) -> MongoLock: ...


class World:
    """A backend, other processes on it, and time."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def new_session(self) -> Session:
        raise NotImplementedError

    def let_pass(self, seconds: float) -> None:
        """Time goes by."""
        raise NotImplementedError

    def elsewhere(self, *keys: str, **options: Any) -> MongoLock:
        """Return a lock of another process, with the calling thread as its worker."""
        session = self.new_session()
        self.sessions.append(session)
        permits = options.pop("permits", None)
        made = mongo_lock(*keys, **options) if permits is None else mongo_semaphore(keys[0], permits, **options)
        return MongoLock(lambda: session, made.keys, made.terms, made.options, lambda: {"host": "elsewhere", "pid": 1})

    def is_queued(self, number: int) -> bool:
        """Return whether that process waits in a queue."""
        grants = [
            grant for session in self.sessions[number : number + 1] for grant in list(session.registry.grants.values())
        ]
        return any(grant.lease.until for grant in grants)

    def kill(self, lock: MongoLock) -> None:
        """Let the process that holds *lock* look killed, so that its lease is not renewed any more."""
        session = own(lock).session
        assert session is not None
        for grant in list(session.registry.grants.values()):
            grant.mark_lost("killed")
            session.ending.forget(grant)

    def take_away(self, lock: MongoLock) -> None:
        """Take *lock* away from its holder, as an operator does. The holder does not learn of it."""
        (session, (grant,)) = (own(lock).session, own(lock).grants)
        assert session is not None
        session.store.apply(lock.key, Step(ask=grant.id, remove=(grant.id,), force=True), 10)

    def let_renew(self, lock: MongoLock) -> None:
        """Make the next renewal of *lock* due."""
        raise NotImplementedError

    def forget(self, key: str) -> None:
        """Remove the document of *key*."""
        raise NotImplementedError

    def close(self) -> None:
        for session in self.sessions:
            session.close()


class MongoWorld(World):
    """A world on a real server, by the real time."""

    def new_session(self) -> Session:
        return Session(MongoStore(mongo_store().config))

    def let_pass(self, seconds: float) -> None:
        time.sleep(seconds)

    def let_renew(self, lock: MongoLock) -> None:
        session = own(lock).session
        assert session is not None
        for grant in own(lock).grants:
            grant.lease.renew_at = 0.0
        session.heartbeat.wake()

    def forget(self, key: str) -> None:
        mongo_store().collection.delete_one({"_id": key})


class MemoryWorld(World):
    """In memory, where time goes by at a word."""

    def new_session(self) -> Session:
        session: Session = self.backend._open(None)
        return session

    def let_pass(self, seconds: float) -> None:
        self.backend.server.advance(seconds)

    def kill(self, lock: MongoLock) -> None:
        session: Any = own(lock).session
        session.die()

    def let_renew(self, lock: MongoLock) -> None:
        self.let_pass(lock.remaining / 2)

    def forget(self, key: str) -> None:
        del self.backend.server.documents[key]

    @property
    def backend(self) -> Any:
        return get_backend()


@pytest.fixture(params=["mongo", "memory"])
def world(request: pytest.FixtureRequest, settings: Any) -> Iterator[World]:
    """Provide each backend in turn."""
    if request.param == "mongo":
        made: World = MongoWorld()
        yield made
        made.close()
    else:
        with override_locks(strict=None):  # some drop a lock
            made = MemoryWorld()
            yield made
            made.close()


@pytest.fixture
def memory() -> Iterator[MemoryWorld]:
    """The backend in memory alone. A test can move its clock to the second."""
    with override_locks():
        made = MemoryWorld()
        yield made
        made.close()


@pytest.fixture
def elsewhere(world: World) -> Elsewhere:
    """Return a function that makes locks of other processes."""
    return world.elsewhere
