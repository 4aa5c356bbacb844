"""Report the tests that a run leaves out.

The report is one sentence at the end of the run, and a failure in CI. This is a pytest plugin: `-p tests.left_out`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import pytest
from environ import Env

from tests import parts

Report = pytest.TestReport | pytest.CollectReport

#: Names the file that takes the sentence, so that dev.py can say it last.
FILE: Final = "MONGOLOCK_LEFT_OUT"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a test that is left out has failed."""
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI, a module that is left out has failed."""
    report = yield
    judge(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sentence about left-out tests, in the process that hears of all tests."""
    reasons = [reason_of(report) for report in terminalreporter.stats.get("skipped", ())]
    said = sentence(Counter(reason for reason in reasons if reason is not None))
    if file := os.environ.get(FILE):
        Path(file).write_text(said)
    elif said:
        terminalreporter.write_line(said)


def in_ci() -> bool:
    """Return whether this is continuous integration, where CI is set."""
    return bool(Env().bool("CI", default=False))


def judge(report: Report) -> None:
    """Make a failure of a test that CI leaves out."""
    reason = reason_of(report)
    if reason is not None and in_ci():
        report.outcome = "failed"
        report.longrepr = f"left out in CI ({reason}): install what it needs"


def reason_of(report: Report) -> str | None:
    """Return the reason why a test was left out, or None."""
    if not report.skipped or not isinstance(report.longrepr, tuple):  # that of an xfail is the failure
        return None
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def sentence(counts: Mapping[str, int]) -> str:
    """Return a sentence about the left-out tests and the command that adds them, or an empty text if all tests ran."""
    lacked = {name: count for name in parts.PARTS if (count := counts.get(f"needs {name}"))}
    added = {name: count for name, count in lacked.items() if parts.PARTS[name].packages}
    said = []
    if added:
        command = "python3 dev.py test --with-system-packages adds them"
        said.append(f"{sum(added.values())} that need {' or '.join(added)} ({command})")
    said += [f"{count} that need {name}" for name, count in lacked.items() if name not in added]
    if others := sum(counts.values()) - sum(lacked.values()):
        said.append(f"{others} for the reasons that pytest gives")
    return f"left out: {', '.join(said)}" if said else ""
