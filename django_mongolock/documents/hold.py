"""A document that is acquired at the beginning of a block, at once or within some time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, TypedDict, TypeVar

from ..engine import clock
from ..engine.options import Seconds
from ..exceptions import DocumentChanged, DocumentHeld, DocumentNotFound, LockMisused
from . import acquiring
from .commands import read_whole
from .holding import FinalState, HeldDocument
from .lock_context import Context
from .steps import Pause, Steps, send
from .updates import Acquisition, Document, Request

D = TypeVar("D")

#: Which work: a pending state, or a function that chooses it for the document. None: the only one there is.
PendingState = str | Callable[[Any], str] | None
#: Between the tries of `wait=`: seconds at first, by how much it grows, and the most.
FIRST_PAUSE, GROWTH, LONGEST_PAUSE = 0.05, 1.5, 1.0
#: How often a document that changes again and again is read once more when the time is over.
LATE_TRIES: Final = 5


class BatchOptions(TypedDict, total=False):
    """The options of `DocumentLock.acquire_many`."""

    owner: str | None
    final: FinalState
    changes: Mapping[str, Any] | None


class HoldOptions(BatchOptions, total=False):
    """The options of `DocumentLock.hold`."""

    wait: Seconds | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for.

    again: makes the request for the document as it was read again. attempt: makes a new attempt, when it is sent: the
    process may fork before. wait: seconds; 0: a single try; None: without end. place: the line of the program.
    """

    request: Request
    again: Callable[[Document], Request]
    attempt: Callable[[], Acquisition]
    final: FinalState
    wait: float | None
    place: str


class Hold(Generic[D]):
    """A document that is acquired at the beginning of the block."""

    def __init__(self, context: Callable[[], Context], plan: Plan) -> None:
        self._context = context
        self._plan = plan
        self._held: HeldDocument[D]
        self._used = False

    def acquire(self) -> HeldDocument[D]:
        """See DocumentLock.acquire()."""
        context = self._context()
        return context.sender.run(self._acquire(context))

    async def aacquire(self) -> HeldDocument[D]:
        """See DocumentLock.acquire()."""
        context = self._context()
        return await context.sender.arun(self._acquire(context))

    def _acquire(self, context: Context) -> Steps[HeldDocument[D]]:
        if self._used:
            raise LockMisused("this object was used before: call hold() once for each block")
        self._used, plan, pause, late = True, self._plan, FIRST_PAUSE, 0
        request, end = plan.request, math.inf if plan.wait is None else clock.now() + plan.wait
        while True:
            sent, acquisition = clock.now(), plan.attempt()
            try:
                document = yield from acquiring.acquire(context, acquisition, request)
            except DocumentHeld:
                if (left := end - clock.now()) <= 0:
                    raise
                yield Pause(min(left, random.uniform(pause / 2, pause)))  # noqa: S311 - spreads the flows out
                pause = min(pause * GROWTH, LONGEST_PAUSE)
            except DocumentChanged:
                # Not a reason to give up when the time is over: read again, it is either granted or held.
                late += clock.now() >= end
                if plan.wait == 0 or late > LATE_TRIES:
                    raise
            else:
                self._held = HeldDocument(context, acquisition, document, final=plan.final, sent=sent, place=plan.place)
                return self._held
            found: Document | None = yield from send(read_whole(request.id))
            if found is None:
                raise DocumentNotFound(context.name, request.id)
            request = plan.again(found)

    def __enter__(self) -> HeldDocument[D]:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, traceback)

    async def __aenter__(self) -> HeldDocument[D]:
        return await self.aacquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._held.__aexit__(kind, error, traceback)
