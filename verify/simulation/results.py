"""What is known of defects and mutants, kept in a file, and as tables."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verify.faults.broken import DEFECTS


@dataclass
class Result:
    """What found a mutant. found: "violation", "crash" or "hang", by the simulation at *seed*; None if it did not find
    it. seconds: how long it looked, in seconds of the processor, the start of the process included; none if it never
    comes to that line. test: the test that found it instead. note: what people make of one that nothing finds; it
    begins with "equivalent" if that breaks no promise. A named defect has no line, and is its own description.
    sample: the seed by which the mutant was drawn; 0 if it was named.
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
    sample: int = 0


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
            self._write()

    def replace(self, results: Sequence[Result]) -> None:
        """Know these, and nothing else."""
        with self._mutex:
            self.results = {result.name: result for result in results}
            self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps([asdict(each) for each in self.results.values()], indent=1) + "\n")


def table(results: Sequence[Result]) -> str:
    """Tables: of the defects, of the mutants of each sample."""
    defects = [result for result in results if result.name in DEFECTS]
    rows: list[tuple[str, ...]] = [
        ("defect", "what it is", "breaks", "found by the simulation", "found by a test"),
        ("---",) * 5,
    ]
    rows += [(f"`{r.name}`", r.before, DEFECTS[r.name].breaks, _by_simulation(r), _by_test(r)) for r in defects]
    mutants = [result for result in results if result.name not in DEFECTS]
    samples = sorted({mutant.sample for mutant in mutants})
    tables = [rows, *(_mutants([each for each in mutants if each.sample == sample]) for sample in samples)]
    return "\n".join("".join(f"| {' | '.join(row)} |\n" for row in each) for each in tables)


def _mutants(results: Sequence[Result]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("place", "before", "after", "found by the simulation", "found by a test, or note"),
        ("---",) * 5,
    ]
    rows += [
        (
            f"{r.name.partition(':')[0]}:{r.line}",
            _code(r.before),
            _code(r.after),
            _by_simulation(r),
            _by_test(r) or r.note,
        )
        for r in sorted(results, key=lambda result: result.name)
    ]
    return rows


def totals(results: Sequence[Result]) -> str:
    """What was found of a sample of mutants, in one line."""
    simulated = sum(bool(result.found) for result in results)
    tested = sum(bool(result.test) and not result.found for result in results)
    equivalent = sum(result.note.startswith("equivalent") for result in results if not (result.found or result.test))
    left = len(results) - equivalent
    rate = 100 * (simulated + tested) / max(1, left)
    return f"{len(results)} mutants: simulation {simulated}, tests {tested}, equivalent {equivalent}: {rate:.1f} %\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _by_simulation(result: Result) -> str:
    if result.found:
        return f"{result.found}, {result.seconds} s"
    return f"not in {result.seconds} s" if result.seconds else "does not come there"


def _by_test(result: Result) -> str:
    return f"`{result.test.rpartition('::')[2]}`" if result.test else ""
