"""`leader`: of all processes one leads, and when it cannot go on, another one does."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

from asgiref.sync import iscoroutinefunction

from .engine.lock import MongoLock
from .engine.options import Seconds
from .exceptions import LockLost, LockMisused
from .locks import Key, check_options, make_lock

__all__ = ["Leader", "Term"]

T = TypeVar("T")
#: The part of a lease that is left for the work to stop when the lease was not renewed.
PART: Final = 1 / 3


class LeaderOptions(TypedDict, total=False):
    """The options of `leader`: see `mongo_lock`."""

    lease: Seconds | None
    wait: Seconds | None
    label: str | None
    using: str | None


class Term:
    """The time for which a process leads: from its election until its work has to stop.

    lock: the lock by which it leads. It is still held when the term ends, unless it was lost at once: by force, or
    because this process was paused.
    """

    def __init__(self, new_lock: Callable[..., MongoLock], on_stop: Callable[[Term], object] | None) -> None:
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._awaited: asyncio.Future[None] | None = None
        self._calling = threading.RLock()
        self._on_stop = on_stop
        self._to_be_stopped = False
        # Weakly, as in `_watch`: a term that nobody has any more must not be what keeps its lock.
        end = weakref.WeakMethod(self.end)
        self.lock = new_lock(on_lost=lambda _: _call(end), on_release_requested=lambda _: _call(end))

    def __repr__(self) -> str:
        return f"<Term {self.key!r}, {'leading' if self.held else 'over'}>"

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self.lock.key

    @property
    def held(self) -> bool:
        """Whether the work may go on. False from the moment on when it has to stop, while the lock is still held."""
        return not self._ended.done() and self.lock.held

    @property
    def fencing_token(self) -> int:
        """A number larger than that of every earlier term."""
        return self.lock.fencing_token

    @property
    def since(self) -> datetime:
        """When this process was elected, by the server's clock."""
        return self.lock.acquired_at

    def sleep(self, seconds: float) -> bool:
        """Sleep for so long, or until the work has to stop; return whether it may go on."""
        wait([self._ended], seconds)
        return self.held

    async def asleep(self, seconds: float) -> bool:
        """See sleep()."""
        await asyncio.wait([self._future()], timeout=seconds)
        return self.held

    def over(self) -> asyncio.Future[None]:
        """A future of the running event loop that is done when the work has to stop."""
        return asyncio.shield(self._future())

    def _future(self) -> asyncio.Future[None]:
        """The one of the running event loop. Do not cancel it."""
        if self._awaited is None:
            self._awaited = asyncio.wrap_future(self._ended)
        return self._awaited

    def begin(self, on_start: Callable[[Term], object] | None) -> None:
        """Call on_start, unless the work has to stop already; then on_stop is not called either."""
        watched = weakref.ref(self), self._ended
        threading.Thread(target=_watch, args=watched, name="mongolock-term", daemon=True).start()
        with self._calling:
            self._to_be_stopped = self.held
            if self._to_be_stopped and on_start is not None:
                on_start(self)

    def end(self) -> None:
        """Have the work stop. Returns when on_stop has returned."""
        with contextlib.suppress(InvalidStateError):
            self._ended.set_result(None)
        with self._calling:  # another thread may be in on_start or on_stop
            calls, self._to_be_stopped = self._to_be_stopped, False
            if calls and self._on_stop is not None:
                self._on_stop(self)

    @property
    def left(self) -> float:
        """For how many seconds the work may go on if the lease is not renewed: `PART` of it is left then."""
        return self.lock.remaining - self.lock.options.terms.lease * PART


