"""The lock object: one acquisition of one or several keys, for threads and for coroutines."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, overload

from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from ..exceptions import LockBackendFailed, LockError, LockLost, LockMisused, LockNotAcquired, LockReentry
from . import protocol
from .document import Terms, milliseconds
from .grant import TAKEN, Callback, Grant, OwnerToken, State
from .logs import WARNING, log
from .protocol import Protocol
from .session.session import Session
from .transaction import Atomic, RetrySchedule, is_transient

T = TypeVar("T")

#: Packages whose lines are of no interest to who looks for the place where a lock was acquired.
_OURS: Final = {"django_mongolock", "asyncio", "contextlib"}
#: The longest time that makes sense, in seconds: ten years.
_LONGEST: Final = 10 * 365 * 86_400


class Unset:
    """The type of `UNSET`, which stands for an argument that was not given where None means something."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Options:
    """How a lock is asked for and kept. *wait*: seconds, 0 for a single try, None without end. *templates*: what the
    keys were made from, where that is known."""

    terms: Terms = Terms()  # noqa: RUF009 - it is frozen
    wait: float | None = 10.0
    reentrant: bool = False
    auto_renew: bool = True
    max_hold: float | None = None
    on_lost: Callable[[MongoLock], object] | None = None
    on_release_requested: Callable[[MongoLock], object] | None = None
    templates: Mapping[str, str] = field(default_factory=dict)


