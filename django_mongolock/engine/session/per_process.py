"""The session of this process: made when it is first asked for, another one after a fork, closed at exit."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from .session import Session

S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """Hands out the session of this process: a new one after a fork, since the parent's locks are not the child's."""

    _all: ClassVar[weakref.WeakSet[Sessions[Any]]] = weakref.WeakSet()
    _mutex = threading.Lock()
    #: Sessions of the parent, kept so that nothing of them is finalized in the child.
    _inherited: ClassVar[list[Session]] = []

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._session: S | None = None
        with Sessions._mutex:
            Sessions._all.add(self)

    def current(self) -> S:
        session = self._session
        if session is not None and session.pid == os.getpid():
            return session
        # Not under the mutex: what is imported on the way may start a program, and under gevent that is a fork.
        made = self._make()
        with Sessions._mutex:
            if self._session is None or self._session.pid != os.getpid():
                self._session = made
            return self._session

    def close(self) -> None:
        """Close the session of this process; the next `current` opens another."""
        session, self._session = self._session, None
        if session is not None and session.pid == os.getpid():
            session.close()

    @classmethod
    def close_all(cls) -> None:
        for sessions in list(cls._all):
            sessions.close()

    @classmethod
    def _before_fork(cls) -> None:
        cls._mutex.acquire()

    @classmethod
    def _after_fork_in_parent(cls) -> None:
        cls._mutex.release()

    @classmethod
    def _after_fork_in_child(cls) -> None:
        cls._mutex = threading.Lock()
        for sessions in list(cls._all):
            if sessions._session is not None:
                cls._inherited.append(sessions._session)
                sessions._session = None


os.register_at_fork(
    before=Sessions._before_fork,
    after_in_parent=Sessions._after_fork_in_parent,
    after_in_child=Sessions._after_fork_in_child,
)
atexit.register(Sessions.close_all)