def _call(weak: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (method := weak()) is not None:
        method()


def _watch(weak: weakref.ref[Term], ended: Future[None]) -> None:
    """End the term when its lease was not renewed for too long."""
    while (term := weak()) is not None:
        if (left := term.left) <= 0:
            term.end()
            break
        del term
        if wait([ended], left).done:
            break


async def _outlast(task: asyncio.Future[Any]) -> None:
    """Wait until *task* is done. A cancellation meanwhile is raised after that."""
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


class Leader:
    """Stands for election: see `leader`. One term at a time; make one for each thread or task."""

    def __init__(
        self,
        new_lock: Callable[..., MongoLock],
        on_start: Callable[[Term], object] | None,
        on_stop: Callable[[Term], object] | None,
    ) -> None:
        self.key = new_lock().key
        self._new_lock = new_lock
        self._on_start = on_start
        self._on_stop = on_stop
        self._term: Term | None = None

    def run(self, work: Callable[[Term], T]) -> T:
        """Call *work* with the term whenever elected, until it returns in its term; return its result.

        If the term ends before, *work* has to return, and this process stands for election again. What *work* raises
        is raised, unless it is the loss of this lock.
        """
        if iscoroutinefunction(work) or not callable(work):
            raise TypeError("run() calls a function with the term; for a coroutine function there is arun()")
        while True:
            with self._standing(), self as term:
                result = work(term)
                if term.held:
                    return result

    async def arun(self, work: Callable[[Term], Awaitable[T]]) -> T:
        """See run(). The task of *work* is cancelled when the term ends."""
        if not callable(work):
            raise TypeError("arun() calls a coroutine function with the term")
        while True:
            with self._standing():
                async with self as term:
                    task = asyncio.ensure_future(work(term))
                    both: set[asyncio.Future[Any]] = {task, term._future()}
                    try:
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                        if task.done() and term.held:
                            return task.result()
                    finally:
                        task.cancel()
                        await _outlast(task)
                    if not task.cancelled():
                        task.result()  # raises its error

    def __enter__(self) -> Term:
        term = self._new_term()
        term.lock.acquire()
        try:
            self._term = term
            term.begin(self._on_start)
        except BaseException:
            self._end().lock.release()
            raise
        return term

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return self._end().lock.__exit__(kind, error, traceback)

    async def __aenter__(self) -> Term:
        term = self._new_term()
        await term.lock.aacquire()
        try:
            self._term = term
            term.begin(self._on_start)
        except BaseException:
            await (await self._aend()).lock.arelease()
            raise
        return term

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        term = await self._aend()
        return await term.lock.__aexit__(kind, error, traceback)

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        """Swallow the loss of the lock in the block, which stands for election again."""
        try:
            yield
        except LockLost as error:
            if error.key != self.key:
                raise

    def _new_term(self) -> Term:
        if self._term is not None:
            raise LockMisused("this leader is in use: make a new one for each thread or task")
        return Term(self._new_lock, self._on_stop)

    def _take_term(self) -> Term:
        if (term := self._term) is None:
            raise LockMisused("this leader is not in a term")
        self._term = None
        return term

    def _end(self) -> Term:
        """End the term. If on_stop fails, its lock is released."""
        term = self._take_term()
        try:
            term.end()
        except BaseException:
            term.lock.release()
            raise
        return term

    async def _aend(self) -> Term:
        """See _end(). on_stop is called by another thread, as it may need the event loop."""
        term = self._take_term()
        call = contextvars.copy_context().run
        ending = asyncio.get_running_loop().run_in_executor(None, call, term.end)
        try:
            await _outlast(ending)
            ending.result()
        except BaseException:
            await term.lock.arelease()
            raise
        return term


def leader(
    key: Key,
    *,
    on_start: Callable[[Term], object] | None = None,
    on_stop: Callable[[Term], object] | None = None,
    **options: Unpack[LeaderOptions],
) -> Leader:
    """Lead under *key*, as one of all processes: ``with leader("scheduler") as term:``, `Leader.run`, or async.

    It waits to be elected, without end unless wait= says (then LockNotAcquired), first come, first served. options:
    lease, wait, label and using of `mongo_lock`.

    The work has to stop when the term ends (`Term.held`, `Term.sleep`): when the lease was not renewed until a third of
    it is left, when a release is requested, when the lock is lost, and at the end of the block. on_stop is called then,
    once, with the term, by another thread as a rule; on_start when it was elected. Of 30 seconds of LEASE, 10 are left
    to stop, and the next leader begins 3 seconds later at the earliest. After a forced release, or while this process
    is paused, the next one may begin at once: fence what it writes (`Term.fencing_token`).

    A block stands for election once. `run` and `arun` stand again.
    """
    check_options(options, [*LeaderOptions.__annotations__, "on_start", "on_stop"])
    for name, callback in (("on_start", on_start), ("on_stop", on_stop)):
        if callback is not None and not callable(callback):
            raise TypeError(f"{name} must be a function that takes the term, not {type(callback).__name__}")
    own = {"wait": None, "label": "leader", "release": "now", **options}

    def new_lock(**callbacks: Any) -> MongoLock:
        return make_lock((key,), "exclusive", 1, {**own, **callbacks}, whole=True)

    return Leader(new_lock, on_start, on_stop)
