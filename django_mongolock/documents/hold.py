"""A document that is acquired at the beginning of a block, at once or within some time."""

from __future__ import annotations

import math
import os
import random
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, TypedDict, TypeVar

from ..backends.courier import Pause, Steps, send
from ..backends.field_paths import Document, check_version
from ..backends.places import Source
from ..engine import clock
from ..engine.rule.options import Seconds
from ..engine.text_checks import tidy_fact
from ..exceptions import DocumentChanged, DocumentDamaged, DocumentHeld, DocumentNotFound, LockMisused
from .acquiring import Attempt, Context, acquire
from .commands import read_one
from .held_document import HeldDocument
from .holding import FinalState, Holding
from .rules import Rules
from .snapshot import DocumentSnapshot
from .updates import Request, new_mark

D = TypeVar("D")

#: Which work: a pending state, or a function that chooses it for the document as it will be. None: the only one.
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
    """What is asked of documents: for which work, in whose name, with which changes, and how it ends.

    place: the line of the program. changes: as the caller gave them; stored: as they are stored.
    """

    source: Source
    rules: Rules
    pending: PendingState
    owner: str | None
    final: FinalState
    changes: Mapping[str, Any]
    place: str

    @property
    def stored(self) -> Document:
        return self.rules.check_changes(self.source.changes(self.changes))

    def check(self) -> None:
        """Raise TypeError or ValueError, which name the cure, for what cannot be meant."""
        self.rules.check_owner(self.owner)
        if self.final is not None and not callable(self.final):
            self.rules.check_final(self.final)
        _ = self.stored

    def request(self, document: Any) -> Request:
        """Return the request for a document as the caller has read it, or for (id, version)."""
        id_, version = self._reference(document)
        pending = self.pending
        if callable(pending):
            pending = pending(self.source.changed(document, self.changes))
        return Request(id_, version, self.rules.check_pending(pending), self.stored)

    def _reference(self, document: Any) -> tuple[Any, int]:
        source, field = self.source, self.rules.fields.version
        if isinstance(document, DocumentSnapshot):
            return document.id, document.version
        if isinstance(document, tuple):
            if len(document) != 2:
                raise TypeError("pass the document as you have read it, or (id, version)")
            return source.key(document[0]), check_version(document[1])
        key, version = source.key(document), source.read(document, field)
        if version is None:
            return key, 0  # a document that never had a version
        if isinstance(version, bool) or not isinstance(version, int):
            problem = f"its field {field!r} is {type(version).__name__}, not a whole number"
            raise DocumentDamaged(source.name, key, problem)
        return key, check_version(version)

    def attempt(self) -> Attempt:
        """Return an attempt to acquire documents, with names of this process: make it when it is sent."""
        name = self.rules.check_owner(self.owner)
        name = name or tidy_fact(f"{secrets.token_hex(12)}/{socket.gethostname()}/{os.getpid()}")
        return Attempt(name[: self.rules.longest_owner], new_mark())

    def held(
        self, context: Context, attempt: Attempt, request: Request, document: Document, sent: float
    ) -> HeldDocument[Any]:
        """Return the document that was granted."""
        own = attempt.granted(request, document, self.rules)
        return HeldDocument(Holding(context, own, document, final=self.final, sent=sent, place=self.place))


class Hold(Generic[D]):
    """A document that is acquired at the beginning of the block. wait: seconds; 0: a single try; None: without end."""

    def __init__(self, context: Callable[[], Context], plan: Plan, request: Request, wait: float | None) -> None:
        self._context = context
        self._plan = plan
        self._request = request
        self._wait = wait
        self._held: HeldDocument[D]
        self._used = False

    def acquire(self) -> HeldDocument[D]:
        """See DocumentLock.acquire()."""
        context = self._context()
        return context.courier.run(self._acquire(context))

    async def aacquire(self) -> HeldDocument[D]:
        """See DocumentLock.acquire()."""
        context = self._context()
        return await context.courier.arun(self._acquire(context))

    def _acquire(self, context: Context) -> Steps[HeldDocument[D]]:
        if self._used:
            raise LockMisused("this object was used before: call hold() once for each block")
        self._used, plan, pause, late = True, self._plan, FIRST_PAUSE, 0
        request, end = self._request, math.inf if self._wait is None else clock.now() + self._wait
        while True:
            sent, attempt = clock.now(), plan.attempt()
            try:
                document = yield from acquire(context, attempt, request)
            except DocumentHeld:
                if (left := end - clock.now()) <= 0:
                    raise
                yield Pause(min(left, random.uniform(pause / 2, pause)))  # noqa: S311 - spreads the flows out
                pause = min(pause * GROWTH, LONGEST_PAUSE)
            except DocumentChanged:
                # Not a reason to give up when the time is over: read again, it is either granted or held.
                late += clock.now() >= end
                if self._wait == 0 or late > LATE_TRIES:
                    raise
            else:
                self._held = plan.held(context, attempt, request, document, sent)
                return self._held
            found: Document | None = yield from send(read_one(context.rules.fields, request.id))
            if found is None:
                raise DocumentNotFound(context.name, request.id)
            request = plan.request(plan.source.instance(found))

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
