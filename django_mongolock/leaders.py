"""`leader`: of all processes one leads, and when it cannot go on, another one does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Never, TypeVar

from asgiref.sync import iscoroutinefunction

from .engine.lock.lock import MongoLock
from .engine.lock.transaction import finished, leaves, outlast
from .engine.rule.options import Seconds
from .exceptions import LockLost, LockMisused
from .locks import Key, chosen, make_lock

__all__ = ["AsyncTerm", "Leader", "Term", "leader"]

T = TypeVar("T")
AnyTerm = TypeVar("AnyTerm", bound="BaseTerm")
#: The part of a lease that is left for the work to stop when the lease was not renewed.
PART: Final = 1 / 3
#: What to do instead of returning work that has not begun.
CURE: Final = "it has to be done in the term; for coroutine functions there is arun()"
#: How often the thread of a term looks at its lock, in seconds. It shares nothing with the callbacks of other locks,
#: which may take their time (F112).
LOOK_EVERY: Final = 0.1


class BaseTerm:
    """The time for which a process leads: from its election until its work has to stop.

    lock: the lock by which it leads. It stays held until the block has been left, unless it is lost: by force, or
    because this process was paused.
    """

    def __init__(self, lock: MongoLock) -> None:
        self._over = threading.Event()
        self.lock = lock

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key!r}, {'leading' if self.held else 'over'}>"

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self.lock.key

    @property
    def held(self) -> bool:
        """Whether the work may go on: the term has not ended, and the lock is held."""
        return not self._over.is_set() and self.lock.held

    @property
    def fencing_token(self) -> int:
        """A number larger than that of every earlier term."""
        return self.lock.fencing_token

    @property
    def left(self) -> float:
        """For how many seconds the work may go on if the lease is not renewed: `PART` of it is left then."""
        return self.lock.remaining - self.lock.terms.lease * PART

    def end(self) -> None:
        """Have the work stop: set `ended`. The lock is released when the block has been left."""
        self._over.set()

    def watch(self) -> None:
        """End the term, from a thread of its own, when its lock is lost, requested, or was not renewed for too long."""
        watched = weakref.ref(self), self._over  # weakly: a dropped term must not be what keeps its lock
        threading.Thread(target=_watch, args=watched, name="mongolock-term", daemon=True).start()


class Term(BaseTerm):
    """See BaseTerm. ended: an event that is set when the work has to stop."""

    @property
    def ended(self) -> threading.Event:
        """Set when the work has to stop: look at it between two steps, or wait on it instead of sleeping."""
        return self._over


class AsyncTerm(BaseTerm):
    """A term in a coroutine: see Term. ended: an `asyncio.Event`."""

    def __init__(self, lock: MongoLock) -> None:
        super().__init__(lock)
        self._loop = asyncio.get_running_loop()
        #: Set when the work has to stop.
        self.ended = asyncio.Event()

    def end(self) -> None:
        """See BaseTerm.end()."""
        super().end()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.ended.set)


def _watch(weak: weakref.ref[BaseTerm], over: threading.Event) -> None:
    while (term := weak()) is not None:
        if (left := term.left) <= 0 or term.lock.release_requested is not None:
            term.end()
        del term
        if over.wait(min(left, LOOK_EVERY)):
            break


class Leader:
    """Stands for election: see `leader`. One term at a time; make one for each thread or task."""

    def __init__(self, new_lock: Callable[[], MongoLock]) -> None:
        self.key = new_lock().key
        self._new_lock = new_lock
        self._term: BaseTerm | None = None

    def run(self, work: Callable[[Term], T]) -> T:
        """Call *work* with the term whenever elected, until it returns in its term; return its result.

        If the term ends before, *work* has to return, and this process stands for election again. What *work* raises
        is raised, unless it is the loss of this lock, or a group of nothing else.
        """
        if iscoroutinefunction(work) or not callable(work):
            raise TypeError("run() calls a function with the term; for a coroutine function there is arun()")
        while True:
            with self._standing(), self as term:
                result = finished(work(term), "the work", CURE)
                if term.held:
                    return result

    async def arun(self, work: Callable[[AsyncTerm], Awaitable[T]]) -> T:
        """See run(). The task of *work* is cancelled when the term ends."""
        if not callable(work):
            raise TypeError("arun() calls a coroutine function with the term")
        while True:
            with self._standing():
                async with self as term:
                    task = asyncio.ensure_future(work(term))
                    ended = asyncio.ensure_future(term.ended.wait())
                    both: set[asyncio.Future[Any]] = {task, ended}
                    try:
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                        if task.done() and term.held:
                            return finished(task.result(), "the work", CURE)
                    finally:
                        term.end()
                        ended.cancel()
                        task.cancel()
                        await outlast(task)
                    if not task.cancelled():
                        task.result()  # raises its error

    def __enter__(self) -> Term:
        term = self._new_term(Term)
        term.lock.acquire()
        try:
            return self._begin(term)
        except BaseException:
            term.lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return self._end().__exit__(kind, error, traceback)

    async def __aenter__(self) -> AsyncTerm:
        term = self._new_term(AsyncTerm)
        await term.lock.aacquire()
        try:
            return self._begin(term)
        except BaseException:
            await term.lock.arelease()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return await self._end().__aexit__(kind, error, traceback)

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        """Swallow the loss of the lock in the block, which stands for election again."""
        try:
            yield
        except (LockLost, BaseExceptionGroup) as error:
            if not all(isinstance(leaf, LockLost) and leaf.key == self.key for leaf in leaves(error)):
                raise

    def _new_term(self, kind: type[AnyTerm]) -> AnyTerm:
        if self._term is not None:
            raise LockMisused("this leader is in use: make a new one for each thread or task")
        return kind(self._new_lock())

    def _begin(self, term: AnyTerm) -> AnyTerm:
        term.watch()
        self._term = term
        return term

    def _end(self) -> MongoLock:
        """End the term; return its lock, which is to be released."""
        if (term := self._term) is None:
            raise LockMisused("this leader is not in a term")
        self._term = None
        term.end()
        return term.lock


def leader(
    key: Key,
    *,
    lease: Seconds | None = None,
    wait: Seconds | None = None,
    label: str | None = "leader",
    using: str | None = None,
    **unknown: Never,
) -> Leader:
    """Lead under *key*, as one of all processes: ``with leader("scheduler") as term:``, `Leader.run`, or async.

    It waits to be elected, without end unless wait= says (then LockNotAcquired), first come, first served. lease, wait,
    label, using: those of `mongo_lock`.

    The work has to stop when the term ends (`Term.ended`): when the lease was not renewed until a third of it is left,
    when a release is requested, when the lock is lost, and at the end of the block. The lock is released when the block
    has been left, and not before. Of 30 seconds of LEASE, 10 are left to stop, and the next leader begins 3 seconds
    later at the earliest. After a forced release, or while this process is paused, the next one may begin at once:
    fence what it writes (`Term.fencing_token`).

    A block stands for election once. `run` and `arun` stand again.
    """
    given = {"lease": lease, "wait": wait, "label": label, "using": using}
    options = replace(chosen({**given, **unknown}, given), release="now", whole=True)
    # The term looks at its lock. But only a lock with a function for requests hears of them at once.
    return Leader(partial(make_lock, (key,), replace(options, on_release_requested=lambda _: None)))
