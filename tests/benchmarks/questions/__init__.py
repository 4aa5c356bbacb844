"""The questions, by name. Each yields what it finds as it finds it, so that what it has is kept where it ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.benchmarks.bench import Bench
from tests.benchmarks.measure import Piece
from tests.benchmarks.questions.alone import alone
from tests.benchmarks.questions.contended import contended
from tests.benchmarks.questions.crowd import crowd
from tests.benchmarks.questions.held import held
from tests.benchmarks.questions.killed import killed
from tests.benchmarks.questions.million import million
from tests.benchmarks.questions.overhead import overhead
from tests.benchmarks.questions.scale import scale

Ask = Callable[[Bench], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class Question:
    """*limit*: seconds after which it is ended."""

    ask: Ask
    limit: float

    @property
    def title(self) -> str:
        return (self.ask.__doc__ or "").partition("\n")[0]


QUESTIONS: Final[dict[str, Question]] = {
    "alone": Question(alone, 240),
    "contended": Question(contended, 780),
    "crowd": Question(crowd, 240),
    "held": Question(held, 60),
    "killed": Question(killed, 200),
    "overhead": Question(overhead, 120),
    "million": Question(million, 300),
    "scale": Question(scale, 150),
}
