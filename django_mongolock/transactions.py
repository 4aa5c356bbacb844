"""Locks and the transactions of Django's databases. A lock that is released before the commit protects nothing.

`release="on_commit"` releases a lock when the outermost ``atomic`` block has ended, by commit or rollback.
``transaction.on_commit`` does not help, because the rollback of a savepoint drops its functions, and there is no hook
for a rollback. For that reason a pending release watches the methods by which a connection ends a transaction.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from .engine.lock.lock import MongoLock
from .engine.lock.transaction import Atomic, kept_in_mongodb
from .exceptions import LockError, LockLost, LockMisused

logger = logging.getLogger("django_mongolock")

#: The methods that end a transaction, or the outermost block of the code under test in a test's own transaction.
_ENDS: Final = ("commit", "rollback", "close", "set_autocommit", "savepoint_commit", "savepoint_rollback")
#: The same for django_mongodb_backend.transaction.atomic.
_MONGO_ENDS: Final = ("commit_mongo", "rollback_mongo")

#: The lines of code whose lock was released inside a transaction. Each is reported once.
_reported: set[str] = set()


def open_transactions() -> list[BaseDatabaseWrapper]:
    """Return the connections of this thread with an open transaction. The transaction of a test case does not count."""
    return [connection for connection in connections.all(initialized_only=True) if _is_open(connection)]


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    if connection.vendor == "mongodb":  # Django's own atomic() does nothing there
        return bool(getattr(connection, "in_atomic_block_mongo", False))
    if connection.connection is None or connection.closed_in_transaction:
        return False
    return bool(_blocks(connection)) or not (connection.autocommit or connection.in_atomic_block)


def _blocks(connection: BaseDatabaseWrapper) -> list[Any]:
    """Return the open ``atomic`` blocks whose end can be observed."""
    blocks = connection.atomic_blocks
    mine = [number for number, block in enumerate(blocks) if not getattr(block, "_from_testcase", False)]
    if not mine:
        return []
    savepoint = mine[0] - len(blocks) + len(connection.savepoint_ids)
    if mine[0] > 0 and connection.savepoint_ids[savepoint] is None:
        return []  # inside a test's block without a savepoint, and its end cannot be seen
    return [blocks[number] for number in mine]


class PendingRelease:
    """The release of a lock that waits for all transactions that were open when the block of the lock ended.

    - ensure_held: function that raises LockLost if the lock was lost meanwhile.
    """

    def __init__(self, release: Callable[[], object], ensure_held: Callable[[], None]) -> None:
        self.release = release
        self.ensure_held = ensure_held
        self.waits_for: set[int] = set()

    def wait(self, opened: list[BaseDatabaseWrapper]) -> None:
        """Wait for the ends of these transactions."""
        self.waits_for = {id(connection) for connection in opened}
        for connection in opened:
            _Watch.on(connection).pending.append(self)

    def ended(self, connection: BaseDatabaseWrapper) -> None:
        self.waits_for.discard(id(connection))
        if not self.waits_for:
            try:
                self.release()
            except LockError:  # the transaction has ended anyway, and the lease will end
                logger.exception("lock not released after a transaction")


class _Watch:
    """The watch on one connection until its transaction has ended, for the pending releases."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.pending: list[PendingRelease] = []
        self._put: dict[str, Callable[..., Any]] = {}
        for name in _MONGO_ENDS if connection.vendor == "mongodb" else _ENDS:
            self._put[name] = partial(self._call, name, getattr(connection, name))
            setattr(connection, name, self._put[name])
        connection._mongolock_watch = self  # type: ignore[attr-defined]

    @classmethod
    def on(cls, connection: BaseDatabaseWrapper) -> _Watch:
        found = getattr(connection, "_mongolock_watch", None)
        return found if isinstance(found, cls) else cls(connection)

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in ("commit", "commit_mongo"):
            self._refuse_if_lost()
        try:
            result = method(*args, **kwargs)
        except BaseException:
            if name == "close":
                self._end()
            raise
        if name == "close" or self._has_ended(name):
            self._end()
        return result

    def _has_ended(self, name: str) -> bool:
        connection = self.connection
        if name in _MONGO_ENDS:
            return not connection.in_atomic_block_mongo  # type: ignore[attr-defined]
        if name in ("commit", "rollback"):
            return True  # because Django refuses them inside a block
        # A savepoint ends the transaction only if the block around it is that of a test.
        return not _is_open(connection) and (name == "set_autocommit" or bool(connection.atomic_blocks))

    def _refuse_if_lost(self) -> None:
        """Roll back instead of committing if a lock was lost. The work may overlap with that of the next holder."""
        try:
            for release in self.pending:
                release.ensure_held()
        except LockLost:
            mongo = self.connection.vendor == "mongodb"
            (self.connection.rollback_mongo if mongo else self.connection.rollback)()  # type: ignore[attr-defined]
            raise

    def _end(self) -> None:
        for name, put in self._put.items():
            if self.connection.__dict__.get(name) is put:
                delattr(self.connection, name)
        del self.connection._mongolock_watch  # type: ignore[attr-defined]
        pending, self.pending = self.pending, []
        for release in pending:
            release.ended(self.connection)


