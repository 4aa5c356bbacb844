"""Break the engine in one place at a time, and see what finds it: the simulation, or else the tests next to it.

    python -m verify.simulation.mutants --sample 100             # what is known already is not run again
    python -m verify.simulation.mutants session.grant:12 protocol.procedures:3      # these
    python -m verify.simulation.mutants --defects                # the named defects
    python -m verify.simulation.mutants --list session.grant             # all mutants of a module
    python -m verify.simulation.mutants --find-again             # the known ones, after the engine has changed
    python -m verify.simulation.mutants --fresh 60 --seed 1128   # a new sample of the whole engine, short tests only

The results are kept in mutants.json next to this file. The tests need a MongoDB, which they start.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from verify.simulation import mutation
from verify.simulation.defects import ROWS
from verify.simulation.mutation import MODULES, VARIABLE, Mutant
from verify.simulation.put_back import VARIABLE as DEFECT

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = Path(__file__).with_name("mutants.json")
#: The seconds of the search by the simulation, and by the tests.
SIMULATION: Final = 60.0
TESTS: Final = 300.0
#: The number of tests that may fail only together with others, because the machine may be busy.
TRIES: Final = 6
#: The additional seconds allowed for the simulation. Its own limit counts only processor time.
OVERTIME: Final = 600.0
#: The tests that touch a module, the quick and likely ones first. Tests in memory touch all modules, and come before
#: them.
TOUCHED_BY: Final = {
    "protocol.procedures": ("protocol", "session", "waiting", "deadlock", "living"),
    "rule.in_python": ("retention", "living", "rule"),
    "session.grant": ("session", "locks", "living", "waiting", "fence"),
    "lock.grants": ("locks", "session", "async", "retention", "living", "waiting"),
    "rule.document": ("document", "locks", "session"),
    "session.commands": ("fast_path", "session", "store", "waiting"),
    "session.ending": ("session", "locks", "living", "fast_path", "store", "retention"),
    "session.grant_registry": ("session", "waiting", "locks", "living"),
    "session.heartbeat": ("session", "living"),
    "session.releases": ("fast_path",),
    "session.renewals": ("session", "living", "retention", "waiting"),
    "session.session": ("session", "living", "fast_path", "locks", "waiting"),
    "session.waits": ("waiting", "bells", "session"),
}
#: The test files for a named defect.
ANYWHERE: Final = ("protocol", "session", "locks", "retention", "waiting", "arrival_order", "rule")
#: The options of pytest. Long tests are left out.
PYTEST: Final = (
    *("-x", "-q", "--assert=plain", "--timeout", "60", "-m", "not long and not program"),
    *("-p", "no:cacheprovider", "-p", "verify.simulation.put_back"),
)
#: The message of pytest about a test that no longer exists.
MISSING: Final = re.compile(r"^ERROR: .*not found: ", re.MULTILINE)
#: The code that every Python on the path runs at its start. The processes that tests start are therefore mutants too.
STARTUP: Final = "from verify.simulation.mutation import from_environment\nfrom_environment()\n"


@dataclass
class Result:
    """The finder of a mutant.

    - found: "violation", "crash" or "hang", by the simulation at *seed*. None if the simulation did not find it.
    - seconds: processor seconds of the simulation, including the start of the process.
    - test: test that found it instead.
    - note: people's note about a mutant that nothing finds. The note begins with "equivalent" if the mutant breaks no
      promise. A named defect has no line, and is its own description.
    - sample: seed by which the mutant was drawn, 0 if it was named.
    """

    name: str
    line: int = 0
    before: str = ""
    after: str = ""
    found: str | None = None
    what: str = ""
    seed: int = 0
    seconds: float = 0.0
    test: str | None = None
    test_seconds: float = 0.0
    note: str = ""
    sample: int = 0


class Book:
    """The known results, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stored = json.loads(path.read_text()) if path.exists() else []
        self.results = {result["name"]: Result(**result) for result in stored}

    def keep(self, result: Result) -> None:
        """Write a result to the file."""
        self.results[result.name] = result
        self._write()

    def replace(self, results: Sequence[Result]) -> None:
        """Replace all results by these."""
        self.results = {result.name: result for result in results}
        self._write()

    def _write(self) -> None:
        rows = (json.dumps({k: v for k, v in asdict(each).items() if v}) for each in self.results.values())
        self.path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def totals(results: Sequence[Result]) -> str:
    """Return one line about the finders of a sample of mutants."""
    simulated = sum(bool(result.found) for result in results)
    tested = sum(bool(result.test) and not result.found for result in results)
    equivalent = sum(result.note.startswith("equivalent") for result in results if not (result.found or result.test))
    left = len(results) - equivalent
    rate = 100 * (simulated + tested) / max(1, left)
    return f"{len(results)} mutants: simulation {simulated}, tests {tested}, equivalent {equivalent}: {rate:.1f} %\n"


