"""Retries after a conflict: read again, decide again, write again."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import connections
from django.db.transaction import TransactionManagementError

from .. import signals
from ..engine.lock.commit_hooks import out_of_commit_hook
from ..engine.rule.options import Seconds, as_seconds
from ..exceptions import DocumentChanged, DocumentHeld, VersionConflict
from .passing import end_failed_commits, is_passing

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("django_mongolock.versions")


class RetryOptions(TypedDict, total=False):
    """See `retry_on_conflict`; 10 attempts, 0.05 and 1 second are the defaults."""

    attempts: int
    backoff: Seconds
    longest: Seconds
    using: str | None


class Attempt:
    """One run of the block. It suppresses the conflict that leads to another run, and nothing else."""

    def __init__(self, number: int, attempts: int) -> None:
        self.number = number
        self.attempts = attempts
        self.conflict: BaseException | None = None
        self._entered = False

    def __repr__(self) -> str:
        return f"<Attempt {self.number} of {self.attempts}>"

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or out_of_commit_hook(error) or not all(map(is_conflict, errors := leaves(error))):
            return False
        if self.number == self.attempts:
            error.add_note(f"gave up after {self.attempts} attempts")
            return False
        self.conflict = error
        for each in errors:
            what = each.what if isinstance(each, VersionConflict) else ""
            logger.debug("conflict what=%s error=%s attempt=%d", what, type(each).__name__, self.number)
            signals.send(signals.conflict_retried, what=what, error=type(each).__name__, attempt=self.number)
        return True

    def again(self) -> bool:
        """Return whether another attempt is necessary."""
        if not self._entered:
            raise TypeError("put `with attempt:` around the body of the loop over retrying_on_conflict()")
        return self.conflict is not None


def is_conflict(error: BaseException) -> bool:
    """Return whether another attempt may succeed: a row or document was changed meanwhile, a document is held, or the
    database says so. An error of a function that runs after the commit is none: the work is done."""
    if out_of_commit_hook(error):
        return False
    return isinstance(error, (VersionConflict, DocumentChanged, DocumentHeld)) or is_passing(error)


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, as a TaskGroup raises it, or the one error."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves(each)]


class Retrying:
    """The attempts at a block, see `retrying_on_conflict`."""

    def __init__(
        self, attempts: int = 10, backoff: Seconds = 0.05, longest: Seconds = 1.0, using: str | None = None
    ) -> None:
        seconds: list[float] = [as_seconds(backoff), as_seconds(longest)]
        for name, value in zip(("attempts", "backoff", "longest"), (attempts, *seconds), strict=True):
            if isinstance(value, bool) or not isinstance(value, int if name == "attempts" else (int, float)):
                what = "a whole number" if name == "attempts" else "a number of seconds"
                raise TypeError(f"{name} is {what}, not {type(value).__name__}")
        if attempts < 1:
            raise ValueError(f"attempts must be a whole number of at least 1, not {attempts!r}")
        if min(seconds) < 0:
            raise ValueError(f"backoff and longest are seconds, 0 or more, not {backoff!r} and {longest!r}")
        self.attempts, self.aliases = attempts, None if using is None else [using]
        self.backoff, self.longest = seconds

    def pause(self, attempt: int, conflict: BaseException | None = None) -> float:
        """Return how many seconds to wait after *attempt*: up to a limit that doubles each time (full jitter), or as
        long as a document that is held makes it sensible."""
        if isinstance(conflict, DocumentHeld):
            return min(self.longest, conflict.retry_after)
        limit = min(self.longest, self.backoff * 2.0 ** min(attempt - 1, 60))
        return random.uniform(0, limit)  # noqa: S311 - spreads writers out, and hides nothing

    def __iter__(self) -> Attempts:
        return Attempts(self)

    def __aiter__(self) -> Attempts:
        return Attempts(self)


class Attempts:
    """One pass over the attempts, in a thread or in a coroutine."""

    def __init__(self, retrying: Retrying) -> None:
        self._retrying = retrying
        self._attempt: Attempt | None = None

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def __next__(self) -> Attempt:
        if self._attempt is None:
            refuse_open_transaction(self._retrying.aliases)
        elif not self._attempt.again():
            raise StopIteration
        else:
            end_failed_commits()
            time.sleep(self._retrying.pause(self._attempt.number, self._attempt.conflict))
        return self._next()

    async def __anext__(self) -> Attempt:
        if self._attempt is None:
            await sync_to_async(refuse_open_transaction)(self._retrying.aliases)  # where Django's connections are
        elif not self._attempt.again():
            raise StopAsyncIteration
        else:
            await sync_to_async(end_failed_commits)()
            await asyncio.sleep(self._retrying.pause(self._attempt.number, self._attempt.conflict))
        return self._next()

    def _next(self) -> Attempt:
        number = self._attempt.number + 1 if self._attempt else 1
        self._attempt = Attempt(number, self._retrying.attempts)
        return self._attempt


def retrying_on_conflict(**options: Unpack[RetryOptions]) -> Retrying:
    """Attempts at a block that reads and writes; `for` it, or `async for`.

        for attempt in retrying_on_conflict():
            with attempt:
                rate = Rate.objects.get(pk=pk)
                rate.value += 1
                rate.save()

    A conflict inside `with attempt` leads to the next attempt; the last attempt raises it. Other errors are raised. See
    `retry_on_conflict` for what a conflict is, and for the arguments. Leave the loop at its end, or with `return`.
    """
    return Retrying(**options)


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
            async for attempt in retrying:
                with attempt:
                    return await function(*args, **kwargs)
            return None  # not reached: the last attempt returns or raises

        return acall

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for attempt in retrying:
            with attempt:
                return _finished(function(*args, **kwargs), function)
        return None  # not reached: the last attempt returns or raises

    return call


def _finished(result: R, function: Callable[..., Any]) -> R:
    """Return *result*; raise TypeError if it is a coroutine, whose conflicts would come after the attempt."""
    if inspect.iscoroutine(result):
        result.close()
        name = getattr(function, "__qualname__", function)
        raise TypeError(f"{name} returned a coroutine, which is not run again: put retry_on_conflict on `async def`")
    return result


def refuse_open_transaction(aliases: Collection[str] | None) -> None:
    """Raise TransactionManagementError if a second run could not see what the conflict was about."""
    known = list(connections)
    for alias in known if aliases is None else aliases:
        if alias not in known:
            raise ValueError(f"using={alias!r} is no alias of DATABASES: there are {', '.join(known)}")
        if open_transaction(alias):
            raise TransactionManagementError(
                f"a conflict cannot be retried inside the transaction that is open on {alias!r}: it would not see what "
                "others wrote. Open the transaction inside the retried code, or retry around it "
                "(with using=, only that alias counts)"
            )


def open_transaction(alias: str) -> bool:
    """Return whether this thread is in a transaction on *alias*, not counting those around a test."""
    used: Any = connections.all(initialized_only=True)  # a transaction would have made its connection
    connection = next((each for each in used if each.alias == alias), None)
    if connection is None:
        return False
    blocks = connection.atomic_blocks
    if connection.in_atomic_block and not (blocks and blocks[-1]._from_testcase):
        return True
    return bool(getattr(connection, "in_atomic_block_mongo", False))
