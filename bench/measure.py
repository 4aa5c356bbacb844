"""Figures: with their spread, compared round by round, and shown in tables."""

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
    """The median of several rounds, and the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of *values*; not a number where there are none."""
        found = [value for value in values if not math.isnan(value)]
        return cls(statistics.median(found), min(found), max(found)) if found else cls(*[math.nan] * 3)


Cell = str | float | Spread | None


def shown(cell: object) -> str:
    """A cell of a table as people read it. What comes back from JSON is shown as what went in."""
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
    """Some figures. The first column names the rows; *note* says what the columns mean."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


@dataclass
class Data:
    """Figures for the plots, under a name."""

    name: str
    value: Any


Piece = Table | Data


def as_json(pieces: Iterable[Piece]) -> dict[str, Any]:
    """What a question has yielded, as it goes into the JSON file."""
    answer: dict[str, Any] = {"tables": [], "data": {}}
    for piece in pieces:
        if isinstance(piece, Table):
            answer["tables"].append(asdict(piece))
        else:
            answer["data"][piece.name] = piece.value
    return answer


def as_text(table: Table) -> str:
    """Return it as Markdown, as docs/evidence/data/benchmarks.md has it."""
    rows = [table.columns, *([shown(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = [" | ".join(map(str.ljust, row, widths)) for row in rows]
    rule = "|".join(["---", *["--:"] * (len(widths) - 1)])
    body = "\n".join(f"| {line} |" for line in lines[1:])
    return f"\n**{table.title}**\n\n| {lines[0]} |\n|{rule}|\n{body}\n\n{table.note}"


def interleaved(
    names: Iterable[str], rounds: int, measure: Callable[[str], T], failed: Callable[[str, Exception], object]
) -> dict[str, list[T]]:
    """Measure everybody once in each of so many rounds, in another order each time, so that noise hits all alike.

    Who fails is told to *failed* and left out from then on.
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
    """How many times *theirs* ours are, round by round."""
    return Spread.of(mine / other if other else math.nan for mine, other in zip(ours, theirs, strict=True))


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


class Turn(NamedTuple):
    """One acquisition: when it was asked for, granted and given back, by a clock that all processes share."""

    asked: float
    granted: float
    leaving: float
    worker: int = 0


@dataclass
class Turns:
    """Who had the lock when."""

    turns: list[Turn]

    def __post_init__(self) -> None:
        self.turns.sort(key=lambda turn: turn.granted)

    @property
    def held_twice(self) -> int:
        """How often somebody was granted it before the one before had begun to give it back: then it is no lock."""
        latest, count = -math.inf, 0
        for turn in self.turns:
            count += turn.granted < latest
            latest = max(latest, turn.leaving)
        return count

    @property
    def hand_overs(self) -> list[float]:
        """Milliseconds from the call of release to the return of acquire, where the next had asked before."""
        return [(b.granted - a.leaving) * 1000 for a, b in pairwise(self.turns) if b.asked < a.leaving <= b.granted]

    @property
    def waits(self) -> list[float]:
        """Milliseconds that each waited."""
        return [(turn.granted - turn.asked) * 1000 for turn in self.turns]

    def steady(self, begin: float, end: float) -> Turns:
        """Those that were asked for within the time, when all were there."""
        return Turns([turn for turn in self.turns if begin <= turn.asked <= end])
