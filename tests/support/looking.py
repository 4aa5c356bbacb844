"""Common parts of the tests of the Django layer, such as new keys, another holder, and stored documents."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from django.dispatch import Signal

from django_mongolock import LockNotAcquired, mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.engine.lock.lock import MongoLock


def new_key(kind: str = "test") -> str:
    """Return a key that nobody else uses."""
    return f"{kind}:{uuid.uuid4().hex}"


def document(key: str, using: str | None = None) -> dict[str, Any]:
    """Return the stored document of *key*, or an empty one."""
    return mongo_store(using).latest.find_one({"_id": {"$eq": key}}) or {}


def holders(key: str, using: str | None = None) -> list[dict[str, Any]]:
    """Return the stored holders of *key*."""
    found: list[dict[str, Any]] = document(key, using).get("holders", [])
    return found


def holder(key: str) -> dict[str, Any]:
    """Return the only holder of *key*."""
    (found,) = holders(key)
    return found


@contextmanager
def heard(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """Record the arguments for a receiver of *signal* within the block."""
    told: list[dict[str, Any]] = []

    def note(**facts: Any) -> None:
        told.append(facts)

    signal.connect(note)
    try:
        yield told
    finally:
        signal.disconnect(note)


@contextmanager
def in_another_thread(lock: MongoLock) -> Iterator[MongoLock]:
    """Hold *lock* in another thread, as contention instead of reentry. LockNotAcquired is raised if it is refused."""
    ready, done = threading.Event(), threading.Event()
    errors: list[LockNotAcquired] = []

    def hold() -> None:
        try:
            with lock:
                ready.set()
                done.wait(30)
        except LockNotAcquired as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=hold, name="somebody-else")
    thread.start()
    try:
        assert ready.wait(10), "the other thread did not get the lock"
        if errors:
            raise errors.pop()
        yield lock
    finally:
        done.set()
        thread.join()


def held_elsewhere(*keys: Any, **options: Any) -> AbstractContextManager[MongoLock]:
    """Another thread holds *keys*."""
    return in_another_thread(mongo_lock(*keys, **options))
