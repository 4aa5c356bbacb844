"""Retries after a conflict: read again, decide again, write again.

The error codes tell the conflicts of each database.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, ParamSpec, TypedDict, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import DatabaseError, connections
from django.db.transaction import TransactionManagementError
from pymongo.errors import PyMongoError

from .. import signals
from ..engine import clock
from ..engine.lock.transaction import TRANSIENT, leaves, out_of_commit_hook
from ..engine.rule.options import Seconds, check_number, check_seconds
from ..exceptions import DocumentChanged, DocumentHeld, VersionConflict
from ..keys import unexpected
from ..transactions import open_transactions

#: The codes for a transaction that another one has overtaken. PostgreSQL (serialization failure), MariaDB (record has
#: changed since last read), MongoDB (WriteConflict), SQLite in WAL mode.
OVERTAKEN: Final = frozenset({"40001", 1020, 112, "SQLITE_BUSY_SNAPSHOT"})
#: Further codes for two transactions that waited for each other, or one that waited too long. PostgreSQL (deadlock),
#: MySQL and MariaDB (lock wait timeout, deadlock), SQLite (another connection writes, or recovers the file after a
#: crash).
PASSING: Final = OVERTAKEN | {"40P01", 1205, 1213, "SQLITE_BUSY", "SQLITE_BUSY_RECOVERY", "SQLITE_LOCKED_SHAREDCACHE"}

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("django_mongolock.versions")


class RetryOptions(TypedDict, total=False):
    """The options of `retry_on_conflict`. The defaults are 10 attempts, 0.05 and 1 second."""

    attempts: int
    backoff: Seconds
    longest: Seconds
    using: str | None


def is_conflict(error: BaseException) -> bool:
    """Return whether another attempt may succeed.

    Another attempt may succeed if a row or document was changed meanwhile, if a document is held, or if the database
    asks for it. An error of a function that runs after the commit is no conflict, because the work is done.
    """
    if out_of_commit_hook(error):
        return False
    return isinstance(error, (VersionConflict, DocumentChanged, DocumentHeld)) or is_passing(error)


class Retrying:
    """The number of attempts and the pauses between them. See `retry_on_conflict`."""

    def __init__(
        self, attempts: int = 10, backoff: Seconds = 0.05, longest: Seconds = 1.0, using: str | None = None
    ) -> None:
        check_number("attempts", attempts, 1_000_000)
        self.attempts, self.aliases = attempts, None if using is None else [using]
        self.backoff, self.longest = check_seconds("backoff", backoff), check_seconds("longest", longest)

    def pause(self, attempt: int, error: BaseException) -> float:
        """Return the seconds to wait after the *error* of an *attempt*.

        The wait is random. For a held document, the wait lasts as long as the document suggests. Raises *error* if it
        leads to no other attempt.
        """
        if out_of_commit_hook(error) or not all(map(is_conflict, errors := leaves(error))):
            raise error
        if attempt == self.attempts:
            error.add_note(f"gave up after {self.attempts} attempts")
            raise error
        for each in errors:
            what = each.what if isinstance(each, VersionConflict) else ""
            logger.debug("conflict what=%s error=%s attempt=%d", what, type(each).__name__, attempt)
            signals.send(signals.conflict_retried, what=what, error=type(each).__name__, attempt=attempt)
        if isinstance(error, DocumentHeld):
            return min(self.longest, error.retry_after)
        return clock.backoff(attempt, self.backoff, self.longest)


@overload
def retry_on_conflict(function: Callable[P, R], /, **options: Unpack[RetryOptions]) -> Callable[P, R]: ...
@overload
def retry_on_conflict(
    function: None = None, /, **options: Unpack[RetryOptions]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def retry_on_conflict(function: Callable[..., Any] | None = None, /, **options: Unpack[RetryOptions]) -> Any:
    """Call the function again after a conflict. It has to read what it writes, and may run twice.

    A conflict is a VersionConflict, DocumentChanged or DocumentHeld, or an error by which the database asks to try
    again: a serialization failure, a deadlock, a lock that another writer had for too long, SQLite's "database is
    locked", a transaction that MongoDB aborted; or a group of only such errors, as a TaskGroup raises it.

    attempts: how often in all (10); the last conflict is raised. backoff, longest: seconds (0.05 and 1); before attempt
    n + 1 it waits between 0 and backoff * 2 ** (n - 1), but after DocumentHeld its `retry_after`; at most *longest*.
    For functions and `async def`, not for generators.

    Raises TransactionManagementError if a transaction is open around the call (on the alias *using*, else on any): a
    second run in it would read the same again, or could not read at all. Open the transaction inside the function. The
    transaction around a test of Django's TestCase does not count. An error of a function given to
    ``transaction.on_commit`` is raised and no conflict, whatever its kind: what it follows is committed.
    """
    for name in options.keys() - RetryOptions.__annotations__.keys():
        raise unexpected(name, RetryOptions.__annotations__)
    retrying = Retrying(**options)
    return retrying_calls(function, retrying) if function else lambda given: retrying_calls(given, retrying)


def retrying_calls(function: Callable[..., Any], retrying: Retrying) -> Callable[..., Any]:
    """Wrap *function* in the attempts of *retrying*."""
    if not callable(function):
        raise TypeError(f"retry_on_conflict needs a function, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__qualname__", function)
        raise TypeError(
            f"retry_on_conflict cannot run {name} again: what a generator has yielded cannot be taken back. "
            "Decorate the function that reads and writes"
        )
    if iscoroutinefunction(function):

        @functools.wraps(function)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            await sync_to_async(refuse_open_transaction)(retrying.aliases)  # in the thread of Django's connections
            attempt = 0
            while True:
                attempt += 1
                try:
                    return await function(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - pause() raises it
                    pause = retrying.pause(attempt, error)
                await sync_to_async(end_failed_commits)()
                await asyncio.sleep(pause)

        return acall

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_open_transaction(retrying.aliases)
        attempt = 0
        while True:
            attempt += 1
            try:
                return _finished(function(*args, **kwargs), function)
            except BaseException as error:  # noqa: BLE001 - pause() raises it
                pause = retrying.pause(attempt, error)
            end_failed_commits()
            time.sleep(pause)

    return call


def _finished(result: R, function: Callable[..., Any]) -> R:
    """Return *result*. Raise TypeError for a coroutine, because its conflicts would come after the attempt."""
    if inspect.iscoroutine(result):
        result.close()
        name = getattr(function, "__qualname__", function)
        raise TypeError(f"{name} returned a coroutine, which is not run again: put retry_on_conflict on `async def`")
    return result


def refuse_open_transaction(aliases: Collection[str] | None) -> None:
    """Raise TransactionManagementError if a second run could not see the change behind the conflict."""
    known, opened = list(connections), {connection.alias for connection in open_transactions()}
    for alias in known if aliases is None else aliases:
        if alias not in known:
            raise ValueError(f"using={alias!r} is no alias of DATABASES: there are {', '.join(known)}")
        if alias in opened:
            raise TransactionManagementError(
                f"a conflict cannot be retried inside the transaction that is open on {alias!r}: it would not see what "
                "others wrote. Open the transaction inside the retried code, or retry around it "
                "(with using=, only that alias counts)"
            )


def open_transaction(alias: str) -> bool:
    """Return whether this thread is in a transaction on *alias*; see `open_transactions`."""
    return any(connection.alias == alias for connection in open_transactions())


def is_overtaken(error: BaseException) -> bool:
    """Return whether the database found that another transaction was faster."""
    return not OVERTAKEN.isdisjoint(_codes(error))


def is_passing(error: BaseException) -> bool:
    """Return whether the database asks to try again.

    In this case nothing of the command or its transaction was kept.
    """
    if any(isinstance(each, PyMongoError) and each.has_error_label(TRANSIENT) for each in _chain(error)):
        return True
    return not PASSING.isdisjoint(_codes(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error of Django or of the driver, and the driver's error that caused Django's."""
    if isinstance(error, (DatabaseError, PyMongoError)):
        yield error
        if error.__cause__ is not None:
            yield error.__cause__


def _codes(error: BaseException) -> Iterator[Any]:
    """Yield the codes that the drivers of PostgreSQL, SQLite, MongoDB and MySQL give to the error."""
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
