"""Calls that wait for a thread of `worker_threads`, each of which is made once or withdrawn, never both."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from ...exceptions import LockBackendFailed
from ..logs import log_exception

T = TypeVar("T")

#: Seconds that a call which has begun may take longer than it was given, before it fails for its caller.
OVERTIME: Final = 1.0
#: The part of its timeout that a call needs to be begun. With less a command could only fail, without an answer to
#: whether it took effect; one that was never sent needs no cleaning up.
LEAST: Final = 0.05


class Call:
    """A call that waits for its turn. The first to lock `decided`, a thread or the owner, has decided about it.

    key: of this, only two calls are made at a time. priority: the lower, the sooner it is made. same: what it asks.
    Where another call that asks the same is made after this one was entered, the result may be passed on to this one,
    as the argument *known* of the call. since: when it was entered.
    """

    __slots__ = (
        "_call",
        "_least",
        "_on_withdrawn",
        "_until",
        "decided",
        "key",
        "lane",
        "priority",
        "same",
        "since",
    )

    def __init__(
        self,
        call: Callable[..., Any],
        timeout: float | None = None,
        *,
        priority: int = 0,
        key: str | None = None,
        same: object = None,
        on_withdrawn: Callable[[], object] | None = None,
    ) -> None:
        self.lane: Lane = OrderedDict()
        self.key, self.priority, self.same = key, priority, same
        self.since = time.monotonic()
        self.decided = _thread.allocate_lock()
        self._call = call
        self._until = self.since + seconds(timeout)
        self._least = 0.0 if timeout is None else LEAST * timeout
        self._on_withdrawn = on_withdrawn

    def begin(self, **known: object) -> object:
        """Make the call, unless it was taken back or comes too late: then its owner takes it back. Return its result,
        None if there is none."""
        left = self._until - time.monotonic()
        if left <= self._least or not self.decided.acquire(blocking=False):
            return None
        try:
            result: object = self._call(left, **known)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for; no variable here keeps it
            self._settle(None, error)
            return None
        self._settle(result, None)
        return result

    def take_back(self) -> bool:
        """Return whether it was not begun; it will not be then."""
        if not self.decided.acquire(blocking=False):
            return False
        self.lane.pop(self, None)
        return True

    def withdraw(self) -> bool:
        """Take it back, and say so to its owner."""
        if not self.take_back():
            return False
        if self._on_withdrawn is not None:
            self._on_withdrawn()
        return True

    def _settle(self, result: Any, error: BaseException | None) -> None:
        """Report the outcome to its caller. Without one there is nothing to do."""


#: Those that wait for their turn, in its order.
Lane = OrderedDict[Call, None]


class Blocking(Call, Generic[T]):
    """A call that a thread waits for, until `ended` can be locked."""

    __slots__ = ("_errors", "_results", "ended")

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self.ended = _thread.allocate_lock()
        self.ended.acquire()

    def _settle(self, result: T, error: BaseException | None) -> None:
        if error is None:
            self._results.append(result)
        else:
            self._errors.append(error)
        self.ended.release()

    def wait(self, timeout: float | None) -> T:
        """Return or raise what the call does."""
        if not self.ended.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            if self.withdraw():
                raise _not_begun(seconds(timeout))
            if not self.ended.acquire(timeout=OVERTIME):
                raise _not_ended(seconds(timeout))
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()


class Awaited(Call, Generic[T]):
    """A call that a coroutine waits for."""

    __slots__ = ("future", "loop")

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    def _settle(self, result: T, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits there
            self.loop.call_soon_threadsafe(_set_outcome, self.future, result, error)

    def expire(self, timeout: float) -> None:
        """The timeout is over. Called by the event loop."""
        if self.withdraw():
            _set_outcome(self.future, None, _not_begun(timeout))
        elif not self.future.done():
            self.loop.call_later(OVERTIME, _set_outcome, self.future, None, _not_ended(timeout))


def first(lane: Lane) -> Call | None:
    """Take out the first one, if there is one."""
    try:
        return lane.popitem(last=False)[0]
    except KeyError:
        return None


def seconds(timeout: float | None) -> float:
    """The timeout as a number."""
    return math.inf if timeout is None else timeout


def logged(call: Callable[[], object], left: float) -> None:
    """Make a call that no caller waits for."""
    try:
        call()
    except BaseException:  # noqa: BLE001 - it is logged, and the thread goes on
        log_exception("a call in the background failed")


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    """Set the outcome of a call, unless its caller waits for it no more."""
    if not future.done():
        future.set_result(result) if error is None else future.set_exception(error)


def _not_begun(timeout: float) -> LockBackendFailed:
    return LockBackendFailed(
        f"the command was not sent within {timeout:.1f} s: earlier ones, of this key or of many, are without an answer"
    )


def _not_ended(timeout: float) -> LockBackendFailed:
    return LockBackendFailed(f"the command was sent, but did not end within {timeout:.1f} s")
