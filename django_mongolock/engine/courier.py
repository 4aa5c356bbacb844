"""Sends commands to other collections than that of the locks: in bounded time, majority-committed, safe from signals.

What to send when is decided by generators, which neither wait nor send: `engine.runner` runs them.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from bson.codec_options import DatetimeConversion
from pymongo import ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from ..exceptions import LockBackendFailed, LockMisused
from . import clock, runner
from .driver_errors import bounded
from .field_paths import Document
from .logs import DEBUG, log, log_exception
from .session.per_process import PerProcess
from .session.worker_threads import WorkerThreads

T = TypeVar("T")
#: What is sent: a function of the collection. Outcome: what it returns.
Command = Callable[[Collection[Document]], Any]

#: How often a command is sent whose outcome is unknown, besides what the driver does by itself.
SENDS: Final = 2
#: Threads that send commands where there is no session.
SENDING_THREADS: Final = 8
#: Threads that send commands in the background. If so many are stuck, they delay others by `timeout` at most.
TRYING_THREADS: Final = 16
#: Seconds before each try in the background. A command that the network held up may arrive after the first ones; the
#: last one comes when a command that was under way at the first must have ended. While MongoDB does not answer, it is
#: tried again after the last of these pauses.
PAUSES: Final = (0.0, 0.1, 0.4, 1.0, 2.0, 5.0, 10.0)
#: How many tries without an answer there are at most; then what it was about is left.
MOST_TRIES: Final = 100
#: For how many seconds a process that ends waits for the first try of what it has left.
AT_EXIT: Final = 2.0


@dataclass(frozen=True, slots=True)
class Pause:
    """Send nothing for so many seconds."""

    seconds: float


Steps = Generator[Command | Pause, Any, T]


def send(command: Command, unanswered: list[BaseException] | None = None) -> Steps[Any]:
    """Send a command that may be sent again, until there is an answer. Raises LockBackendFailed.

    unanswered: gets the error of each copy that may have taken effect, or may do so yet (cancelled, struck by a signal,
    MongoDB away).
    """
    for rest in reversed(range(SENDS)):
        try:
            return (yield command)
        except BaseException as error:
            passing = error.passing if isinstance(error, LockBackendFailed) else None
            if unanswered is not None and passing is not False:
                unanswered.append(error)
            if not (passing and rest):
                raise
    raise AssertionError("not reached")


def as_a_lock_must(collection: Collection[Document]) -> Collection[Document]:
    """Return the collection, reading and writing as a lock must, whatever the options of its client.

    A date that Python cannot hold comes as another type: an error would hide a document that was granted.
    """
    return collection.with_options(
        codec_options=collection.codec_options.with_options(datetime_conversion=DatetimeConversion.DATETIME_AUTO),
        read_preference=ReadPreference.PRIMARY,
        write_concern=WriteConcern(w="majority"),
        read_concern=ReadConcern("majority"),
    )


class Courier:
    """Runs steps on one collection, each command bound to *timeout* seconds.

    threads: those of the session, for coroutines and for the main thread; without, some of its own. What is acquired
    through it belongs to the process that made it. In a child that this process forks, it sends nothing, neither at
    once nor in the background.
    """

    def __init__(
        self,
        collection: Collection[Document],
        timeout: float,
        threads: WorkerThreads | None = None,
        rights: str = "find and update",
    ) -> None:
        self._collection = as_a_lock_must(collection)
        self._threads = threads or _threads.current()
        self._rights = rights
        self._timeout = timeout
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made it."""
        return self._pid != os.getpid()

    def run(self, steps: Steps[T]) -> T:
        """Run *steps*, blocking. In the main thread another one sends the commands: see `engine.session.session`."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        send = self._send_elsewhere if in_main_thread else self.send
        return runner.run(steps, lambda step: time.sleep(step.seconds) if isinstance(step, Pause) else send(step))

    async def arun(self, steps: Steps[T]) -> T:
        """See run()."""
        return await runner.arun(
            steps, lambda step: asyncio.sleep(step.seconds) if isinstance(step, Pause) else self._asend(step)
        )

    def send_in_background(self, command: Command) -> None:
        """Have *command* sent by another thread, again after each of the pauses until it returns True."""
        if not self.forked:
            name, longest = self._collection.full_name, max(PAUSES[-1], self._timeout)
            _background.current().add(Task(name, lambda: bool(self.send(command)), (*PAUSES[:-1], longest)))

    def send(self, command: Command, left: float = math.inf) -> Any:
        """Send one command. left: at most so many seconds."""
        self._refuse_child()
        needs = f"{self._rights} on the collection {self._collection.full_name}"
        with bounded(min(left, self._timeout), self._collection.database.client, needs):
            return command(self._collection)

    def _refuse_child(self) -> None:
        if self.forked:
            raise LockMisused("another process started this: a forked child cannot continue it")

    def _send_elsewhere(self, command: Command) -> Any:
        self._refuse_child()  # these threads are the parent's
        return self._threads.call(functools.partial(self.send, command), self._timeout)

    async def _asend(self, command: Command) -> Any:
        self._refuse_child()
        return await self._threads.acall(functools.partial(self.send, command), self._timeout)


@dataclass(slots=True)
class Task:
    """Something to be tried until *attempt* returns True, after each of the pauses. name: where, for the log."""

    name: str
    attempt: Callable[[], bool]
    pauses: tuple[float, ...]
    due: float = 0.0
    tries: int = 0

    def try_once(self) -> bool:
        """Try it. Return whether it need not be tried again."""
        self.tries += 1
        answered = True
        try:
            done = self.attempt()
        except LockBackendFailed as error:
            log(DEBUG, "command not yet answered", place=self.name, error=error)
            done, answered = False, not error.passing
        except Exception:  # noqa: BLE001 - it is logged
            log_exception("a command in the background failed", place=self.name)
            done = False
        if len(self.pauses) == 1 and not answered and self.tries < MOST_TRIES:
            self.due = clock.now() + self.pauses[0]
            return False
        self.postpone()
        return done or self.due == math.inf

    def postpone(self) -> None:
        """Set when the next try is due."""
        self.due = clock.now() + self.pauses[0] if self.pauses else math.inf
        self.pauses = self.pauses[1:]


class Background:
    """Threads that try tasks again, started as they are needed: one waits, the others try. So what is stuck, such as a
    document that a transaction keeps, delays no other, unless there are `TRYING_THREADS` of them."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._threads = WorkerThreads(1 + TRYING_THREADS)
        #: One for each task that has not been tried yet.
        self._untried: list[None] = []

    def add(self, task: Task) -> None:
        """Have the task tried. Never waits: the caller may be handling a signal."""
        task.postpone()
        self._untried.append(None)
        self._tasks.put(task)
        if not len(self._threads):
            self._threads.submit(self._work)

    def flush(self, timeout: float) -> None:
        """Wait until each task has been tried once, at most *timeout* seconds."""
        end = clock.now() + timeout
        while self._untried and len(self._threads) and clock.now() < end:
            time.sleep(0.01)

    def _work(self) -> None:
        waiting: list[Task] = []
        while True:
            due = min((task.due for task in waiting), default=None)
            try:
                waiting.append(self._tasks.get(timeout=None if due is None else max(0.0, due - clock.now())))
            except Empty:
                now = clock.now()
                for task in waiting:
                    if task.due <= now and not self._threads.submit(functools.partial(self._try, task)):
                        self._try(task)
                waiting = [task for task in waiting if task.due > now]

    def _try(self, task: Task) -> None:
        first = not task.tries
        try:
            if not task.try_once():
                self._tasks.put(task)
        finally:
            if first:
                self._untried.pop()


_threads = PerProcess(lambda: WorkerThreads(SENDING_THREADS))
_background = PerProcess(Background)


def _flush_at_exit() -> None:
    """Let a process that is interrupted in the middle of a batch release what it has left."""
    _background.current().flush(AT_EXIT)


atexit.register(_flush_at_exit)
