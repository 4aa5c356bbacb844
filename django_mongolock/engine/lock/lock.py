"""The lock object, one acquisition of one or several keys, for threads and for coroutines."""

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
    """Named locks in MongoDB. One process, thread or task at a time holds a lock, as long as its lease is renewed.

    Use the lock as a context manager, ``with`` or ``async with``, or through `acquire` and `release`. Leaving the block
    raises LockLost if the lock was lost meanwhile and the block itself raised nothing.

    While the process lives, its leases are renewed in the background. When the process dies, they end by themselves. A
    lease cannot stop work that is still running when the lease ends, for instance in a process that was paused. Compare
    `fencing_token` where you write, and call `ensure_held` before an act that cannot be undone.

    An object is one acquisition at a time. Make a new one for every use. Making one sends nothing.

    - session: function that returns the session of this process.
    - terms: terms that the update on the server needs to know.
    - facts: function that returns the facts about the holder that people see.
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

    # Acquire, release and extend have one body each, with a blocking and an awaiting method.

    def acquire(self, wait: Seconds | Unset | None = UNSET, **unknown: Never) -> Self:
        """Acquire the lock, waiting at most *wait* seconds, and return the lock.

        - wait: seconds to wait, 0 for a single try, None for no limit. Default: the option of the lock.

        Raises LockNotAcquired (LockReentry, LockQueueFull) if the lock could not be acquired, LockBackendFailed if
        MongoDB cannot be reached, LockLost if one of several keys was lost during the wait for another, and LockMisused
        if this object is in use.

        Another thread or task may release the lock. If this thread ends, or this object is dropped, while the lock is
        held, the lock is released soon after, with a warning in the log. No code is left then that would release it.
        """
        limit = self._limit(wait, unknown)
        if current_task() is not None:
            warnings.warn(
                "a lock is acquired with `with` or acquire() in a coroutine: waiting stops its whole event loop. "
                "Use `async with`, or await aacquire()",
                RuntimeWarning,
                stacklevel=2 + (sys._getframe(1).f_globals is globals()),  # `with` and try_acquire() call this too
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
        """End the wait of another thread or task in this object's `acquire`. The wait raises LockCancelled.

        Without such a wait, nothing happens.
        """
        self._own.is_cancelled = True
        if (grant := self._own.wanted) is not None:
            self._current_session().waits.cancel(grant)

    def try_acquire(self, wait: Seconds | None = 0, **unknown: Never) -> bool:
        """Acquire the lock, waiting at most *wait* seconds. Return whether the lock is held now.

        - wait: seconds to wait, 0 for a single try, None for no limit.

        Raises the other errors of acquire().
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
        """Release the lock. Return whether it was held until then, or False if there was nothing to release.

        - early: whether to end the minimum hold (`min_hold`) too.

        A release never frees a lock of another holder. If MongoDB cannot be reached, the lock is released in the
        background, at the latest when its lease ends. Only the object that acquired a lock can release it. Any other
        object gets a RuntimeWarning.
        """
        try:
            session = self._own.session or self._warn_not_acquired()
            return session is not None and session.run(self._own.release_all(early))
        except BaseException:
            self._own.abandon(stays=not early)  # a signal may strike before the first line of the body
            raise

    async def arelease(self, *, early: bool = False) -> bool:
        """See release()."""
        try:
            session = self._own.session or self._warn_not_acquired()
            return session is not None and await session.arun(self._own.release_all(early))
        except BaseException:
            self._own.abandon(stays=not early)
            raise

    def extend(self, lease: Seconds | None = None) -> None:
        """Move the end of the lease to *lease* seconds from now, but never nearer.

        - lease: seconds from now. Default: the length of the present lease.

        A longer lease stays the lock's lease from then on. Raises LockLost if the lock is not held any more.
        """
        if not self._session().run(self._own.extend_all(lease)):
            raise self._loss(self._own.grants)

    async def aextend(self, lease: Seconds | None = None) -> None:
        """See extend()."""
        if not await self._session().arun(self._own.extend_all(lease)):
            raise self._loss(self._own.grants)

    def downgrade(self) -> None:
        """Change from exclusive to ``mode="shared"``, in one command for each key, and hold the lock all the time.

        The same command lets in the readers at the head of the queue. The lock has a new, larger fencing token. Until
        the answer is there, `held` is false in other threads. There is no way back. Release the lock, and acquire it
        again.

        Raises LockLost if the lock is not held any more, and LockMisused if the lock is not exclusive. Raises
        LockBackendFailed if MongoDB did not answer until the end of the lease. The lock is given up then.
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
        """Return a MongoDB transaction that commits only if the lock is still held.

        Use it as ``with lock.atomic(client) as session:``. Only operations with ``session=session`` are part of the
        transaction. If another holder has taken the lock over, leaving the block raises LockLost, and nothing was
        committed.

        - client: client of the MongoDB that keeps the lock.
        - using: alias in DATABASES for a transaction without a client. Default: the alias of the lock.

        MongoDB may also abort the transaction while the lock is held, because a waiter joined the queue. Leaving the
        block then raises LockTransactionAborted. Keep the transaction short, or use `run_atomic`. A transaction lasts
        at most as long as the server lets it (60 seconds by default).

        ``async with`` works too, for both kinds of clients. Raises LockMisused on a standalone server.

        A lock made by `mongo_lock` needs no *client*. The ORM is then part of the transaction, as in
        `django_mongodb_backend.transaction.atomic`. With ``async with``, only operations with the session are part of
        it, because the ORM works in other threads that other tasks share.
        """
        if client is None:
            raise TypeError("atomic() needs a client of the MongoDB that keeps the lock")
        return Atomic(self, client)

    def run_atomic(self, work: Callable[[Any], T], /, *args: Any, limit: Seconds = 30.0, **kwargs: Any) -> T:
        """Call *work* with the session of an `atomic` transaction, and return its result. Repeat if MongoDB aborts it.

        Other arguments go to `atomic`. *work* may run several times. Effects outside of the transaction must be
        repeatable.

        - limit: seconds after which the last error is raised rather than another attempt made.
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

    if not TYPE_CHECKING:  # type checkers find these errors by themselves

        def __call__(self, *args: object, **kwargs: object) -> None:
            """Raise TypeError with the name of the decorator for functions."""
            raise TypeError("mongo_lock() is for a block, `with mongo_lock(...):`; functions take @mongo_locked(...)")

        def __getattr__(self, name: str) -> Never:
            """Raise AttributeError with the replacement for `locked()`, where that was asked for."""
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

    def _warn_not_acquired(self) -> Session | None:
        warnings.warn(str(self._not_acquired()), RuntimeWarning, stacklevel=4)
        return None

    def _limit(self, wait: Seconds | Unset | None, unknown: dict[str, Never]) -> float | None:
        if unknown:
            refuse_options(unknown)
        chosen = self.options.wait if isinstance(wait, Unset) else check_wait(wait)
        # The project's WAIT is in the options already. A lock that was made without a project waits without end.
        return None if isinstance(chosen, Unset) else chosen
