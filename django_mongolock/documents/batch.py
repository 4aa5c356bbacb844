"""Several documents that a flow holds: how they are acquired, and their common end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pymongo.collection import Collection

from ..backends.courier import Command, Steps, send
from ..backends.field_paths import Document
from ..engine import clock
from ..exceptions import DocumentRefused, LockBackendFailed, LockError
from .acquiring import BATCH, Context, dead_run, put_back, why_not
from .commands import Written, read_some, write_many
from .held_document import Block, HeldDocument, abandon
from .hold import Plan
from .rules import Rules
from .snapshot import read_snapshot
from .updates import Own, Request, acquiring

D = TypeVar("D")


class Batch(Block, Generic[D]):
    """Several documents at once: those that were granted, in the order in which they were asked for, and why the others
    were not.

    held: the documents that this flow holds. refused: the error of each other one, by its id. The end of the batch's
    block ends the documents that are left. To go on after one that fails, catch its error in the loop.
    """

    def __init__(self, context: Context, held: list[HeldDocument[D]], refused: Mapping[Any, LockError]) -> None:
        self.held = held
        self.refused = dict(refused)
        self._context = context
        self._courier = context.courier

    def __repr__(self) -> str:
        return f"<Batch: {len(self.held)} held, {len(self.refused)} refused>"

    def __iter__(self) -> Iterator[HeldDocument[D]]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        """End all that are left, one by one. If MongoDB does not answer, that is waited for once; all that are still
        held are then released in the background. The first error is raised when all have been tried, with the others
        as its notes."""
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
    """Acquire those of many documents that are available, in three commands for each `BATCH`; return them in the order
    in which they are asked for."""
    sent, attempt = clock.now(), plan.attempt()
    requests: dict[Any, Request] = {}
    for request in map(plan.request, documents):
        other = requests.setdefault(request.id, request)
        if isinstance(other.id, bool) is not isinstance(request.id, bool):
            raise ValueError(f"{other.id!r} and {request.id!r} are two ids, but the same to Python: ask one by one")
    owns = {id_: attempt(request) for id_, request in requests.items()}
    asked, unanswered = list[Request](), list[BaseException]()
    granted, refused = dict[Any, Document](), dict[Any, LockError]()
    try:
        for start in range(0, len(requests), BATCH):
            some = list(requests.values())[start : start + BATCH]
            asked += some
            yield from _acquire_some(context, owns, some, granted, refused, unanswered)
    except BaseException:
        # The caller learns of none of them.
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
    for _ in range(2):  # the second time only for what a dead run of the same owner holds
        statements = [acquiring(rules, owns[each.id], each, dead.get(each.id)) for each in requests]
        written: Written = yield from send(write_many(statements), unanswered)
        found: dict[Any, Document] = yield from send(_read_granted(rules, [owns[each.id] for each in requests]))
        granted.update(found)
        if not (requests := [each for each in requests if each.id not in found]):
            return
        states: dict[Any, Document] = yield from send(read_some(rules.fields, [each.id for each in requests]))
        seen = {id_: read_snapshot(rules, document) for id_, document in states.items()}
        for each in requests:
            if (refusal := written.refused.get(each.id)) is not None:
                refused[each.id] = DocumentRefused(context.name, each.id, str(refusal))
            else:
                refused[each.id] = why_not(context, each, seen.get(each.id))
        dead = {id_: dead_run(state, owns[id_].owner) for id_, state in seen.items()}
        if not (requests := [each for each in requests if dead.get(each.id) is not None]):
            return


def _read_granted(rules: Rules, owns: Sequence[Own]) -> Command:
    fields, tokens = rules.fields, {own.id: own.mark.at(own.known) for own in owns}

    def command(collection: Collection[Document]) -> dict[Any, Document]:
        query = {fields.key: {"$in": list(tokens)}, fields.token: {"$in": list(tokens.values())}}
        return {document[fields.key]: document for document in collection.find(query)}

    return command
