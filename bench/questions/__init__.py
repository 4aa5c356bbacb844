"""The questions, by name. Each yields its findings one by one, so that they are kept if it ends early."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from bench.bench import Bench
from bench.measure import Piece
from bench.questions.alone import alone
from bench.questions.contended import contended
from bench.questions.crowd import crowd
from bench.questions.held import held
from bench.questions.killed import killed

Ask = Callable[[Bench], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question.

    - limit: seconds after which it is ended.
    """

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
}
