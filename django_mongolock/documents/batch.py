"""Several documents that a flow holds, and their common end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..engine.logs import WARNING, log
from ..exceptions import DocumentRefused, LockError
from . import updates
from .acquiring import BATCH, put_back
from .commands import Written, find_marked, read_states, write_many
from .holding import Block, HeldDocument
from .lock_context import Context
from .steps import Doubt, Steps, send
from .updates import Document

D = TypeVar("D")
Documents = Sequence[HeldDocument[Any]]


class Batch(Block, Generic[D]):
    """Several documents at once: those that were granted, and why the others were not.

    held: the documents that this flow holds. refused: the error of each other one, by its id. failed: the error of each
    one whose work failed in `isolate`, by its id. The end of the batch's block ends the documents that are left.
    """

    def __init__(self, context: Context, held: list[HeldDocument[D]], refused: Mapping[Any, LockError]) -> None:
        self.held = held
        self.refused = dict(refused)
        self.failed: dict[Any, Exception] = {}
        self._context = context
        self._sender = context.sender

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"<Batch: {len(self.held)} held, {len(self.refused)} refused{failed}>"

    def __iter__(self) -> Iterator[HeldDocument[D]]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def isolate(self, held: HeldDocument[D]) -> Isolated[D]:
        """A block for the work on one document of the batch: it ends the document, as `with held:` does, but an
        Exception goes no further. It is noted in `failed`, and the work goes on with the next document."""
        return Isolated(self, held)

    def warn(self) -> None:
        for held in self._open()[:1]:
            held.warn()

    def leave(self, error: BaseException | None) -> Steps[None]:
        """End all that are left, many with one command. If MongoDB does not answer, that is waited for once; all that
        are still held are then released in the background. The first error is raised when all have been tried, with
        the others as its notes."""
        problems: list[Exception] = []
        try:
            for some in self._chunks():
                if error is None:
                    problems += yield from finish_all(self._context, some)
                yield from fail_all(self._context, [held for held in some if held.ended is None])
        except BaseException as problem:
            left = self._open()
            put_back(self._context, [held.writes.failing() for held in left])
            for held in left:
                held.ended_in(held.writes.failed)
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

    def _open(self) -> list[HeldDocument[D]]:
        return [held for held in self.held if held.ended is None]

    def _chunks(self) -> Iterator[list[HeldDocument[D]]]:
        left = self._open()
        return (left[start : start + BATCH] for start in range(0, len(left), BATCH))


class Isolated(Block, Generic[D]):
    """The block of one document of a batch; see `Batch.isolate`."""

    def __init__(self, batch: Batch[D], held: HeldDocument[D]) -> None:
        self._batch = batch
        self._held = held
        self._sender = batch._sender

    # One whose time is over must get into the block: an error here would end the loop over the batch.
    def __enter__(self) -> HeldDocument[D]:  # type: ignore[override]
        return self._held

    async def __aenter__(self) -> HeldDocument[D]:  # type: ignore[override]
        return self._held

    def __exit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._held.warn()
        return self._sender.run(self._isolate(error))

    async def __aexit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._sender.arun(self._isolate(error))

    def _isolate(self, error: BaseException | None) -> Steps[bool]:
        """Leave the block; return whether the error goes no further."""
        try:
            yield from self._held.leave(error)
        except Exception as problem:  # noqa: BLE001 - it is noted, and logged
            self._note(problem)
        else:
            if isinstance(error, Exception):
                self._note(error)
        return isinstance(error, Exception)

    def _note(self, error: Exception) -> None:
        self._batch.failed[self._held.id] = error
        log(WARNING, "work on a document failed", document=self._held.id, error=error)


def finish_all(context: Context, some: Documents) -> Steps[list[Exception]]:
    """Set the final states of documents with one command; return why others were not finished."""
    attempt, doubt, problems = updates.new_attempt(), Doubt(), list[Exception]()
    states: dict[Any, str] = {}
    statements = []
    for held in some:
        try:
            states[held.id] = state = held.final_state(None)
            statements.append(held.writes.writing(attempt, {}, updates.releasing(context.rules, state)))
        except Exception as problem:  # noqa: BLE001 - it is raised when all have been tried
            problems.append(problem)
    by_id = {held.id: held for held in some if held.id in states}
    for held in by_id.values():
        held.writes.may_have_written(attempt)
    written, done, left = yield from _write_all(context, statements, attempt, doubt)
    for id_, held in by_id.items():
        if id_ in done:
            held.ended_in(states[id_])
        elif id_ in written.refused:
            problems.append(DocumentRefused(context.name, id_, str(written.refused[id_])))
        else:
            why = held.writes.why_not(left.get(id_), maybe_written=doubt.remains)
            held.refused(why)
            problems.append(why)
    return problems


def fail_all(context: Context, some: Documents) -> Steps[None]:
    """Set the failed states of documents with one command."""
    attempt = updates.new_attempt()
    statements = [held.writes.failing(attempt) for held in some]
    written, done, _ = yield from _write_all(context, statements, attempt, Doubt())
    for held in some:
        if held.id in written.refused:
            facts = {"document": held.id, "place": context.name, "error": written.refused[held.id]}
            log(WARNING, "document not released", **facts)
        elif held.id not in done:
            log(WARNING, "document lost before its work failed", document=held.id, place=context.name)
        held.ended_in(held.writes.failed)


def _write_all(
    context: Context, statements: Sequence[updates.Statement], attempt: str, doubt: Doubt
) -> Steps[tuple[Written, set[Any], dict[Any, Document]]]:
    """Send statements that all write *attempt*. Return what was refused, the ids of those that were written, and the
    state of those that were neither."""
    if not statements:
        return Written(0, {}), set(), {}
    written: Written = yield from send(write_many(statements), doubt)
    ids = [statement.id for statement in statements]
    if written.matched == len(ids):
        return written, set(ids), {}
    mark = updates.has(context.rules.fields.attempt, [attempt])
    done = set((yield from send(find_marked(ids, mark, whole=False))))
    rest = [id_ for id_ in ids if id_ not in done]
    left: dict[Any, Document] = (yield from send(read_states(context.rules, rest))) if rest else {}
    return written, done, left
