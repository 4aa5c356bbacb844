"""The tiers of the tests, with their cases, and the failures of cases in the wrong one. These tests run pytest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiers
from tests.support.packages import ROOT

pytest_plugins = ["pytester"]

MARKERS = "\n".join(f"  {name}: a tier" for name in ("long", "witness", "program"))
CASES = """
import pytest
def test_short(): pass
@pytest.mark.witness
def test_witness(): pass
@pytest.mark.long
def test_long(): pass
@pytest.mark.program
def test_program(): pass
@pytest.mark.long
class TestFile:
    def test_of_a_long_file(self): pass
    @pytest.mark.witness
    def test_witness_of_a_long_file(self): pass
    @pytest.mark.program
    def test_program_of_a_long_file(self): pass
"""
SHORT = {"short", "witness", "witness_of_a_long_file"}
LONG = {"long", "of_a_long_file"}
#: The clock of these cases. A case that takes a second adds one to it.
CLOCK = [0.0]
HEAD = """
import pytest
from tests.test_tiers import CLOCK

def take(seconds):
    CLOCK[0] += seconds
"""
LONG_CASE = f"{HEAD}\ndef test_takes_a_second(): take(1)"
ONCE_CASE = f"{HEAD}\ntimes = [0, 1]\ndef test_takes_a_second_once(): take(times.pop())\ndef test_next(): pass"
SHARED = f"""{HEAD}
@pytest.fixture(scope="module")
def inner(): take(1)
@pytest.fixture(scope="module")
def outer(inner):
    take(1)
    yield
    take(1)
def test_uses_it(outer): pass
def test_uses_it_too(outer): pass
"""
OWN_SETUP = f"""{HEAD}
@pytest.fixture
def mine(): take(1)
def test_sets_up(mine): pass
"""
OWN_TEARDOWN = f"""{HEAD}
@pytest.fixture
def mine():
    yield
    take(1)
def test_ends(mine): pass
def test_next(): pass
"""
MARKED = f"""{HEAD}
@pytest.mark.witness
def test_takes_a_second(): take(1)
@pytest.mark.long
def test_takes_a_second_too(): take(1)
"""


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a project that knows the marks, and has no plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini(f"[pytest]\nmarkers =\n{MARKERS}\n  flaky: is repeated\n")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], SHORT),
        (["--long"], LONG),
        (["--all"], SHORT | LONG),
        (["-m", "program"], {"program", "program_of_a_long_file"}),
        (["test_cases.py"], SHORT),
        (["test_cases.py::test_program", "test_cases.py::test_long"], {"program", "long"}),
        (["-k", "of_a_long_file"], {"witness_of_a_long_file"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_which_cases_run(pytester: pytest.Pytester, arguments: list[str], names: set[str]) -> None:
    """Short cases and witnesses run by default, and the long ones with --long. A case that is named runs."""
    pytester.makepyfile(test_cases=CASES)
    result = pytester.runpytest_inprocess("-p", "tests.tiers", "--collect-only", "-q", *arguments)
    assert set(re.findall(r"::test_(\w+)$", result.stdout.str(), re.MULTILINE)) == names


def test_a_short_case_is_not_repeated(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_cases="import pytest\n@pytest.mark.flaky(reruns=1)\ndef test_short(): pass")
    result = pytester.runpytest_inprocess("-p", "tests.tiers")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "test_short is marked `flaky`: nothing in the short tier is repeated" in result.stderr.str()


@pytest.fixture
def by_that_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge cases by CLOCK, on a machine without processes that wait for a processor."""
    monkeypatch.setattr(tiers, "now", lambda: CLOCK[0])
    monkeypatch.setattr(tiers, "stalled", lambda: 0.0)


@pytest.mark.parametrize(
    ("cases", "errors"),
    [(LONG_CASE, 1), (OWN_SETUP, 1), (OWN_TEARDOWN, 1), (SHARED, 0), (MARKED, 0), (ONCE_CASE, 0)],
    ids=["in itself", "in its setup", "in its teardown", "in what others share", "marked", "the first time only"],
)
@pytest.mark.usefixtures("by_that_clock")
def test_a_case_that_takes_too_long(pytester: pytest.Pytester, cases: str, errors: int) -> None:
    """A case over the limit fails, with advice. Shared fixtures do not count, and marked cases may take their time."""
    pytester.makepyfile(cases)
    result = pytester.runpytest_inprocess(plugins=[tiers.Stopwatch(0.5)])
    result.assert_outcomes(passed=1 if cases in {LONG_CASE, OWN_SETUP} else 2, errors=errors)
    assert ("takes 1.00 s, more than 0.5 s: mark it, or make it faster" in result.stdout.str()) == bool(errors)


@pytest.mark.usefixtures("by_that_clock")
def test_on_a_busy_machine(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which a process waited for a processor is not the fault of the case, and does not count."""
    monkeypatch.setattr(tiers, "stalled", lambda: CLOCK[0] * 0.6)
    pytester.makepyfile(LONG_CASE)
    assert pytester.runpytest_inprocess(plugins=[tiers.Stopwatch(0.5)]).ret == 0
    assert pytester.runpytest_inprocess(plugins=[tiers.Stopwatch(0.3)]).ret == 1


def test_each_repetition_has_its_reason() -> None:
    """docs/project/tests.md has a line for each file with cases that are marked `flaky`."""
    marked = {
        file.relative_to(ROOT).as_posix()
        for file in Path(ROOT, "tests").rglob("test_*.py")
        if "mark.flaky(" in file.read_text() and file != Path(__file__).resolve()
    }
    listed = set(re.findall(r"^\| `(tests/\S+\.py)` \|", Path(ROOT, "docs/project/tests.md").read_text(), re.MULTILINE))
    assert marked == listed
