"""What each database says when a transaction, or a single command, has to be tried again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.db import DatabaseError, connections
from pymongo.errors import PyMongoError

from ..engine.lock.transaction import TRANSIENT

#: Another transaction changed what this one has read. PostgreSQL (serialization failure); MariaDB (record has changed
#: since last read); MongoDB (WriteConflict); SQLite in WAL mode.
OVERTAKEN: Final = frozenset({"40001", 1020, 112, "SQLITE_BUSY_SNAPSHOT"})
#: Besides, two transactions waited for each other, or one of them too long. PostgreSQL (deadlock); MySQL and MariaDB
#: (lock wait timeout, deadlock); SQLite (another connection writes, or recovers the file after a crash).
PASSING: Final = OVERTAKEN | {"40P01", 1205, 1213, "SQLITE_BUSY", "SQLITE_BUSY_RECOVERY", "SQLITE_LOCKED_SHAREDCACHE"}


def is_overtaken(error: BaseException) -> bool:
    """Return whether the database found that another transaction was faster."""
    return not OVERTAKEN.isdisjoint(_codes(error))


def is_passing(error: BaseException) -> bool:
    """Return whether the database asks to try again: nothing of the command, or of its transaction, was kept."""
    if any(isinstance(each, PyMongoError) and each.has_error_label(TRANSIENT) for each in _chain(error)):
        return True
    return not PASSING.isdisjoint(_codes(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error of Django or of the driver, and the driver's that Django raised its own from."""
    if isinstance(error, (DatabaseError, PyMongoError)):
        yield error
        if error.__cause__ is not None:
            yield error.__cause__


def _codes(error: BaseException) -> Iterator[Any]:
    """Yield what the drivers of PostgreSQL, SQLite, MongoDB and MySQL call the error."""
    for each in _chain(error):
        yield from (getattr(each, name, None) for name in ("sqlstate", "pgcode", "sqlite_errorname", "code"))
        yield from (argument for argument in each.args[:1] if isinstance(argument, int))


def end_failed_commits() -> None:
    """Let the connections of this thread begin new transactions on MongoDB.

    If a commit fails, django-mongodb-backend keeps the session, and the next `atomic()` would begin no transaction.
    """
    for connection in connections.all(initialized_only=True):
        if getattr(connection, "session", None) is not None and not getattr(connection, "in_atomic_block_mongo", True):
            connection._end_session()  # type: ignore[attr-defined]
