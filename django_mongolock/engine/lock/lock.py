"""The lock object: one acquisition of one or several keys, for threads and for coroutines."""

from __future__ import annotations

import asyncio
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar, overload

from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from ...exceptions import LockError, LockNotAcquired
from ..rule.document import Terms
from ..rule.options import UNSET, LockOptions, Seconds, Unset, as_seconds, check_wait, refuse_options
from ..session.grant_registry import current_task
from ..session.session import Session
from .downgrade import downgrade
from .grants import Facts, LockGrants
from .state import LockState
from .transaction import Atomic, finished, is_transient, pauses

T = TypeVar("T")


class MongoLock(LockState):
    """Named locks in MongoDB: held by one process, thread or task at a time, for as long as the lease is renewed.

    Use it as a context manager, ``with`` or ``async with``, or through `acquire` and `release`. Leaving the block
    raises LockLost if the lock was lost meanwhile and the block itself raised nothing.

    While the process lives, its leases are renewed in the background; when it dies, they end by themselves. A lease
    cannot stop work that is still running when it ends, in a process that was paused for instance: compare
    `fencing_token` where you write, and call `ensure_held` before what cannot be undone.

    An object is one acquisition at a time: make a new one for every use; that sends nothing.

    session: gives the session of this process. terms: what the update on the server needs to know. facts: gives what is
    shown to people of the holder.
    """

    def __init__(
        self,
        session: Callable[[], Session],
        keys: tuple[str, ...],
        terms: Terms = Terms(),  # noqa: B008 - it is frozen
        options: LockOptions = LockOptions(),  # noqa: B008 - it is frozen
        facts: Facts = dict,
    ) -> None:
        self.keys = keys
        self.terms = terms
        self.options = options
        self._current_session = session
        self._own = LockGrants(self, keys, terms, options, facts)

    # Acquire, release, extend: each once, with a blocking and an awaiting face

    def acquire(self, wait: Seconds | Unset | None = UNSET, **unknown: Never) -> Self:
        """Acquire the lock, waiting at most *wait* seconds (as made if not given; 0: one try; None: no end).

        Returns itself. Raises LockNotAcquired (LockReentry, LockQueueFull) if it could not be acquired,
        LockBackendFailed if MongoDB cannot be reached, LockLost if one of several keys was lost while another was
        waited for, and LockMisused if this object is in use.

        Another thread or task may release it. But if this thread ends, or this object is dropped, while the lock is
        held, it is released soon after, with a warning in the log: no code is left that would do it.
        """
        limit = self._limit(wait, unknown)
        if current_task() is not None:
            warnings.warn(
                "a lock is acquired with `with` or acquire() in a coroutine: waiting stops its whole event loop. "
                "Use `async with`, or await aacquire()",
                RuntimeWarning,
                stacklevel=2 + (sys._getframe(1).f_globals is globals()),  # `with` and try_acquire() call it, too
            )
        try:
            session = self._current_session()
            session.run(self._own.acquire_all(session, limit))
        except LockError:
            raise
        except BaseException:
            self._own.abandon()  # a signal may strike after the grant, before the caller has it
            raise
        return self

    async def aacquire(self, wait: Seconds | Unset | None = UNSET, **unknown: Never) -> Self:
        """See acquire()."""
        limit = self._limit(wait, unknown)
        try:
            session = self._current_session()
            await session.arun(self._own.acquire_all(session, limit))
        except LockError:
            raise
        except BaseException:
            self._own.abandon()
            raise
        return self

    def cancel(self) -> None:
        """End the wait of another thread or task in this object's `acquire`, which raises LockCancelled.

        Does nothing if there is no such wait.
        """
        self._own.is_cancelled = True
        if (grant := self._own.wanted) is not None:
            self._current_session().waits.cancel(grant)

    def try_acquire(self, wait: Seconds | None = 0, **unknown: Never) -> bool:
        """Acquire the lock, waiting at most *wait* seconds (0: one try; None: no end); return whether it is held now.

        See acquire(), whose other errors it raises.
        """
        try:
            self.acquire(wait, **unknown)
        except LockNotAcquired:
            return False
        return True

    async def atry_acquire(self, wait: Seconds | None = 0, **unknown: Never) -> bool:
        """See try_acquire()."""
        try:
            await self.aacquire(wait, **unknown)
        except LockNotAcquired:
            return False
        return True

    def release(self, *, early: bool = False) -> bool:
        """Release the lock; return whether it was held until then. Without anything to release: False.

        early: also end its minimum hold (`min_hold`). It never frees a lock of another holder. If MongoDB cannot be
        reached, the lock is released in the background, at the latest when its lease ends.
        """
        try:
            session = self._own.session
            return session is not None and session.run(self._own.release_all(early))
        except BaseException:
            self._own.abandon(stays=not early)  # a signal may strike before the first line of the body
            raise

    async def arelease(self, *, early: bool = False) -> bool:
        """See release()."""
        try:
            session = self._own.session
            return session is not None and await session.arun(self._own.release_all(early))
        except BaseException:
            self._own.abandon(stays=not early)
            raise

    def extend(self, lease: Seconds | None = None) -> None:
        """Push the end of the lease to *lease* seconds from now (its own length if not given); never nearer.

        A longer lease stays the lock's lease from then on. Raises LockLost if the lock is not held any more.
        """
        if not self._session().run(self._own.extend_all(lease)):
            raise self._loss(self._own.grants)

    async def aextend(self, lease: Seconds | None = None) -> None:
        """See extend()."""
        if not await self._session().arun(self._own.extend_all(lease)):
            raise self._loss(self._own.grants)

    def downgrade(self) -> None:
        """Go on as a reader: from exclusive to ``mode="shared"``, in one command for each key, at no time without it.

        The readers at the head of the queue are let in by the same command. The lock has a new, larger fencing token;
        until the answer is there, `held` is false in other threads. There is no way back: release it, and acquire it
        again. Raises LockLost if the lock is not held any more, LockMisused if it is not exclusive, and
        LockBackendFailed if MongoDB did not answer until the end of the lease; then the lock is given up.
        """
        if not self._session().run(downgrade(self._own)):
            raise self._loss(self._own.grants)

    async def adowngrade(self) -> None:
        """See downgrade()."""
        if not await self._session().arun(downgrade(self._own)):
            raise self._loss(self._own.grants)

    @overload
    def atomic(self, client: AsyncMongoClient[Any]) -> Atomic[AsyncClientSession]: ...
    @overload
    def atomic(self, client: MongoClient[Any] | None = None, *, using: str | None = None) -> Atomic[ClientSession]: ...
    def atomic(self, client: Any = None, *, using: str | None = None) -> Any:
        """A MongoDB transaction that commits only if the lock is still held: ``with lock.atomic(client) as session:``.

        client: of the MongoDB that keeps the lock. Only what is done with ``session=session`` is part of it. Where
        another holder has taken the lock over, leaving the block raises LockLost, and nothing was committed.

        It may also be aborted while the lock is held, because a waiter joined the queue: LockTransactionAborted.
        Keep it short, or use `run_atomic`. It lasts at most as long as the server lets it (60 seconds by default).
        Works with ``async with`` too, for both kinds of clients. Raises LockMisused on a standalone server.

        Of a lock made by `mongo_lock`, without a *client*: the transaction of a DATABASES alias (*using*, else that of
        the lock), of which the ORM is a part as in `django_mongodb_backend.transaction.atomic`. With ``async with``,
        only what is done with the session is: the ORM works in other threads, which other tasks share.
        """
        if client is None:
            raise TypeError("atomic() needs a client of the MongoDB that keeps the lock")
        return Atomic(self, client)

    def run_atomic(self, work: Callable[[Any], T], /, *args: Any, limit: Seconds = 30.0, **kwargs: Any) -> T:
        """Call *work* with the session of an `atomic` transaction, again while MongoDB aborts it; return its result.

        Other arguments go to `atomic`. *work* may run several times: what it does beside the transaction must stand
        that. limit: seconds after which the last error is raised rather than another attempt made.
        """
        left = pauses(as_seconds(limit))
        while True:
            try:
                with self.atomic(*args, **kwargs) as session:
                    return finished(work(session), "the work", "for a coroutine function there is arun_atomic()")
            except Exception as error:
                if not is_transient(error) or (pause := next(left, None)) is None:
                    raise
                time.sleep(pause)

    async def arun_atomic(
        self, work: Callable[[Any], Awaitable[T]], /, *args: Any, limit: Seconds = 30.0, **kwargs: Any
    ) -> T:
        """See run_atomic(). *work* is a coroutine function."""
        left = pauses(as_seconds(limit))
        while True:
            try:
                async with self.atomic(*args, **kwargs) as session:
                    return finished(await work(session), "the work", "await it inside")
            except Exception as error:
                if not is_transient(error) or (pause := next(left, None)) is None:
                    raise
                await asyncio.sleep(pause)

    if not TYPE_CHECKING:  # type checkers find it by themselves

        def __call__(self, *args: object, **kwargs: object) -> None:
            """Raise TypeError, which names the decorator for functions."""
            raise TypeError("mongo_lock() is for a block, `with mongo_lock(...):`; functions take @mongo_locked(...)")

        def __getattr__(self, name: str) -> Never:
            """Raise AttributeError, which names what there is in place of a `locked()`."""
            cure = "; `held`: whether this object holds the lock; `lock_info(key)`: who holds it" * (name == "locked")
            raise AttributeError(f"a lock has no attribute {name!r}{cure}", name=name, obj=self)

    def __bool__(self) -> Never:
        raise TypeError("`if lock` does not acquire it: use `if lock.try_acquire()`, or `with`; `held` tells the state")

    def __reduce__(self) -> Never:
        raise TypeError(
            f"a lock cannot be pickled or copied: pass its key, and make a new one there: mongo_lock({self._names})"
        )

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        grants = self._own.grants
        if not self.release():
            self._report_loss(grants, error)
        return False

    async def __aenter__(self) -> Self:
        return await self.aacquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        grants = self._own.grants
        if not await self.arelease():
            self._report_loss(grants, error)
        return False

    def _limit(self, wait: Seconds | Unset | None, unknown: dict[str, Never]) -> float | None:
        if unknown:
            refuse_options(unknown)
        chosen = self.options.wait if isinstance(wait, Unset) else check_wait(wait)
        # The project's WAIT is in the options already; a lock that was made without a project waits without end.
        return None if isinstance(chosen, Unset) else chosen
