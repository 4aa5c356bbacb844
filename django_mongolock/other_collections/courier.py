"""The sender of commands to other collections than that of the locks: in bounded time, majority-committed, safe from
signals.

Generators decide what to send when. A generator neither waits nor sends. `engine.protocol.actions` runs the generators.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from bson.codec_options import DatetimeConversion
from pymongo import ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from ..engine.protocol import actions
from ..engine.session.lanes import REQUEST
from ..engine.session.session import OutsideSession, Session, outside_session
from ..engine.store.errors import bounded
from ..exceptions import LockBackendFailed, LockMisused
from .field_paths import Document

T = TypeVar("T")
#: A function of the collection that sends a command. The outcome of the command is the function's result.
Command = Callable[[Collection[Document]], Any]

#: The number of times that a command with an unknown outcome is sent, besides the driver's own retries.
SENDS: Final = 2
#: Seconds before each try in the background. A command that the network delayed may arrive after the first tries. By
#: the last try, a command that was under way at the first must have ended. While MongoDB does not answer, the last
#: pause is repeated.
PAUSES: Final = (0.0, 0.1, 0.4, 1.0, 2.0, 5.0, 10.0)
#: The seconds that an ending process waits for its remaining commands.
AT_EXIT: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause of this many seconds without a command."""

    seconds: float


Steps = Generator[Command | Sleep, Any, T]


def send(command: Command, unanswered: list[BaseException] | None = None) -> Steps[Any]:
    """Send a command that may be sent again, until there is an answer. Raises LockBackendFailed.

    - unanswered: list for the error of each copy that may have taken effect, or still may (cancelled, struck by a
      signal, MongoDB away).
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
    """Return the collection with the read and write options that a lock needs, whatever the options of its client.

    A date that Python cannot hold comes as another type, because an error would hide a granted document.
    """
    return collection.with_options(
        codec_options=collection.codec_options.with_options(datetime_conversion=DatetimeConversion.DATETIME_AUTO),
        read_preference=ReadPreference.PRIMARY,
        write_concern=WriteConcern(w="majority"),
        read_concern=ReadConcern("majority"),
    )


class Courier:
    """The runner of steps on one collection. Each command takes at most *timeout* seconds.

    A document that is acquired through a courier belongs to the process that made the courier. In a forked child of
    that process, the courier sends nothing, neither at once nor in the background.

    - sender: session whose threads send the commands. Default: threads outside any session.
    """

    def __init__(
        self,
        collection: Collection[Document],
        timeout: float,
        sender: Session | OutsideSession | None = None,
        rights: str = "find and update",
    ) -> None:
        self._collection = as_a_lock_must(collection)
        self._sender = sender or outside_session.current()
        self._rights = rights
        self.timeout = timeout
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made the courier."""
        return self._pid != os.getpid()

    def run(self, steps: Steps[T]) -> T:
        """Run *steps*, blocking."""
        return actions.run(steps, self._perform)

    async def arun(self, steps: Steps[T]) -> T:
        """See run()."""
        return await actions.arun(steps, self._aperform)

    def send_in_background(self, command: Command) -> None:
        """Have another thread send *command* after each of the pauses, until it returns True."""
        if not self.forked:
            pauses = (*PAUSES[:-1], max(PAUSES[-1], self.timeout))
            self._sender.background.repeat(functools.partial(self.send, command), pauses)

    def send(self, command: Command, left: float = math.inf) -> Any:
        """Send one command, in at most *left* seconds."""
        needs = f"{self._rights} on the collection {self._collection.full_name}"
        with bounded(min(left, self.timeout), self._collection.database.client, needs):
            return command(self._collection)

    def _refuse_child(self) -> None:
        if self.forked:
            raise LockMisused("another process started this: a forked child cannot continue it")

    def _perform(self, step: Command | Sleep) -> Any:
        if isinstance(step, Sleep):
            return time.sleep(step.seconds)
        self._refuse_child()  # the threads are the parent's
        return self._sender.threads.off_main_thread(functools.partial(self.send, step), self.timeout, priority=REQUEST)

    async def _aperform(self, step: Command | Sleep) -> Any:
        if isinstance(step, Sleep):
            return await asyncio.sleep(step.seconds)
        self._refuse_child()
        call = functools.partial(self.send, step)
        return await self._sender.threads.acall(call, self.timeout, priority=REQUEST)


@atexit.register
def _finish() -> None:
    """Let a process that is interrupted in the middle of a batch release its remaining documents."""
    background = outside_session.current().background
    background.begin_to_finish(AT_EXIT)
    background.finish()
