"""Figures with their spread, compared round by round, and shown in tables."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Spread(NamedTuple):
    """The median, the lowest and the highest value of several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of *values*, NaN without values."""
        found = [value for value in values if not math.isnan(value)]
        return cls(statistics.median(found), min(found), max(found)) if found else cls(*[math.nan] * 3)


Cell = str | float | Spread | None


def shown(cell: object) -> str:
    """Return a cell of a table as text. A value from JSON looks like the original."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, (list, tuple)):
        median, low, high = (shown(value) for value in cell)
        return median if low == high else f"{median} ({low}–{high})"
    if not isinstance(cell, (int, float)):
        raise TypeError(f"no cell of a table: {cell!r}")
    if cell == int(cell) and abs(cell) < 1e15:
        return f"{int(cell):,}"
    digits = 0 if abs(cell) >= 100 else 1 if abs(cell) >= 10 else 2 if abs(cell) >= 0.1 else 4
    return f"{cell:,.{digits}f}"


@dataclass
class Table:
    """Some figures. The first column names the rows.

    - note: meaning of the columns.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


@dataclass
class Data:
    """Named figures for the plots."""

    name: str
    value: Any


Piece = Table | Data


def as_json(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the results of a question as they go into the JSON file."""
    answer: dict[str, Any] = {"tables": [], "data": {}}
    for piece in pieces:
        if isinstance(piece, Table):
            answer["tables"].append(asdict(piece))
        else:
            answer["data"][piece.name] = piece.value
    return answer


def as_text(table: Table) -> str:
    """Return the table as Markdown, as in docs/evidence/data/benchmarks.md."""
    rows = [table.columns, *([shown(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = [" | ".join(map(str.ljust, row, widths)) for row in rows]
    rule = "|".join(["---", *["--:"] * (len(widths) - 1)])
    body = "\n".join(f"| {line} |" for line in lines[1:])
    return f"\n**{table.title}**\n\n| {lines[0]} |\n|{rule}|\n{body}\n\n{table.note}"


def interleaved(
    names: Iterable[str], rounds: int, measure: Callable[[str], T], failed: Callable[[str, Exception], object]
) -> dict[str, list[T]]:
    """Measure each of *names* once in each of *rounds*, in another order each time, so that noise affects all alike.

    A failure is passed to *failed*, and the failed one is left out from then on.
    """
    found: dict[str, list[T]] = {name: [] for name in names}
    chance = random.Random(1)
    for _ in range(rounds):
        order = list(found)
        chance.shuffle(order)
        for name in order:
            try:
                found[name].append(measure(name))
            except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
                failed(name, error)
                del found[name]
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratios of *ours* to *theirs*, round by round."""
    return Spread.of(mine / other if other else math.nan for mine, other in zip(ours, theirs, strict=True))


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


class Turn(NamedTuple):
    """One acquisition. The clock of its request, grant and release is shared by all processes."""

    asked: float
    granted: float
    leaving: float
    worker: int = 0


@dataclass
class Turns:
    """The turns of a lock in the order of the grants."""

    turns: list[Turn]

    def __post_init__(self) -> None:
        self.turns.sort(key=lambda turn: turn.granted)

    @property
    def held_twice(self) -> int:
        """Return the number of grants before the previous holder had begun its release. Any such grant disproves the
        lock.
        """
        latest, count = -math.inf, 0
        for turn in self.turns:
            count += turn.granted < latest
            latest = max(latest, turn.leaving)
        return count

    @property
    def hand_overs(self) -> list[float]:
        """Return the milliseconds from the call of release to the return of acquire, if the next caller had asked
        before.
        """
        return [(b.granted - a.leaving) * 1000 for a, b in pairwise(self.turns) if b.asked < a.leaving <= b.granted]

    @property
    def waits(self) -> list[float]:
        """Return the milliseconds of each wait."""
        return [(turn.granted - turn.asked) * 1000 for turn in self.turns]

    def steady(self, begin: float, end: float) -> Turns:
        """Return the turns that were requested within the time when all were there."""
        return Turns([turn for turn in self.turns if begin <= turn.asked <= end])