def warn_of_open(opened: list[BaseDatabaseWrapper], key: str, place: str) -> None:
    """Warn that a lock was released inside a transaction, once for each *place* that takes a lock."""
    warn_once(
        place,
        f"the lock {key!r} was released inside the transaction that is open on {opened[0].alias!r}: the next holder "
        'does not yet see what was written under it. Give release="on_commit", open the transaction inside the lock, '
        'or give release="now" to silence this warning',
    )


def warn_once(place: str, text: str) -> None:
    """Warn of the line of code *place*, unless it was reported before.

    Call this after the release. If warnings are errors, this raises one, except while another error is being handled.
    """
    file, _, line = place.rpartition(":")
    if place in _reported or not line.isdigit():
        return
    _reported.add(place)
    try:
        warnings.warn_explicit(text, RuntimeWarning, file, int(line))
    except RuntimeWarning as warning:
        if warning.__context__ is None:
            raise


@contextmanager
def mongo_atomic(using: str) -> Iterator[None]:
    """Open a transaction of MongoDB on the alias, even inside Django's own ``atomic``.

    Django's ``atomic`` does nothing on MongoDB. But inside of it, after the commit, the backend would raise an error
    instead of running the functions given to ``on_commit``.
    """
    from django_mongodb_backend import transaction

    changed = vars(connections[using])
    try:
        with transaction.atomic(using=using):
            yield
            changed["validate_no_atomic_block"] = lambda: None
    finally:
        changed.pop("validate_no_atomic_block", None)


class DjangoAtomic(Atomic[ClientSession]):
    """See engine.lock.transaction.Atomic. In a blocking block, the ORM on the alias is part of the transaction."""

    def __init__(self, lock: MongoLock, alias: str) -> None:
        kept_in_mongodb(lock)
        if connections[alias].vendor != "mongodb":
            raise ImproperlyConfigured(
                f"the DATABASES alias {alias!r} is not MongoDB, so it shares no transaction with the lock: write there "
                'with fenced_update(), or in its own transaction under a lock with release="on_commit"'
            )
        self._lock = lock
        self._alias = alias
        self._client_session = None
        self._grants = ()

    def __enter__(self) -> ClientSession:
        connection: Any = connections[self._alias]
        if connection.in_atomic_block_mongo:
            raise LockMisused(
                f"a transaction is open on {self._alias!r} already and would be committed without checking the lock: "
                "open lock.atomic() outside of it"
            )
        self._client = self._find_client()
        session = super().__enter__()
        # The backend makes a session only if there is none. The ORM therefore uses this one.
        connection.session = session
        self._block = mongo_atomic(self._alias)
        self._block.__enter__()
        return session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        connection: Any = connections[self._alias]
        try:
            super().__exit__(kind, error, traceback)
        except BaseException as failure:
            connection.session = None
            self._block.__exit__(type(failure), failure, failure.__traceback__)
            raise
        # This leaves the backend its flags, and the functions given to transaction.on_commit().
        connection.session = None
        self._block.__exit__(kind, error, traceback)
        return False

    async def __aenter__(self) -> ClientSession:
        self._client = await sync_to_async(self._find_client)()
        return await super().__aenter__()

    def _find_client(self) -> MongoClient[Any]:
        connection: Any = connections[self._alias]
        connection.ensure_connection()
        client: MongoClient[Any] = connection.connection
        return client
