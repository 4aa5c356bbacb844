"""Documents that are acquired at the beginning of a block: one, at once or within some time, or many at once."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, TypedDict, TypeVar

from pymongo.collection import Collection

from ..engine import clock
from ..engine.protocol.actions import twins
from ..engine.rule.options import Seconds
from ..engine.text_checks import check_fact, tidy_fact
from ..exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentNotFound,
    DocumentRefused,
    LockBackendFailed,
    LockError,
    LockMisused,
)
from ..other_collections.courier import Sleep, Steps, send
from ..other_collections.field_paths import Document, check_version
from ..other_collections.places import Source
from . import updates
from .held_document import FinalState, HeldDocument, abandon
from .rules import DocumentSnapshot, Fields, Rules, read_snapshot
from .steps import BATCH, Block, Context, acquire, dead_run, in_batches, put_back, why_not
from .updates import Own, Request, Written

D = TypeVar("D")

#: The pending state, or a function that chooses it for the document as changed. None: the only one.
PendingState = str | Callable[[Any], str] | None


class BatchOptions(TypedDict, total=False):
    """The options of `DocumentLock.acquire_many`."""

    owner: str | None
    final: FinalState
    changes: Mapping[str, Any] | None


class HoldOptions(BatchOptions, total=False):
    """The options of `DocumentLock.hold`."""

    wait: Seconds | None


@dataclass(slots=True)
class Plan:
    """The request of a flow, with the work, the owner, the changes and the end.

    - place: line of the program.
    - changes: changes as the caller gave them.
    - stored: changes as they are stored.
    """

    source: Source
    rules: Rules
    place: str
    pending: PendingState
    owner: str | None = None
    final: FinalState = None
    changes: Mapping[str, Any] | None = None
    stored: Document = field(init=False)

    def __post_init__(self) -> None:
        check_fact("owner", self.owner)
        if self.final is not None and not callable(self.final):
            self.rules.check_final(self.final)
        self.stored = self.rules.check_changes(self.source.changes(self.changes or {}))

    def request(self, document: Any) -> Request:
        """Return the request for a document as the caller has read it, or for (id, version)."""
        id_, version = self._reference(document)
        pending = self.pending
        if callable(pending):
            pending = pending(self.source.changed(document, self.changes or {}))
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

    def owns(self, requests: Iterable[Request]) -> dict[Any, Own]:
        """Return the `Own` of each request, by id.

        Call this when the requests are sent, because the names are those of this process.
        """
        name, writer = check_fact("owner", self.owner), updates.new_writer()
        owner = name or tidy_fact(f"{secrets.token_hex(12)}/{socket.gethostname()}/{os.getpid()}")
        return {
            each.id: Own(each.id, owner, writer, each.version + 1, each.version + 1, self.rules.pending[each.pending])
            for each in requests
        }

    def held(self, context: Context, own: Own, document: Document, sent: float) -> HeldDocument[Any]:
        """Return the granted document."""
        return HeldDocument(context, own, document, final=self.final, sent=sent, place=self.place)


class Hold(Block, Generic[D]):
    """A document that is acquired at the beginning of the block.

    - wait: seconds. 0: single try. None: without end.
    """

    def __init__(self, context: Callable[[], Context], plan: Plan, request: Request, wait: float | None) -> None:
        self._find = context  # called only on use, because a fork may come before
        self._plan = plan
        self._request = request
        self._wait = wait
        self._held: HeldDocument[D]
        self._used = False

    @cached_property
    def _context(self) -> Context:  # type: ignore[override] # found late
        return self._find()

    def _acquire(self) -> Steps[HeldDocument[D]]:
        """See DocumentLock.acquire()."""
        if self._used:
            raise LockMisused("this object was used before: call hold() once for each block")
        self._used, context, plan, tries = True, self._context, self._plan, 0
        request, end = self._request, math.inf if self._wait is None else clock.now() + self._wait
        while True:
            sent, own = clock.now(), plan.owns([request])[request.id]
            try:
                document = yield from acquire(context, own, request)
            except (DocumentHeld, DocumentChanged) as refusal:
                if (left := end - clock.now()) <= 0:
                    raise
                if isinstance(refusal, DocumentHeld):
                    tries += 1
                    yield Sleep(min(left, clock.backoff(tries)))
            else:
                self._held = plan.held(context, own, document, sent)
                return self._held
            found: Document | None = yield from send(updates.read_one(context.rules.fields, request.id))
            if found is None:
                raise DocumentNotFound(context.source.name, request.id)
            request = plan.request(plan.source.instance(found))

    acquire, aacquire = twins(_acquire)

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        return self._held._leave(error)

    def __enter__(self) -> HeldDocument[D]:  # type: ignore[override]
        return self.acquire()

    async def __aenter__(self) -> HeldDocument[D]:  # type: ignore[override]
        return await self.aacquire()


class Batch(Block, Generic[D]):
    """Several documents that were acquired together.

    - held: documents that this flow holds, in the order of the request.
    - refused: error of each other document, by its id.

    The end of the batch's block ends the documents that are left. To go on after a document that fails, catch its error
    in the loop.
    """

    def __init__(self, context: Context, held: list[HeldDocument[D]], refused: Mapping[Any, LockError]) -> None:
        self.held = held
        self.refused = dict(refused)
        self._context = context

    def __repr__(self) -> str:
        return f"<Batch: {len(self.held)} held, {len(self.refused)} refused>"

    def __iter__(self) -> Iterator[HeldDocument[D]]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        """End all documents that are left, one by one.

        If MongoDB does not answer, only one end waits for it. The documents that are still held are then released in
        the background. The first error is raised when all ends have been tried, with the others as its notes.
        """
        problems: list[Exception] = []
        try:
            for held in self._left():
                try:
                    answers = yield from held._leave(error)
                except Exception as problem:  # noqa: BLE001 - it is raised when all have been tried
                    problems.append(problem)
                    answers = not isinstance(problem, LockBackendFailed)
                if not answers:
                    break
        finally:
            abandon(self._context, [held._own for held in self._left()])
        if problems:
            first, *others = problems
            for other in others:
                first.add_note(f"also: {other}")
            raise first

    def _left(self) -> list[HeldDocument[D]]:
        return [held for held in self.held if held.ended is None]


def acquire_many(context: Context, plan: Plan, documents: Iterable[Any]) -> Steps[Batch[Any]]:
    """Acquire those of many documents that are available, in three commands for each `BATCH`.

    The batch has the documents in the order of the request.
    """
    sent = clock.now()
    requests: dict[Any, Request] = {}
    for request in map(plan.request, documents):
        other = requests.setdefault(request.id, request)
        if isinstance(other.id, bool) is not isinstance(request.id, bool):
            raise ValueError(f"{other.id!r} and {request.id!r} are two ids, but the same to Python: ask one by one")
    owns = plan.owns(requests.values())
    asked, unanswered = list[Request](), list[BaseException]()
    granted, refused = dict[Any, Document](), dict[Any, LockError]()
    try:
        for some in in_batches(list(requests.values()), BATCH):
            asked += some
            yield from _acquire_some(context, owns, some, granted, refused, unanswered)
    except BaseException:
        # The caller gets none of the documents.
        put_back(context, [owns[request.id] for request in asked])
        raise
    left = [request.id for request in asked if request.id not in granted]
    if unanswered:
        put_back(context, [owns[id_] for id_ in left])
    held = [plan.held(context, owns[each.id], granted[each.id], sent) for each in asked if each.id in granted]
    return Batch(context, held, {id_: refused[id_] for id_ in left})


def _acquire_some(  # noqa: PLR0917
    context: Context,
    owns: Mapping[Any, Own],
    requests: Sequence[Request],
    granted: dict[Any, Document],
    refused: dict[Any, LockError],
    unanswered: list[BaseException],
) -> Steps[None]:
    rules, dead = context.rules, dict[Any, str | None]()
    for _ in range(2):  # the second round is only for documents of a dead run of the same owner
        statements = [updates.acquiring(rules, owns[each.id], each, dead.get(each.id)) for each in requests]
        written: Written = yield from send(updates.write_many(statements), unanswered)
        asked = [owns[each.id] for each in requests]
        found: dict[Any, Document] = yield from send(partial(_read_granted, rules.fields, asked))
        granted.update(found)
        if not (requests := [each for each in requests if each.id not in found]):
            return
        states: dict[Any, Document] = yield from send(updates.read_some(rules.fields, [each.id for each in requests]))
        seen = {id_: read_snapshot(rules, document) for id_, document in states.items()}
        for each in requests:
            if (refusal := written.refused.get(each.id)) is not None:
                refused[each.id] = DocumentRefused(context.source.name, each.id, str(refusal))
            else:
                refused[each.id] = why_not(context, each, seen.get(each.id))
        dead = {id_: dead_run(state, owns[id_].owner) for id_, state in seen.items()}
        if not (requests := [each for each in requests if dead.get(each.id) is not None]):
            return


def _read_granted(fields: Fields, owns: Sequence[Own], collection: Collection[Document]) -> dict[Any, Document]:
    tokens = {own.id: updates.token_of(own.writer, own.known) for own in owns}
    query = {fields.key: {"$in": list(tokens)}, fields.token: {"$in": list(tokens.values())}}
    return updates.by_id(fields, collection.find(query))