class MongoLock:
    """Named locks in MongoDB: held by one process, thread or task at a time, for as long as the lease is renewed.

    Use it as a context manager, ``with`` or ``async with``, or through `acquire` and `release`. Leaving the block
    raises LockLost if the lock was lost meanwhile and the block itself raised nothing.

    While the process lives, its leases are renewed in the background; when it dies, they end by themselves. A lease
    cannot stop work that is still running when it ends, in a process that was paused for instance: compare
    `fencing_token` where you write, and call `ensure_held` before what cannot be undone.

    An object is one acquisition at a time: make a fresh one for every use, it costs nothing.
    """

    def __init__(
        self,
        session: Callable[[], Session],
        keys: tuple[str, ...],
        options: Options,
        facts: Callable[[], Mapping[str, str | int]] = dict,
    ) -> None:
        self.keys = keys
        self.options = options
        self._session_now = session
        self._facts = facts
        self._session: Session | None = None
        self._grants: tuple[Grant, ...] = ()
        self._owner_tokens: tuple[OwnerToken, ...] = ()
        #: What was acquired last, also when it is released: that it was granted stays a fact.
        self._last: tuple[Grant, ...] = ()
        self._busy = threading.Lock()
        self._wanted: Grant | None = None

    def __del__(self) -> None:
        """Release what was forgotten, or was left by a signal that struck just before the end of a block."""
        grants: tuple[Grant, ...] = getattr(self, "_grants", ())
        if not grants or not self._is_ours() or self._session is None:
            return
        self._session.drop(grants, id(self))
        if any(grant.state is State.HELD for grant in grants):
            names = ", ".join(map(repr, self.keys))
            warnings.warn(
                f"the lock {names}, acquired at {grants[0].acquired_from}, was not released, and nobody can any more",
                ResourceWarning,
                stacklevel=2,
            )

    # What it is and how it stands

    @property
    def key(self) -> str:
        """The key, as it is stored. For a lock on several keys: LockMisused, see `keys`."""
        return self._only(self.keys)

    @property
    def held(self) -> bool:
        """Is every key held by this object, by a clock that ends no later than the server's?"""
        return self._all_held(self._grants)

    @property
    def lost(self) -> bool:
        """Was it acquired by this object and then lost, rather than given back?"""
        grants = self._grants
        return bool(grants) and not self._all_held(grants)

    @property
    def in_danger(self) -> bool:
        """Is the lock still held, while its renewals do not get through? What cannot be undone should not begin now."""
        grants = self._grants
        return self._all_held(grants) and any(grant.failures for grant in grants)

    @property
    def release_requested(self) -> str | None:
        """Who asks for the release of this lock, in words; None if nobody does. Known within a third of a lease."""
        return next(
            (grant.release_requested_by for grant in self._grants if grant.release_requested_by is not None), None
        )

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends if it is not renewed; 0 if the lock is not held."""
        grants = self._grants
        return min(grant.remaining for grant in grants) if self._all_held(grants) else 0.0

    @property
    def fencing_token(self) -> int:
        """A number larger than that of every earlier grant of this key; also after the release, that of the last one.
        LockMisused if it was never acquired."""
        return self._only(self._acquired()).token

    @property
    def fencing_tokens(self) -> dict[str, int]:
        """The fencing token of each key, also after the release. LockMisused if the lock was never acquired."""
        return {grant.key: grant.token for grant in self._acquired()}

    @property
    def acquired_at(self) -> datetime:
        """When the last of the keys was granted, by the server's clock. LockMisused if none was."""
        return max(grant.acquired_at for grant in self._acquired() if grant.acquired_at is not None)

    @property
    def waited(self) -> float:
        """Seconds that it took to acquire the lock."""
        return max(grant.waited for grant in self._acquired())

    def ensure_held(self) -> None:
        """Raise LockLost unless the lock is held. Costs no command.

        What you do next may still take longer than what is left of the lease (`remaining`).
        """
        grants = self._grants
        if not self._all_held(grants):
            raise self._loss(grants)

    def __repr__(self) -> str:
        name = ", ".join(repr(key) for key in self.keys)
        grants = self._grants
        if not grants:
            return f"<MongoLock {name} not held>"
        token = "/".join(str(grant.token) for grant in grants)
        state = f"held, token {token}, {self.remaining:.1f} s left" if self.held else f"lost, token {token}"
        return f"<MongoLock {name} {state}>"

    # Acquire, release, extend: each once, with a blocking and an awaiting face

    def acquire(self, wait: float | Unset | None = UNSET) -> Self:
        """Acquire the lock, waiting at most *wait* seconds (as made if not given; 0: one try; None: no end).

        Returns itself. Raises LockNotAcquired (LockReentry, LockQueueFull) if it is not to be had,
        LockBackendFailed if MongoDB cannot be reached, and LockMisused if this object is in use.
        """
        if _current_task() is not None:
            warnings.warn(
                "a lock is acquired with `with` or acquire() in a coroutine: waiting stops its whole event loop. "
                "Use `async with`, or await aacquire()",
                RuntimeWarning,
                stacklevel=3,
            )
        try:
            self._now().run(self._acquire(wait))
        except LockError:
            raise
        except BaseException:
            self._abandon()  # a signal may strike after the grant, before the caller has it
            raise
        return self

    async def aacquire(self, wait: float | Unset | None = UNSET) -> Self:
        """See acquire()."""
        try:
            await self._now().arun(self._acquire(wait))
        except LockError:
            raise
        except BaseException:
            self._abandon()
            raise
        return self

    def cancel(self) -> None:
        """End the wait of another thread or task in this object's `acquire`, which raises LockCancelled.

        Does nothing if nobody waits in it.
        """
        if (grant := self._wanted) is not None:
            self._session_now().cancel(grant)

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free now; return whether that was so. One command."""
        try:
            return bool(self.acquire(wait=0))
        except LockNotAcquired:
            return False

    async def atry_acquire(self) -> bool:
        """See try_acquire()."""
        try:
            return bool(await self.aacquire(wait=0))
        except LockNotAcquired:
            return False

    def release(self, *, early: bool = False) -> bool:
        """Give the lock back; return whether it was still ours until then. Nothing to give back: False.

        early: also end its minimum hold (`min_hold`). It never frees a lock that somebody else holds. If MongoDB
        cannot be reached, the lock is given back in the background, at the latest when its lease ends.
        """
        try:
            return self._is_ours() and self._now().run(self._release(early))
        except BaseException:
            self._abandon()  # a signal may strike before the first line of the body
            raise

    async def arelease(self, *, early: bool = False) -> bool:
        """See release()."""
        try:
            return self._is_ours() and await self._now().arun(self._release(early))
        except BaseException:
            self._abandon()
            raise

    def extend(self, lease: float | None = None) -> None:
        """Push the end of the lease to *lease* seconds from now (its own length if not given); never nearer.

        A longer lease stays the lock's lease from then on. Raises LockLost if the lock is not held any more.
        """
        self._now().run(self._extend(lease))

    async def aextend(self, lease: float | None = None) -> None:
        """See extend()."""
        await self._now().arun(self._extend(lease))

    @overload
    def atomic(self, client: AsyncMongoClient[Any]) -> Atomic[AsyncClientSession]: ...
    @overload
    def atomic(self, client: MongoClient[Any] | None = None, *, using: str | None = None) -> Atomic[ClientSession]: ...
    def atomic(self, client: Any = None, *, using: str | None = None) -> Any:
        """A MongoDB transaction that commits only if the lock is still held: ``with lock.atomic(client) as session:``.

        client: of the MongoDB that keeps the lock. Only what is done with ``session=session`` is part of it. Where
        somebody has taken the lock over, leaving the block raises LockLost, and nothing was committed.

        It may also be aborted while the lock is held, because somebody joined the queue: LockTransactionAborted.
        Keep it short, or use `run_atomic`. It lasts at most as long as the server lets it (60 seconds by default).
        Works with ``async with`` too, for both kinds of clients. Raises LockMisused on a standalone server.

        Of a lock made by `mongo_lock`, without a *client*: the transaction of a DATABASES alias (*using*, else that of
        the lock), of which the ORM is a part as in `django_mongodb_backend.transaction.atomic`. With ``async with``,
        only what is done with the session is: the ORM works in other threads, which other tasks share.
        """
        if client is None:
            raise TypeError("atomic() needs a client of the MongoDB that keeps the lock")
        return Atomic(self, client)

    def run_atomic(self, work: Callable[[Any], T], /, *args: Any, limit: float = 30.0, **kwargs: Any) -> T:
        """Call *work* with the session of an `atomic` transaction, again while MongoDB aborts it; return its result.

        Other arguments go to `atomic`. *work* may run several times: what it does beside the transaction must stand
        that. limit: seconds after which the last error is raised rather than another attempt made.
        """
        schedule = RetrySchedule.until(limit)
        while True:
            try:
                with self.atomic(*args, **kwargs) as session:
                    return work(session)
            except Exception as error:
                if not is_transient(error) or (pause := schedule.next()) is None:
                    raise
                time.sleep(pause)

    async def arun_atomic(
        self, work: Callable[[Any], Awaitable[T]], /, *args: Any, limit: float = 30.0, **kwargs: Any
    ) -> T:
        """See run_atomic(). *work* is a coroutine function."""
        schedule = RetrySchedule.until(limit)
        while True:
            try:
                async with self.atomic(*args, **kwargs) as session:
                    return await work(session)
            except Exception as error:
                if not is_transient(error) or (pause := schedule.next()) is None:
                    raise
                await asyncio.sleep(pause)

    if not TYPE_CHECKING:  # type checkers find it by themselves

        def __call__(self, *args: object, **kwargs: object) -> None:
            """Tell who takes a lock for a decorator what is one."""
            raise TypeError("a lock is for a block, `with mongo_lock(...):`. On a function goes @mongo_locked(...)")

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        grants = self._grants
        if not self.release():
            self._report_loss(grants, error)
        return False

    async def __aenter__(self) -> Self:
        return await self.aacquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        grants = self._grants
        if not await self.arelease():
            self._report_loss(grants, error)
        return False

    # The bodies

    def _acquire(self, wait: float | Unset | None) -> Protocol[None]:
        limit = self.options.wait if isinstance(wait, Unset) else check_wait(wait)
        session = self._begin()
        started = session.now()
        grants: list[Grant] = []
        owner_tokens: list[OwnerToken] = []
        try:
            for key in self.keys:
                left = None if limit is None else max(0.0, limit - (session.now() - started))
                grants.append((yield from self._acquire_one(session, key, left, owner_tokens)))
            self._session, self._grants, self._owner_tokens = session, tuple(grants), tuple(owner_tokens)
            self._last = self._grants
            where = _calling_line()
            for grant in grants:
                grant.acquired_from = grant.acquired_from or where
        except LockNotAcquired:
            try:
                for grant in grants:
                    yield from self._release_one(session, grant)
            except BaseException:
                self._drop(session, grants)
                raise
            raise
        except BaseException:
            self._drop(session, grants)
            raise
        finally:
            self._busy.release()

    def _acquire_one(
        self, session: Session, key: str, wait: float | None, owner_tokens: list[OwnerToken]
    ) -> Protocol[Grant]:
        worker = _current_worker()
        if (mine := (yield from self._enter_again(session, key, worker))) is not None:
            owner_tokens.append(mine[1])
            return mine[0]
        grant = self._new_grant(session, key, worker)
        owner_tokens.append(session.owner_token(grant))
        acquisition = grant.acquisition
        now = grant.began
        deadline = protocol.FOREVER if wait is None else now + wait
        grant.back_by = deadline + session.command_timeout
        trial, answer = wait == 0, None
        try:
            self._wanted = grant
            turn = session.join(grant, trial=trial)
            if turn != "now":
                result = yield from protocol.wait_in_line(acquisition, turn, deadline, now)
                answer, now = result.answer, result.now
                trial = answer is None and now >= deadline
            session.expect(grant)
            granted = yield from protocol.acquire(
                acquisition, deadline, now, since=grant.began, trial=trial, answer=answer
            )
            session.acquired(grant, granted, granted.now - grant.began)
        except LockNotAcquired as error:
            error.template = grant.template
            session.leave(grant)
            # In this order: `finish_handover` writes the other two before it says that the hand-over is over.
            if grant.handover_reserved or grant.outcome_unknown or grant.answer is not None:
                session.abandon(grant)
            session.forget(grant)
            session.finish(grant)
            session.not_acquired(grant, error.why)
            raise
        except BaseException as error:
            session.leave(grant)
            # Nobody knows whether the last command took effect, or whether it still will.
            if grant.sent or grant.handover_reserved or grant.outcome_unknown or grant.answer is not None:
                session.abandon(grant)
            session.forget(grant)
            session.finish(grant)
            session.not_acquired(grant, type(error).__name__)
            raise
        finally:
            self._wanted = None
        return grant

    def _enter_again(self, session: Session, key: str, worker: object) -> Protocol[tuple[Grant, OwnerToken] | None]:
        """The grant of *key* that this thread or task holds, to be shared; None if it holds none.

        Raises LockReentry unless that is meant, and can be.
        """
        grant = session.held_by(key, worker)
        # Without an owner token it is about to be released by the heartbeat, whatever enters it now.
        if grant is None or not grant.held or grant.owner_ref is None or (owner_token := grant.owner_ref()) is None:
            return None
        same = (grant.terms.mode, grant.terms.capacity) == (self.options.terms.mode, self.options.terms.capacity)
        if not (self.options.reentrant and same):
            # It may have been taken away by force, which is not known yet.
            if (yield from protocol.confirm(grant.acquisition)):
                raise LockReentry(key)
            if grant.lose(TAKEN):
                session.lost(grant)
            return None
        grant.users += (id(self),)
        return grant, owner_token

    def _new_grant(self, session: Session, key: str, worker: object) -> Grant:
        terms, options = self.options.terms, self.options
        grant = session.new_grant(key, terms, worker, auto_renew=options.auto_renew, max_hold=options.max_hold)
        grant.template = options.templates.get(key, "")
        grant.users += (id(self),)
        grant.on_lost = _weakly(self, options.on_lost)
        grant.on_release_requested = _weakly(self, options.on_release_requested)
        grant.acquisition = protocol.Acquisition(
            key,
            grant.id,
            terms,
            session.id,
            session.name_worker(worker),
            "" if terms.owner is None else session.name_process(),
            self._facts(),
            whole=not options.auto_renew,
            nested=grant.nested,
            seconds_per_place=session.seconds_per_place(key),
        )
        return grant

    def _release(self, early: bool = False) -> Protocol[bool]:
        session, grants = self._now(), self._grants
        ours = bool(grants)
        try:
            for grant in grants:
                ours &= yield from self._release_one(session, grant, early)
        except BaseException:
            self._drop(session, grants)
            raise
        finally:
            self._grants, self._owner_tokens = (), ()
        return ours

    def _release_one(self, session: Session, grant: Grant, early: bool = False) -> Protocol[bool]:
        """Give one grant back, unless another lock object of this thread or task shares it. Was it still ours?"""
        grant.used_no_more(id(self))
        if grant.users:
            return grant.held
        if not grant.release():
            session.lost(grant)
            return False
        # While a hand-over to it is reserved, a command that queues it is on its way: that must not queue it again.
        outcome_unknown = grant.handover_reserved or grant.outcome_unknown
        stays = grant.terms.min_hold > 0 and not early
        next_waiter = session.reserve_handover(grant)
        try:
            if next_waiter is None:
                was_there = yield from protocol.release(
                    grant.key, grant.id, uncontended=grant.uncontended, stays=stays, leave_tombstone=outcome_unknown
                )
            else:
                was_there = yield from self._hand_over(
                    session, grant, next_waiter, stays=stays, leave_tombstone=outcome_unknown
                )
            grant.outcome_unknown = outcome_unknown  # for `lost`, if it was not there any more
        except LockBackendFailed as error:
            log(WARNING, "release postponed", key=grant.key, error=error)
            session.abandon(grant, stays=stays)
            was_there = True
        if was_there:
            session.released(grant)
        else:
            grant.missed(TAKEN)
            session.lost(grant)
        return was_there

    def _hand_over(
        self, session: Session, grant: Grant, next_waiter: Grant, *, stays: bool, leave_tombstone: bool
    ) -> Protocol[bool]:
        """Give the grant back and put the next of this process into the queue, in one command."""
        answer = None
        try:
            answer = yield from protocol.hand_over(
                next_waiter.acquisition, grant.id, stays=stays, leave_tombstone=leave_tombstone
            )
        finally:
            session.finish_handover(next_waiter, answer)
        return answer is not None

    def _extend(self, lease: float | None) -> Protocol[None]:
        if lease is not None:
            check_seconds("lease", lease)
        session = self._now()
        self.ensure_held()
        for grant in self._grants:
            length = max(lease or 0.0, grant.lease)
            server_lease = milliseconds(grant.terms.server_lease_of(length))
            answer = yield from protocol.extend(grant.key, grant.id, milliseconds(length), server_lease)
            if not answer.reply.held:
                grant.lose(TAKEN)
                session.lost(grant)
                raise self._loss(self._grants)
            if answer.whole:
                grant.renewed(answer.sent + length, answer.now, length)
        self.ensure_held()

    # Helpers

    def _now(self) -> Session:
        """The session that this object's grants belong to; without any, that of this process."""
        if self._grants and self._session is not None and self._is_ours():
            return self._session
        return self._session_now()

    def _begin(self) -> Session:
        if not self._busy.acquire(blocking=False):
            raise LockMisused("this lock object is being acquired elsewhere: make a fresh one for every use")
        if self._grants and self._is_ours():
            self._busy.release()
            raise LockMisused("this lock object is in use: release it first, or make a fresh one for every use")
        self._grants = self._last = self._owner_tokens = ()
        return self._session_now()

    def _is_ours(self) -> bool:
        """Do the grants belong to this process, rather than to the one that it was forked from?"""
        return self._session is not None and self._session.pid == os.getpid()

    def _abandon(self) -> None:
        """Drop what this thread or task has acquired through this object without the caller's knowing."""
        grants = [grant for grant in self._grants if grant.worker is _current_worker()]
        if grants and self._session is not None:
            self._grants, self._owner_tokens = (), ()
            self._drop(self._session, grants)

    def _drop(self, session: Session, grants: Iterable[Grant]) -> None:
        """Have grants removed in the background. May be called again for the same ones."""
        for grant in grants:
            grant.used_no_more(id(self))
            if not grant.users:
                session.abandon(grant)

    def _all_held(self, grants: tuple[Grant, ...]) -> bool:
        """Is there something in *grants*, and all of it held? They are read from the lock once: another thread may
        release it meanwhile, and of no grants at all it would be true that all are held."""
        return bool(grants) and self._is_ours() and all(grant.held for grant in grants)

    def _acquired(self) -> tuple[Grant, ...]:
        grants = self._last
        if not grants:
            raise LockMisused("this lock was not acquired")
        return grants

    def _only(self, items: tuple[T, ...]) -> T:
        if len(items) != 1:
            raise LockMisused("this lock is on several keys: use `keys` and `fencing_tokens`")
        return items[0]

    def _loss(self, grants: tuple[Grant, ...]) -> LockError:
        """The error that tells why one of *grants* is not held."""
        if not grants:
            return LockMisused("this lock is not acquired")
        if not self._is_ours():
            return LockLost(grants[0].key, grants[0].token, "a forked child does not hold its parent's locks")
        gone = [grant for grant in grants if not grant.held]
        # One that was given back along with a lost one is not what was lost.
        grant = next((grant for grant in gone if grant.state is State.LOST), (*gone, *grants)[0])
        return LockLost(grant.key, grant.token, grant.reason)

    def _report_loss(self, grants: tuple[Grant, ...], error: BaseException | None) -> None:
        """On leaving the block: say that the lock was lost, without hiding what the block itself raised."""
        if not grants or not self._is_ours():
            return
        if error is None:
            raise self._loss(grants)
        error.add_note(str(self._loss(grants)))


