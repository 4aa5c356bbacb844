"""What each process has of its own: made when it is first needed, and made again in a forked child."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from .session import Session

T = TypeVar("T")
S = TypeVar("S", bound=Session)


class PerProcess(Generic[T]):
    """A value of each process: a forked child makes its own, and does not use its parent's."""

    _all: ClassVar[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()
    _mutex = threading.Lock()
    #: Values of the parent, kept so that nothing of them is finalized in the child.
    _inherited: ClassVar[list[Any]] = []

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None
        with PerProcess._mutex:
            PerProcess._all.add(self)

    def current(self) -> T:
        """Return the value of this process."""
        made = self._made
        if made is not None and made[0] == os.getpid():
            return made[1]
        # Not under the mutex: what is imported on the way may start a program, and under gevent that is a fork.
        made = os.getpid(), self._make()
        with PerProcess._mutex:
            if self._made is None or self._made[0] != os.getpid():
                self._made = made
            return self._made[1]

    @classmethod
    def _before_fork(cls) -> None:
        PerProcess._mutex.acquire()

    @classmethod
    def _after_fork_in_parent(cls) -> None:
        PerProcess._mutex.release()

    @classmethod
    def _after_fork_in_child(cls) -> None:
        PerProcess._mutex = threading.Lock()
        for each in list(cls._all):
            if each._made is not None:
                cls._inherited.append(each._made[1])
                each._made = None


class Sessions(PerProcess[S]):
    """The session of each process, since the parent's locks are not the child's. Closed at exit."""

    def close(self) -> None:
        """Close the session of this process; the next `current` opens another."""
        made, self._made = self._made, None
        if made is not None and made[0] == os.getpid():
            made[1].close()

    @classmethod
    def close_all(cls) -> None:
        for each in list(cls._all):
            if isinstance(each, Sessions):
                each.close()


os.register_at_fork(
    before=PerProcess._before_fork,
    after_in_parent=PerProcess._after_fork_in_parent,
    after_in_child=PerProcess._after_fork_in_child,
)
atexit.register(Sessions.close_all)
