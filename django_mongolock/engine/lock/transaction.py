"""A MongoDB transaction that commits only if a lock is still held by the grant that it began under.

The transaction *ends* with a write to the lock document that matches the grant. Every other change of that document
meanwhile conflicts with this write. If another holder took the lock over, nothing is committed. A new waiter in the
queue conflicts as well. A write at the start would block all waiters, and the renewals of the lock with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import _AsyncGeneratorContextManager, _GeneratorContextManager
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from bson.int64 import Int64
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from ...exceptions import LockBackendFailed, LockError, LockMisused, LockTransactionAborted
from .. import clock
from ..protocol import actions
from ..session.grant import Grant
from ..session.session import Session
from ..store.mongo import MongoStore

S_co = TypeVar("S_co", ClientSession, AsyncClientSession, covariant=True)
T = TypeVar("T")
Client = MongoClient[Any] | AsyncMongoClient[Any]
#: A generator that yields calls to make. The outcome is sent back, or the error thrown in.
Calls = Generator[Callable[[], Any], Any, T]

#: MongoDB's label for a transaction that it has aborted. Nothing is committed, and a new attempt may help.
TRANSIENT: Final = "TransientTransactionError"
#: MongoDB's label for a commit of unknown outcome. A repeated commit is safe.
UNKNOWN: Final = "UnknownTransactionCommitResult"
#: The seconds for which a commit is tried, longer than a failover takes.
COMMIT_LIMIT: Final = 30.0
#: The methods of a connection that call the functions given to ``on_commit``, after the commit, or at once without a
#: transaction.
_CALLERS: Final = ("run_and_clear_commit_hooks", "on_commit")
_MODULES: Final = ("django.db.", "django_mongodb_backend.")


class FencingLock(Protocol):
    """The needs of a transaction from its lock."""

    def ensure_held(self) -> None: ...
    def extend(self, lease: float | None = None) -> None: ...
    async def aextend(self, lease: float | None = None) -> None: ...
    def _acquired(self) -> tuple[Grant, ...]: ...
    def _session(self) -> Session: ...


class Atomic(Generic[S_co]):
    """The context manager of `MongoLock.atomic`, for ``with`` or ``async with``. Entering returns the session.

    Leaving commits, or aborts if the block has raised.

    - LockLost: the lock was lost. Nothing is committed.
    - LockTransactionAborted: nothing is committed, but the lock is held, and the block may be run again (see
      `MongoLock.run_atomic`).
    - LockBackendFailed: the outcome of the commit is unknown.
    """

    def __init__(self, lock: FencingLock, client: Client) -> None:
        if not isinstance(client, (MongoClient, AsyncMongoClient)):
            raise TypeError(
                f"atomic() takes a MongoClient, not a {type(client).__name__}; a DATABASES alias is given by its name, "
                'atomic(using="locks")'
            )
        self._lock = lock
        self._client = client
        self._client_session: Any = None
        self._grants: tuple[Grant, ...] = ()

    def __enter__(self) -> S_co:
        if isinstance(self._client, AsyncMongoClient):
            raise TypeError("the client is an AsyncMongoClient: enter the transaction with `async with`")
        session: S_co = self._run(self._begin())
        return session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        try:
            self._run(self._end(error, self._lock.extend))
        finally:  # in steps of its own, because a signal may have struck between two of the others
            self._run(self._abort())
        return False

    async def __aenter__(self) -> S_co:
        session: S_co = await self._arun(self._begin())
        return session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        try:
            await self._arun(self._end(error, self._lock.aextend))
        finally:
            await self._arun(self._abort())
        return False

    # The generators

    def _begin(self) -> Calls[Any]:
        if self._client_session is not None:
            raise LockMisused("this transaction was entered before: call atomic() again for another one")
        self._lock.ensure_held()
        self._store = _transactional_store(self._lock)
        self._grants = self._lock._acquired()
        session = self._lock._session()
        self._registry = session.registry
        self._client_session = yield self._client.start_session
        try:
            yield partial(
                self._client_session.start_transaction,
                read_concern=ReadConcern("snapshot"),
                write_concern=WriteConcern("majority"),
                read_preference=ReadPreference.PRIMARY,
                max_commit_time_ms=round(session.commands.timeout * 1000),
            )
            for grant in self._grants:
                grant.defer_renewals()
        except BaseException:  # nothing was sent yet, and no abort is needed
            self._resume_renewals()
            raise
        return self._client_session

    def _end(self, error: BaseException | None, confirm: Callable[[], object]) -> Calls[None]:
        """Commit, or abort if the block has raised *error*.

        - confirm: function that extends the lock, and raises LockLost if the lock is not held any more.
        """
        try:
            if error is not None:
                return
            self._lock.ensure_held()
            if not (yield from self._match()):
                yield from self._abort()
                yield confirm
                raise LockMisused(
                    "the transaction's client does not see the lock: use a client of the MongoDB that keeps the locks"
                )
            yield from self._commit()
        except PyMongoError as failure:
            if failure.has_error_label(UNKNOWN):
                # The transaction may still be open on the server, and would block the lock's document for everybody.
                with contextlib.suppress(PyMongoError):
                    yield partial(self._client.admin.command, "killSessions", [self._client_session.session_id])
                raise LockBackendFailed("it is unknown whether the transaction was committed", self._key) from failure
            if not failure.has_error_label(TRANSIENT):
                raise
            yield from self._abort()
            with contextlib.suppress(LockBackendFailed):
                yield confirm
            raise LockTransactionAborted(self._key, self._grants[0].token, _reason(failure)) from failure
        finally:
            self._resume_renewals()  # after the commit, because a renewal would conflict with it

    def _resume_renewals(self) -> None:
        for grant in self._grants:
            grant.resume_renewals()
            self._registry.schedule(grant)

    def _match(self) -> Calls[bool]:
        """Write to the document of every key. Return whether all were there, and held by our grants."""
        collection = self._client[self._store.config.database][self._store.config.collection]
        for grant in self._grants:
            # Match the token too. After a removal, a delayed command may have brought the same grant back.
            mine = {"grant": {"$eq": grant.id}, "token": Int64(grant.token), "released": {"$exists": False}}
            where = {"_id": {"$eq": grant.key}, "holders": {"$elemMatch": mine}}
            change = {"$inc": {"changes": Int64(1)}}
            result = yield partial(collection.update_one, where, change, session=self._client_session)
            if result.matched_count != 1:
                return False
        return True

    def _commit(self) -> Calls[None]:
        """Commit. Repeat while MongoDB does not say whether it has committed."""
        give_up = clock.now() + COMMIT_LIMIT
        while True:
            try:
                yield self._client_session.commit_transaction
            except PyMongoError as error:
                if not error.has_error_label(UNKNOWN) or clock.now() >= give_up:
                    raise
            else:
                return

    def _abort(self) -> Calls[None]:
        """End the session. Abort the transaction unless it was committed."""
        session = self._client_session
        with contextlib.suppress(PyMongoError):
            if session.in_transaction:
                yield session.abort_transaction
        with contextlib.suppress(PyMongoError):
            yield session.end_session

    @property
    def _key(self) -> str:
        return self._grants[0].key

    # Two ways to run them

    def _run(self, calls: Calls[T]) -> T:
        return actions.run(calls, _call)

    async def _arun(self, calls: Calls[T]) -> T:
        return await actions.arun(calls, self._acall)

    async def _acall(self, call: Any) -> Any:
        if isinstance(self._client, AsyncMongoClient) or call == self._lock.aextend:
            outcome = call()
            return await outcome if isinstance(outcome, Awaitable) else outcome
        running = asyncio.ensure_future(asyncio.to_thread(call))
        await outlast(running)  # two threads must not use a session at once
        return running.result()


def _call(call: Any) -> Any:
    return call()


def pauses(limit: float) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, for *limit* seconds.

    Each pause is random. The upper bound is 10 ms at first, doubles each time, and is at most 200 ms.
    """
    give_up = clock.now() + limit
    for attempts in itertools.count(1):
        if clock.now() >= give_up:
            return
        yield clock.backoff(attempts + 1, 0.005, 0.2)