def _weakly(lock: MongoLock, callback: Callable[[MongoLock], object] | None) -> Callback | None:
    """*callback* with *lock*, without keeping the lock from being collected until there is something to tell."""
    if callback is None:
        return None
    reference = weakref.ref(lock)

    def bind() -> Callable[[], object] | None:
        found = reference()
        return None if found is None else functools.partial(callback, found)

    return bind


def _calling_line() -> str:
    """File and line of the program that called into the library: the nearest that is not part of it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _current_worker() -> object:
    """Who would wait for itself: the running task, or else the thread.

    The task by a weak reference, of which there is one: its result may be the lock, which would then never be dropped.
    """
    task = _current_task()
    return threading.current_thread() if task is None else weakref.ref(task)


def _current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def check_seconds(name: str, value: object) -> float:
    """Return *value* if it is a number of seconds above 0. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    if not 0 < value < _LONGEST:
        raise ValueError(f"{name} must be more than 0 and less than {_LONGEST} seconds, not {value!s:.20}")
    return float(value)


def check_wait(value: object) -> float | None:
    """Return *value* if it is a time to wait: seconds, 0 for a single try, None without end."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not 0 <= value < _LONGEST:
        raise ValueError(f"wait is 0 for a single try, or seconds, or None for a wait without end, not {value!s:.20}")
    return 0.0 if value == 0 and not isinstance(value, bool) else check_seconds("wait", value)
