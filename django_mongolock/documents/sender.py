"""Has the commands of document locks sent: bounded, majority-committed, and out of the reach of signal handlers."""

from __future__ import annotations

import functools
import math
import os
import threading
from typing import Any, Final, TypeVar

import pymongo
from bson.codec_options import DatetimeConversion
from pymongo import ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError, WriteConcernError
from pymongo.read_concern import ReadConcern

from ..engine import runner
from ..engine.session.worker_threads import WorkerThreads
from ..exceptions import LockBackendFailed, LockMisused
from .background import in_background
from .steps import Action, Call, Later, Send, Steps
from .updates import Document

T = TypeVar("T")

#: Threads that send commands for coroutines and for the main thread.
THREADS: Final = 8
_threads = WorkerThreads(THREADS)


def _after_fork() -> None:
    """The threads of the parent do not exist in the child."""
    global _threads  # noqa: PLW0603 - one for each process
    _threads = WorkerThreads(THREADS)


os.register_at_fork(after_in_child=_after_fork)


def as_a_lock_must(collection: Collection[Document]) -> Collection[Document]:
    """The collection, reading and writing as a lock must, whatever its client was told. A date that Python cannot
    hold comes as another type: an answer that cannot be read would be a lock that nobody knows of."""
    return collection.with_options(
        codec_options=collection.codec_options.with_options(datetime_conversion=DatetimeConversion.DATETIME_AUTO),
        read_preference=ReadPreference.PRIMARY,
        write_concern=WriteConcern(w="majority"),
        read_concern=ReadConcern("majority"),
    )


class Sender:
    """Runs steps on one collection, each command bound to *timeout* seconds.

    What is asked for and held through it belongs to the process that has made it. In a child that this process forks,
    it sends nothing, neither now nor in the background.
    """

    def __init__(self, collection: Collection[Document], timeout: float) -> None:
        self._collection = as_a_lock_must(collection)
        self._timeout = timeout
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Are we a forked child of the process that it belongs to?"""
        return self._pid != os.getpid()

    def run(self, steps: Steps[T]) -> T:
        """Run *steps*, blocking. In the main thread another one sends the commands: see `engine.session.session`."""
        if threading.current_thread() is threading.main_thread():
            return runner.run(steps, self._act_elsewhere)
        return runner.run(steps, self._act)

    async def arun(self, steps: Steps[T]) -> T:
        """See run()."""
        return await runner.arun(steps, self._aact)

    def _act(self, action: Action, left: float = math.inf) -> Any:
        if isinstance(action, Later):
            return self._later(action)
        try:
            with pymongo.timeout(None if left == math.inf else left):
                return self._send(action.call)
        finally:
            self._ended(action)

    def _act_elsewhere(self, action: Action) -> Any:
        if isinstance(action, Later):
            return self._later(action)
        act, withdrawn = functools.partial(self._act, action), functools.partial(self._ended, action)
        return _threads.call(act, self._timeout, on_withdrawn=withdrawn)

    async def _aact(self, action: Action) -> Any:
        if isinstance(action, Later):
            return self._later(action)
        act, withdrawn = functools.partial(self._act, action), functools.partial(self._ended, action)
        return await _threads.acall(act, self._timeout, on_withdrawn=withdrawn)

    def _send(self, call: Call) -> Any:
        if self.forked:
            raise LockMisused("this was begun by another process: a forked child does not go on with it")
        try:
            with pymongo.timeout(self._timeout):
                return call(self._collection)
        except PyMongoError as error:
            raise problem(error, self._timeout) from _bare(error)

    def _later(self, later: Later) -> None:
        # Whoever comes second, this or the end of the command, has it done; if they meet, it is done twice.
        later.after.afterwards = later.call
        if later.after.done:
            self._in_background(later.call)

    def _ended(self, sent: Send) -> None:
        sent.done = True
        if sent.afterwards is not None:
            self._in_background(sent.afterwards)

    def _in_background(self, call: Call) -> None:
        if not self.forked:
            in_background(self._collection.full_name, lambda: bool(self._send(call)))


def problem(error: PyMongoError, timeout: float) -> LockBackendFailed:
    """Say in our own words what the driver met. Its words may hold the whole command, or a URI.

    `passing` tells that nobody knows whether the command took effect, so that it may be sent again.
    """
    name = str((getattr(error, "details", None) or {}).get("codeName", type(error).__name__))
    if isinstance(error, WriteConcernError):
        return LockBackendFailed(f"the majority of the replica set did not confirm in time ({name})")
    if isinstance(error, OperationFailure) and not error.timeout:
        again = error.has_error_label("RetryableWriteError")
        return LockBackendFailed(f"MongoDB refused the command (code {error.code}, {name})", passing=again)
    return LockBackendFailed(f"MongoDB did not answer within {timeout:.1f} s ({type(error).__name__})")


def _bare(error: PyMongoError) -> BaseException:
    """The error as it may be shown."""
    return OperationFailure(type(error).__name__, error.code) if isinstance(error, OperationFailure) else error
