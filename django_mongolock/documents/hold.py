"""A document that is acquired at the beginning of a block, at once or within some time."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Generic, TypedDict, TypeVar

from ..backends.courier import Courier, Pause, Steps, send
from ..backends.field_paths import Document, check_version
from ..backends.places import Source
from ..engine import clock
from ..engine.protocol.runner import twins
from ..engine.rule.options import Seconds
from ..engine.text_checks import check_fact, tidy_fact
from ..exceptions import DocumentChanged, DocumentDamaged, DocumentHeld, DocumentNotFound, LockMisused
from .acquiring import Context, acquire
from .commands import read_one
from .held_document import Block, FinalState, HeldDocument
from .rules import Rules
from .snapshot import DocumentSnapshot
from .updates import Own, Request, new_mark

D = TypeVar("D")

#: Which work: a pending state, or a function that chooses it for the document as it will be. None: the only one.
PendingState = str | Callable[[Any], str] | None
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

    def __post_init__(self) -> None:
        check_fact("owner", self.owner)
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

    def attempt(self) -> Callable[[Request], Own]:
        """Return what makes requests those of this flow, with names of this process: make it when they are sent."""
        name, mark = check_fact("owner", self.owner), new_mark()
        owner = name or tidy_fact(f"{secrets.token_hex(12)}/{socket.gethostname()}/{os.getpid()}")

        def own(request: Request) -> Own:
            version, failed = request.version + 1, self.rules.pending[request.pending]
            return Own(request.id, owner, mark, version, version, failed)

        return own

    def held(self, context: Context, own: Own, document: Document, sent: float) -> HeldDocument[Any]:
        """Return the document that was granted."""
        return HeldDocument(context, own, document, final=self.final, sent=sent, place=self.place)


class Hold(Block, Generic[D]):
    """A document that is acquired at the beginning of the block. wait: seconds; 0: a single try; None: without end."""

    def __init__(self, context: Callable[[], Context], plan: Plan, request: Request, wait: float | None) -> None:
        self._find = context
        self._plan = plan
        self._request = request
        self._wait = wait
        self._held: HeldDocument[D]
        self._used = False

    @cached_property
    def _context(self) -> Context:
        return self._find()

    @property
    def _courier(self) -> Courier:  # type: ignore[override]
        return self._context.courier

    def _acquire(self) -> Steps[HeldDocument[D]]:
        """See DocumentLock.acquire()."""
        if self._used:
            raise LockMisused("this object was used before: call hold() once for each block")
        self._used, context, plan, tries, late = True, self._context, self._plan, 0, 0
        request, end = self._request, math.inf if self._wait is None else clock.now() + self._wait
        while True:
            sent, own = clock.now(), plan.attempt()(request)
            try:
                document = yield from acquire(context, own, request)
            except DocumentHeld:
                if (left := end - clock.now()) <= 0:
                    raise
                tries += 1
                yield Pause(min(left, clock.backoff(tries)))
            except DocumentChanged:
                # Not a reason to give up when the time is over: read again, it is either granted or held.
                late += clock.now() >= end
                if self._wait == 0 or late > LATE_TRIES:
                    raise
            else:
                self._held = plan.held(context, own, document, sent)
                return self._held
            found: Document | None = yield from send(read_one(context.rules.fields, request.id))
            if found is None:
                raise DocumentNotFound(context.name, request.id)
            request = plan.request(plan.source.instance(found))

    acquire, aacquire = twins(_acquire)

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        return self._held._leave(error)

    def __enter__(self) -> HeldDocument[D]:  # type: ignore[override]
        return self.acquire()

    async def __aenter__(self) -> HeldDocument[D]:  # type: ignore[override]
        return await self.aacquire()
