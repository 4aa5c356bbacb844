"""What is known of defects and mutants, kept in a file, and as the tables of docs/explanation/mutants.md."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.simulation.defects import DEFECTS


@dataclass
class Result:
    """What found a mutant. found: "violation", "crash" or "hang", by the simulation at *seed*; None if it did not find
    it. seconds: how long it looked, in seconds of the processor, the start of the process included; none if it never
    comes to that line. test: the test that found it instead. note: what people make of one that nothing finds; it
    begins with "equivalent" if that breaks no promise. A named defect has no line, and is its own description.
    """

    name: str
    line: int
    before: str
    after: str
    found: str | None = None
    what: str = ""
    seed: int = 0
    seconds: float = 0.0
    test: str | None = None
    test_seconds: float = 0.0
    note: str = ""


class Book:
    """What is known, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        stored = json.loads(path.read_text()) if path.exists() else []
        self.results = {result["name"]: Result(**result) for result in stored}

    def keep(self, result: Result) -> None:
        """Write a result down."""
        with self._mutex:
            self.results[result.name] = result
            self.path.write_text(json.dumps([asdict(each) for each in self.results.values()], indent=1) + "\n")


def table(results: Sequence[Result]) -> str:
    """The tables of docs/explanation/mutants.md: of the defects, of the mutants."""
    defects = [result for result in results if result.name in DEFECTS]
    others = sorted((result for result in results if result.name not in DEFECTS), key=lambda result: result.name)
    rows = [("defect", "what it is", "breaks", "found by the simulation"), ("---",) * 4]
    rows += [(f"`{r.name}`", r.before, DEFECTS[r.name].breaks, _by_simulation(r)) for r in defects]
    more = [("place", "before", "after", "found by the simulation", "found by a test, or note"), ("---",) * 5]
    more += [
        (f"{r.name.partition(':')[0]}:{r.line}", _code(r.before), _code(r.after), _by_simulation(r), _else(r))
        for r in others
    ]
    return "\n".join("".join(f"| {' | '.join(row)} |\n" for row in each) for each in (rows, more))


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _by_simulation(result: Result) -> str:
    if result.found:
        return f"{result.found}, {result.seconds} s"
    return f"not in {result.seconds} s" if result.seconds else "does not come there"


def _else(result: Result) -> str:
    return f"`{result.test.rpartition('::')[2]}`" if result.test else result.note
