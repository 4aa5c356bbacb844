"""`leader`: of all processes one leads, and when it cannot go on, another one does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

from asgiref.sync import iscoroutinefunction

from .engine.lock import MongoLock
from .engine.options import Seconds
from .exceptions import LockLost, LockMisused
from .locks import Key, check_options, mongo_lock

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
        self._awaited: asyncio.Future[None] | None = None
        self._ending = threading.RLock()
        self._on_stop = on_stop
        self.lock = new_lock(on_lost=lambda _: self.end(), on_release_requested=lambda _: self.end())

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
        await asyncio.wait([self.over()], timeout=seconds)
        return self.held

    def over(self) -> asyncio.Future[None]:
        """A future of the running event loop that is done when the work has to stop."""
        if self._awaited is None:
            self._awaited = asyncio.wrap_future(self._ended)
        return self._awaited

    def end(self) -> None:
        """Have the work stop. Returns when on_stop has returned."""
        with self._ending:  # another thread may be in on_stop
            if not self._ended.done():
                self._ended.set_result(None)
                if self._on_stop is not None:
                    self._on_stop(self)

    def _watch(self) -> None:
        """End the term when the lease was not renewed for so long that only `PART` of it is left."""
        while (left := self.lock.remaining - self.lock.options.terms.lease * PART) > 0:
            if wait([self._ended], left).done:
                return
        self.end()


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
                    both: set[asyncio.Future[Any]] = {task, term.over()}
                    try:
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                        if task.done() and term.held:
                            return task.result()
                    finally:
                        task.cancel()
                        await asyncio.wait([task])
                    if not task.cancelled():
                        task.result()  # raises its error

    def __enter__(self) -> Term:
        term = self._new_term()
        term.lock.acquire()
        try:
            self._begin(term)
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
            self._begin(term)
        except BaseException:
            await (await asyncio.to_thread(self._end)).lock.arelease()
            raise
        return term

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        term = await asyncio.to_thread(self._end)  # on_stop may need the event loop
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

    def _begin(self, term: Term) -> None:
        self._term = term
        threading.Thread(target=term._watch, name="mongolock-term", daemon=True).start()
        if self._on_start is not None:
            self._on_start(term)

    def _end(self) -> Term:
        if (term := self._term) is None:
            raise LockMisused("this leader is not in a term")
        self._term = None
        term.end()
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
    new_lock = functools.partial(
        mongo_lock,
        key,
        lease=options.get("lease"),
        wait=options.get("wait"),
        label=options.get("label", "leader"),
        release="now",
        using=options.get("using"),
    )
    return Leader(new_lock, on_start, on_stop)
