"""Other processes on the backend of the test, and what is stored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django_mongolock import mongo_lock, mongo_semaphore
from django_mongolock.backends.base import get_backend, mongo_store
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session
from django_mongolock.testing.memory import MemoryLockBackend
from tests.support import looking

_sessions: list[Session] = []


class Process:
    """A session of its own, which is what a process is to the others."""

    def __init__(self, label: str = "") -> None:
        self.session = get_backend().new_session()
        self.label = label
        _sessions.append(self.session)

    def lock(self, key: str, *, permits: int | None = None, **options: Any) -> MongoLock:
        """A lock of that process; with permits, a semaphore."""
        made = mongo_lock(key, **options) if permits is None else mongo_semaphore(key, permits, **options)
        return MongoLock(lambda: self.session, made.keys, made.options, lambda: {"label": self.label})

    def close(self) -> None:
        self.session.close()


def close_all() -> None:
    while _sessions:
        _sessions.pop().close()


def document(key: str) -> dict[str, Any]:
    """The lock document of *key*; an empty one if there is none."""
    backend = get_backend()
    return backend.server.documents.get(key, {}) if isinstance(backend, MemoryLockBackend) else looking.document(key)


def labels(key: str, *fields: str) -> list[str]:
    """The labels of those who stand in these fields of the document, in order."""
    found = document(key)
    return [entry["label"] for field in fields for entry in found.get(field, [])]


def forget(key: str, processes: Collection[Process]) -> None:
    """Remove all that these processes have in the document of *key*, as if their leases had ended."""
    ids = [process.session.id for process in processes]
    backend = get_backend()
    if isinstance(backend, MemoryLockBackend):
        found = backend.server.documents[key]
        for field in ("holders", "waiters"):
            found[field] = [entry for entry in found[field] if entry["session"] not in ids]
    else:
        theirs = {"session": {"$in": ids}}
        mongo_store().collection.update_one({"_id": {"$eq": key}}, {"$pull": {"holders": theirs, "waiters": theirs}})
