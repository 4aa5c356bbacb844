"""Leader election: one of all processes leads. When it cannot go on, another one does."""

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
#: The cure for returning work that has not begun.
CURE: Final = "it has to be done in the term; for coroutine functions there is arun()"
#: Seconds between two looks of a term's thread at its lock. The thread shares nothing with the callbacks of other
#: locks, because those may take their time (F112).
LOOK_EVERY: Final = 0.1


class BaseTerm:
    """The time for which a process leads, from its election until its work has to stop.

    - lock: lock by which the process leads. The lock stays held until the block has been left, unless it is lost by
      force or because this process was paused.
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
        """Seconds for which the work may go on if the lease is not renewed. `PART` of the lease is left after that."""
        return self.lock.remaining - self.lock.terms.lease * PART

    def end(self) -> None:
        """Tell the work to stop by setting `ended`. The lock is released when the block has been left."""
        self._over.set()

    def watch(self) -> None:
        """Start a thread that ends the term when its lock is lost, requested, or was not renewed for too long."""
        watched = weakref.ref(self), self._over  # weakly: a dropped term must not keep its lock
        threading.Thread(target=_watch, args=watched, name="mongolock-term", daemon=True).start()


class Term(BaseTerm):
    """A term with an event. See BaseTerm."""

    @property
    def ended(self) -> threading.Event:
        """The event that is set when the work has to stop.

        Look at it between two steps, or wait on it instead of sleeping.
        """
        return self._over


class AsyncTerm(BaseTerm):
    """A term in a coroutine. See Term.

    - ended: `asyncio.Event`.
    """

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
    """A candidate for leadership: see `leader`. One term at a time. Make one for each thread or task."""

    def __init__(self, new_lock: Callable[[], MongoLock]) -> None:
        self.key = new_lock().key
        self._new_lock = new_lock
        self._term: BaseTerm | None = None

    def run(self, work: Callable[[Term], T]) -> T:
        """Call *work* with the term whenever elected, until it returns within its term. Return its result.

        If the term ends before, *work* has to return, and this process stands for election again. Errors of *work* are
        raised, except the loss of this lock, or a group of nothing else.
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
        """Swallow the loss of the lock within the block, so that the leader stands for election again."""
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
        """End the term. Return its lock, still to be released."""
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

    The call waits to be elected, first come, first served. If *wait* ends the wait, the call raises LockNotAcquired.
    Without *wait*, the wait has no end.

    - lease, wait, label, using: as in `mongo_lock`.

    The work has to stop when the term ends (`Term.ended`). A term ends when the lease was not renewed until a third of
    it is left, when a release is requested, when the lock is lost, and at the end of the block. The lock is released
    when the block has been left, and not before. With a LEASE of 30 seconds, 10 seconds are left to stop. The next
    leader begins 3 seconds later at the earliest. After a forced release, or while this process is paused, the next
    leader may begin at once. Fence the writes with `Term.fencing_token`.

    A block stands for election once. `run` and `arun` stand again.
    """
    given = {"lease": lease, "wait": wait, "label": label, "using": using}
    options = replace(chosen({**given, **unknown}, given), release="now", whole=True)
    # The term looks at its lock. Only a lock with a function for requests hears of them at once.
    return Leader(partial(make_lock, (key,), replace(options, on_release_requested=lambda _: None)))