def simulated(environment: dict[str, str], arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the finding of the simulation in a process of its own."""
    command = [sys.executable, "-m", "verify.simulation.hunt", "--seconds", str(seconds), *arguments]
    try:
        run = _run(command, environment, seconds + OVERTIME)
    except subprocess.TimeoutExpired:
        return {"found": "hang", "seconds": seconds}
    lines = run.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"found": "crash", "what": run.stderr.strip()[-300:]}


def tested(name: str) -> str | None:
    """Return the short test that finds a mutant or a named defect, or None.

    The test files named after the mutant's module, or named by `TOUCHED_BY`, run first. All of tests/engine and
    tests/contract run afterwards. A test counts if it fails again alone, and passes alone without the mutant.
    """
    module = name.partition(":")[0]
    stem = module.rpartition(".")[2]
    touching = ANYWHERE if name in ROWS else TOUCHED_BY.get(module, ())
    likely = (stem, f"{stem}s", "parts", "by_themselves", *touching, "in_memory", "rule", "session")
    files = [path for file in likely if (path := f"tests/engine/test_{file}.py") and (ROOT / path).exists()]
    for what in (list(dict.fromkeys(files)), ["tests/engine", "tests/contract"]):
        skipped: list[str] = []
        for _ in range(TRIES):
            found = _failing(name, [*what, *skipped])
            if found is None:
                break
            if _failing(name, [found]) and not _failing("", [found]):
                return found
            skipped += ["--deselect", found]
    return None


def fresh(count: int, seed: int) -> None:
    """Draw a sample of the whole engine, and report how many mutants the short tests alone find."""
    every = [mutant for module in mutation.engine() for mutant in mutation.mutants(module)]
    drawn = random.Random(seed).sample(every, count)
    survivors = []
    for mutant in drawn:
        started = time.monotonic()
        found = tested(mutant.name)
        survivors += [] if found else [mutant]
        sys.stdout.write(f"{mutant.name} ({mutant}): {found or 'NOT FOUND'}, {time.monotonic() - started:.0f} s\n")
        sys.stdout.flush()
    rate = 100 * (count - len(survivors)) / count
    sys.stdout.write(f"{count} of {len(every)} mutants, seed {seed}: {count - len(survivors)} found, {rate:.0f} %\n")


def _failing(name: str, what: list[str]) -> str | None:
    """Return the first failing test. If the tests do not even end, as with blocked threads, return the first file."""
    with tempfile.TemporaryDirectory() as startup:
        Path(startup, "sitecustomize.py").write_text(STARTUP)
        path = os.pathsep.join((str(ROOT), startup))
        environment = {DEFECT: name} if name in ROWS else {VARIABLE: name} if name else {}
        command = [sys.executable, "-m", "pytest", *PYTEST, *what]
        try:
            run = _run(command, {**environment, "PYTHONPATH": path}, TESTS)
        except subprocess.TimeoutExpired:
            return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if failed or run.returncode in (0, 5) or MISSING.search(run.stdout + run.stderr):
        return failed[1] if failed else None
    return what[0]


def _run(command: Sequence[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    common = {"PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    return subprocess.run(
        ["nice", "-n", "2", *command],
        env={**os.environ, **common, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def sample(count: int, seed: int) -> list[Mutant]:
    """Return a sample of all modules. The seed decides the order, so that a larger sample begins with a smaller one."""
    every = [mutant for module in MODULES for mutant in mutation.mutants(module)]
    random.Random(seed).shuffle(every)
    return every[:count]


def find_again(book: Book) -> None:
    """Renumber the known mutants by their text and the nearest line. Drop those that are gone."""
    known = [result for name, result in book.results.items() if name not in ROWS]
    kept = [result for name, result in book.results.items() if name in ROWS]
    every = [mutant for module in MODULES for mutant in mutation.mutants(module)]
    for result in known:
        module = result.name.partition(":")[0]
        same = [mutant for mutant in every if (mutant.before, mutant.after) == (result.before, result.after)]
        if here := [mutant for mutant in same if mutant.module == module] or (same if len(same) == 1 else []):
            mutant = min(here, key=lambda mutant: abs(mutant.line - result.line))
            kept.append(replace(result, name=mutant.name, line=mutant.line))
        else:
            sys.stdout.write(f"gone: {result.name} {result.before} -> {result.after}\n")
    book.replace(kept)


class Search:
    """A search for the finders of mutants that keeps the results.

    - seconds: seconds of the simulation.
    - seed: seed of the sample.
    """

    def __init__(self, book: Book, seconds: float, seed: int = 0) -> None:
        self.book = book
        self.seconds = seconds
        self.seed = seed

    def simulate(self, name: str) -> None:
        """Let the simulation search, from where it stopped."""
        mutant = mutation.find(name)
        result = self.book.results.get(name) or Result(name, mutant.line, mutant.before, mutant.after, sample=self.seed)
        if not result.found and result.seconds < self.seconds:
            left = self.seconds - result.seconds
            found = simulated({VARIABLE: name}, ["--seed", str(result.seed + 1)], left)
            found["seconds"] = round(result.seconds + found.get("seconds", 0.0), 1)
            result = replace(result, **found)
        self._keep(result)

    def put_back(self, name: str) -> None:
        """Let the simulation search for a named defect."""
        result = Result(name, 0, ROWS[name].text, "")
        self._keep(replace(result, **simulated({}, ["--defect", name], self.seconds)))

    def test(self, name: str) -> None:
        """Let the tests search, if the simulation has found nothing."""
        result = self.book.results[name]
        if not (result.found or result.test_seconds):
            started = time.monotonic()
            result.test = tested(name)
            result.test_seconds = round(time.monotonic() - started, 1)
            self._keep(result)

    def _keep(self, result: Result) -> None:
        self.book.keep(result)
        sys.stdout.write(f"{result.name} {result.seconds} s {result.found or result.test or 'not found'}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m verify.simulation.mutants")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--fresh", type=int, metavar="COUNT", help="a new sample of the whole engine, short tests only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", choices=mutation.engine(), dest="module")
    parser.add_argument("--seconds", type=float, default=SIMULATION, help="how long the simulation looks for each")
    parser.add_argument("--defects", action="store_true", help="the named defects instead")
    parser.add_argument("--find-again", action="store_true", help="the known mutants, after the engine has changed")
    options = parser.parse_args()
    if options.module:
        sys.stdout.writelines(f"{mutant.name} {mutant}\n" for mutant in mutation.mutants(options.module))
        return
    if options.fresh:
        fresh(options.fresh, options.seed)
        return
    book = Book(RESULTS)
    if options.find_again:
        find_again(book)
        return
    search = Search(book, options.seconds, 0 if options.names else options.seed)
    if options.defects:
        for name in options.names or ROWS:
            search.put_back(name)
            search.test(name)
        return
    names = options.names or [mutant.name for mutant in sample(options.sample, options.seed)]
    for name in names:
        search.simulate(name)
        search.test(name)
    sys.stdout.write(totals([book.results[name] for name in names]))


if __name__ == "__main__":
    main()
