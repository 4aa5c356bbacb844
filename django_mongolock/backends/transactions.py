"""Locks and the transactions of Django's databases: a lock given back before the commit protects nothing.

`release="on_commit"` gives a lock back when the outermost ``atomic`` block has ended, by commit or rollback.
``transaction.on_commit`` is no answer to that: a rolled back savepoint drops its functions, and there is no hook for
a rollback. So while a lock waits, the methods by which a connection ends a transaction are watched on that connection.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..exceptions import LockLost

logger = logging.getLogger("django_mongolock")

#: When a lock is given back that is left inside a transaction.
Release = Literal["now", "on_commit"]
RELEASES: Final = ("now", "on_commit")

#: What ends a transaction, or (in tests, which run in one) the outermost block of the code under test.
_ENDS: Final = ("commit", "rollback", "close", "set_autocommit", "savepoint_commit", "savepoint_rollback")
#: The same for django_mongodb_backend.transaction.atomic.
_MONGO_ENDS: Final = ("commit_mongo", "rollback_mongo")

#: Where locks were taken that were released inside a transaction: each place is told once.
_told: set[str] = set()


def open_transactions() -> list[BaseDatabaseWrapper]:
    """The connections of this thread with a transaction that is open. The one around a test does not count."""
    return [connection for connection in connections.all(initialized_only=True) if _is_open(connection)]


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    if connection.vendor == "mongodb":  # Django's own atomic() does nothing there
        return bool(getattr(connection, "in_atomic_block_mongo", False))
    if connection.connection is None or connection.closed_in_transaction:
        return False
    return bool(_blocks(connection)) or not (connection.autocommit or connection.in_atomic_block)


def _blocks(connection: BaseDatabaseWrapper) -> list[Any]:
    """The ``atomic`` blocks that are open and have an end that can be seen."""
    blocks = connection.atomic_blocks
    mine = [number for number, block in enumerate(blocks) if not getattr(block, "_from_testcase", False)]
    if not mine:
        return []
    savepoint = mine[0] - len(blocks) + len(connection.savepoint_ids)
    if mine[0] > 0 and connection.savepoint_ids[savepoint] is None:
        return []  # inside a test's block, and without a savepoint: nothing happens at its end
    return [blocks[number] for number in mine]


class HeldLock:
    """A lock that is given back at the end of every transaction that was open when its block was left.

    give_back: gives it back. ensure_held: raises LockLost if it was lost meanwhile.
    """

    def __init__(self, give_back: Callable[[], object], ensure_held: Callable[[], None]) -> None:
        self.give_back = give_back
        self.ensure_held = ensure_held
        self.waits_for: set[int] = set()

    def wait(self, opened: list[BaseDatabaseWrapper]) -> None:
        """Wait for the ends of those transactions."""
        self.waits_for = {id(connection) for connection in opened}
        for connection in opened:
            _Watch.on(connection).locks.append(self)

    def ended(self, connection: BaseDatabaseWrapper) -> None:
        self.waits_for.discard(id(connection))
        if not self.waits_for:
            try:
                self.give_back()
            except Exception:
                # The transaction has ended, whatever comes; the lease does too.
                logger.exception("lock not released after a transaction")


class _Watch:
    """Watches one connection until its transaction has ended, for the locks that wait for it."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.locks: list[HeldLock] = []
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
            return True  # inside of a block, they would have been refused
        # A savepoint is an end only where the block around it is that of a test.
        return not _is_open(connection) and (name == "set_autocommit" or bool(connection.atomic_blocks))

    def _refuse_if_lost(self) -> None:
        """Roll back instead of a commit if a lock was lost: what was written may overlap with its next holder's."""
        try:
            for lock in self.locks:
                lock.ensure_held()
        except LockLost:
            mongo = self.connection.vendor == "mongodb"
            (self.connection.rollback_mongo if mongo else self.connection.rollback)()  # type: ignore[attr-defined]
            raise

    def _end(self) -> None:
        for name, put in self._put.items():
            if self.connection.__dict__.get(name) is put:
                delattr(self.connection, name)
        del self.connection._mongolock_watch  # type: ignore[attr-defined]
        locks, self.locks = self.locks, []
        for lock in locks:
            lock.ended(self.connection)


def warn_of_open(opened: list[BaseDatabaseWrapper], key: str, place: str) -> None:
    """Warn, once for each *place* that takes a lock, that it was given back inside a transaction."""
    file, _, line = place.rpartition(":")
    if place in _told or not line.isdigit():
        return
    _told.add(place)
    warnings.warn_explicit(
        f"the lock {key!r} was released inside the transaction that is open on {opened[0].alias!r}: whoever gets it "
        'next does not see yet what was written under it. Give release="on_commit", open the transaction inside the '
        'lock, or give release="now" if this is meant',
        RuntimeWarning,
        file,
        int(line),
    )