def is_transient(error: BaseException) -> bool:
    """Return whether MongoDB aborted a transaction in a way that a new attempt may help."""
    if out_of_commit_hook(error):
        return False
    if isinstance(error, LockError):
        return isinstance(error, LockTransactionAborted)
    # Django's backend chains its own errors to the driver's.
    return any(
        isinstance(cause, PyMongoError) and cause.has_error_label(TRANSIENT) for cause in (error, error.__cause__)
    )


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, as a TaskGroup raises it, or the one error."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves(each)]


def out_of_commit_hook(error: BaseException) -> bool:
    """Return whether a function given to ``transaction.on_commit`` raised *error*, or an error of its group.

    The work before it must not be repeated. The work is committed, or without a transaction may have been written. Only
    calls since the error count. Work that such a function calls itself is not meant.
    """
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(out_of_commit_hook, inner)) or any(
        frame.f_code.co_name in _CALLERS and str(frame.f_globals.get("__name__")).startswith(_MODULES)
        for frame, _line in walk_tb(error.__traceback__)
    )


def kept_in_mongodb(lock: FencingLock) -> MongoStore:
    """Return the store of the lock. Raise LockMisused if it is not MongoDB."""
    store = lock._session().store
    if not isinstance(store, MongoStore):
        raise LockMisused("this lock is not kept in MongoDB: atomic() needs a MongoDB transaction")
    return store


def _transactional_store(lock: FencingLock) -> MongoStore:
    """Return the store of the lock. Raise LockMisused if it has no transactions."""
    store = kept_in_mongodb(lock)
    servers = store.client.topology_description.server_descriptions().values()
    if any(server.server_type_name == "Standalone" for server in servers):
        raise LockMisused(
            "a standalone MongoDB server has no transactions: run it as a replica set; one node is enough to begin "
            "with (--replSet, rs.initiate())"
        )
    return store


def _reason(error: PyMongoError) -> str:
    details = getattr(error, "details", None) or {}
    return str(details.get("codeName", type(error).__name__))


async def outlast(task: asyncio.Future[Any]) -> None:
    """Wait until *task* is done. If this wait is cancelled, raise the cancellation after that."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen
        raise cancelled


#: The types of results whose work has not begun.
_UNFINISHED: Final = (Generator, AsyncGenerator, _GeneratorContextManager, _AsyncGeneratorContextManager)


def finished(result: T, what: str, cure: str) -> T:
    """Return the *result* of work under a lock. Raise TypeError for work that begins after the release."""
    if not (inspect.isawaitable(result) or isinstance(result, _UNFINISHED)):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(f"{what} returned a {type(result).__name__}, which would run without the lock: {cure}")
