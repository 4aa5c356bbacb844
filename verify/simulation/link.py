"""The network between one process and the simulated servers, and the commands on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verify.simulation.kernel import Kernel, Strand


@dataclass(frozen=True)
class Link:
    """The network between one process and the servers. Probabilities are for each command.

    - slow: most additional seconds of a command in each direction.
    - cut: whether nothing passes.
    - lost: probability that the answer is lost.
    - late: probability that the command is held up, for up to *late_by* seconds.
    - held_up: probability that the server holds it up between parsing and writing, for up to *held_up_by* seconds.
    - twice: probability that it arrives twice.
    """

    cut: bool = False
    slow: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    late_by: float = 0.0
    held_up: float = 0.0
    held_up_by: float = 0.0
    twice: float = 0.0


class Exchange:
    """One command on its way, and its answer. The answer may come when the sender waits no more.

    - original: exchange of which this is a copy. An answered command is not sent again.
    """

    def __init__(self, sender: Strand | None, original: Exchange | None = None) -> None:
        self.sender = sender
        self.answers: list[Any] = []
        self.has_written = False
        self._original = original

    @property
    def is_copy(self) -> bool:
        """Whether the command arrives beside its original."""
        return self._original is not None

    @property
    def is_void(self) -> bool:
        """Whether this is the copy of an answered command."""
        return self._original is not None and bool(self._original.answers)

    def answer(self, kernel: Kernel, answer: Any) -> None:
        """Record the answer, and wake the sender."""
        self.answers.append(answer)
        if self.sender is not None:
            kernel.wake(self.sender)
