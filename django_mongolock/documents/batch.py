"""Several documents that a flow holds, and their common end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ..backends.courier import Steps, send
from ..backends.field_paths import Document, get_path
from ..engine.logs import WARNING, log
from ..exceptions import DocumentRefused, LockError
from .acquiring import BATCH, Context, put_back
from .commands import Written, read_some, write_many
from .held_document import Block, HeldDocument
from .holding import Holding
from .updates import Statement

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

    def _warn(self) -> None:
        for held in [held for held in self.held if held.ended is None][:1]:
            held._warn()

    def _leave(self, error: BaseException | None) -> Steps[None]:
        """End all that are left, many with one command. If MongoDB does not answer, that is waited for once; all that
        are still held are then released in the background. The first error is raised when all have been tried, with
        the others as its notes."""
        problems: list[Exception] = []
        try:
            left = self._left()
            for start in range(0, len(left), BATCH):
                some = left[start : start + BATCH]
                if error is None:
                    problems += yield from _finish_all(self._context, some)
                yield from _fail_all(self._context, [held for held in some if held.ended is None])
        except BaseException as problem:
            left = self._left()
            put_back(self._context, [held.failing()[0] for held in left])
            for held in left:
                held.ended_in(held.failed)
            if error is None:
                raise
            log(WARNING, "documents not released", place=self._context.name, error=problem)
            if not isinstance(problem, Exception):
                raise
        if problems:
            first, *others = problems
            for other in others:
                first.add_note(f"also: {other}")
            raise first

    def _left(self) -> list[Holding]:
        return [held._holding for held in self.held if held.ended is None]


def _finish_all(context: Context, some: Sequence[Holding]) -> Steps[list[Exception]]:
    """Set the final states of documents with one command; return why others were not finished."""
    problems: list[Exception] = []
    made: list[tuple[Holding, str, Statement, str]] = []
    for held in some:
        try:
            state = held.final_state(None, {})
        except Exception as problem:  # noqa: BLE001 - it is raised when all have been tried
            problems.append(problem)
        else:
            made.append((held, state, *held.finishing(state, {})))
    unanswered: list[BaseException] = []
    written, found = yield from _write_all(context, [statement for *_, statement, _ in made], unanswered)
    for held, state, _, token in made:
        there = found.get(held.id)
        if found is ALL or (there is not None and get_path(there, context.rules.fields.token) == token):
            held.ended_in(state)
        elif held.id in written.refused:
            problems.append(DocumentRefused(context.name, held.id, str(written.refused[held.id])))
        else:
            why = held.why_not(there, maybe_written=bool(unanswered))
            held.refused(why)
            problems.append(why)
    return problems


def _fail_all(context: Context, some: Sequence[Holding]) -> Steps[None]:
    """Set the failed states of documents with one command."""
    made = [(held, *held.failing()) for held in some]
    written, found = yield from _write_all(context, [statement for _, statement, _ in made], [])
    for held, _, token in made:
        facts = {"document": held.id, "place": context.name}
        if held.id in written.refused:
            log(WARNING, "document not released", **facts, error=written.refused[held.id])
        elif found is not ALL and get_path(found.get(held.id, {}), context.rules.fields.token) != token:
            log(WARNING, "document lost before its work failed", **facts)
        held.ended_in(held.failed)


#: All documents were found as they were expected, and none was read again.
ALL: dict[Any, Document] = {}


def _write_all(
    context: Context, statements: Sequence[Statement], unanswered: list[BaseException]
) -> Steps[tuple[Written, dict[Any, Document]]]:
    """Send statements. Return what was refused, and the documents as they are then; or `ALL`."""
    if not statements:
        return Written(0, {}), ALL
    written: Written = yield from send(write_many(statements), unanswered)
    if written.matched == len(statements):
        return written, ALL
    ids = [statement.id for statement in statements]
    found: dict[Any, Document] = yield from send(read_some(context.rules.fields, ids))
    return written, found
