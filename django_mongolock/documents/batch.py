"""Several documents that a flow holds, and their common end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from ..backends.courier import Steps
from ..exceptions import LockBackendFailed, LockError
from .acquiring import Context, put_back
from .held_document import Block, HeldDocument
from .holding import Holding

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

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        """End all that are left, one by one. If MongoDB does not answer, that is waited for once; all that are still
        held are then released in the background. The first error is raised when all have been tried, with the others
        as its notes."""
        problems: list[Exception] = []
        try:
            for held in self._left():
                try:
                    answers = yield from held.leave(error)
                except Exception as problem:  # noqa: BLE001 - it is raised when all have been tried
                    problems.append(problem)
                    answers = not isinstance(problem, LockBackendFailed)
                if not answers:
                    break
        finally:
            left = self._left()
            put_back(self._context, [held.failing()[0] for held in left])
            for held in left:
                held.ended_in(held.failed)
        if problems:
            first, *others = problems
            for other in others:
                first.add_note(f"also: {other}")
            raise first

    def _left(self) -> list[Holding]:
        return [held._holding for held in self.held if held.ended is None]
