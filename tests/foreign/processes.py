"""Another process on the backend of the test."""

from __future__ import annotations

from django_mongolock import mongo_lock
from django_mongolock.backends.base import get_backend
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session

_sessions: list[Session] = []


def lock_elsewhere(key: str) -> MongoLock:
    """A lock of a session of its own, which is what a process is to the others."""
    session = get_backend().new_session()
    _sessions.append(session)
    made = mongo_lock(key)
    return MongoLock(lambda: session, made.keys, made.options, dict)


def close_all() -> None:
    while _sessions:
        _sessions.pop().close()
