"""The harness itself: a short run of many faults, and proof that it finds what is wrong with a lock that is."""

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from verify.faults import report
from verify.faults.injections import FAULTS
from verify.faults.run import NAMES, WORKER_FAULTS, Outcome, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops and kills process groups")

#: Those that need no election: a short run shall see many.
QUICK = [
    "late-commands",
    "late-replies",
    "lost-replies",
    "half-open",
    "stop-secondary",
    "fail-closed",
    "fail-write-concern",
    "bells-killed",
    *WORKER_FAULTS,
]


def run(folder: Path, seconds: float, names: list[str], seed: int = 1) -> Outcome:
    folder /= str(seed)
    folder.mkdir()
    return Run(folder, seed=seed, seconds=seconds, names=names)()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_promise_is_broken_in_a_short_run(tmp_path: Path) -> None:
    """P1, P2, P5 to P7 under F8, F11, F15 to F18, F25, F27, F28, F30, F32, F33, F36, F50, F51, all at once."""
    outcome = run(tmp_path, 10, QUICK)
    assert outcome.violations == []
    assert outcome.grants > 20
    assert set(outcome.injected) & set(FAULTS)
    assert set(outcome.injected) & set(WORKER_FAULTS)


def test_every_fault_is_explained() -> None:
    assert len(set(NAMES)) == len(NAMES) > 25
    assert all(fault.text for fault in FAULTS.values())
    assert all(WORKER_FAULTS.values())


class TestReport:
    outcomes: ClassVar[list[dict[str, Any]]] = [
        {
            "seed": seed, "seconds": 60.0, "faults": faults, "injected": {"step-down": 3}, "attempts": 50, "grants": 40,
            "looks": 900, "slowest": {"step-down": slowest}, "violations": [],
        }
        for seed, faults, slowest in [(1, ["step-down"], 1.25), (2, list(NAMES), 2.5), (3, list(NAMES), 0.5)]
    ]  # fmt: skip

    def test_table(self) -> None:
        """A line for each fault, alone and together with the others; what was not run is not said to be fine."""
        text = report.table(self.outcomes)
        assert "| step-down | The primary steps down, by force or in order. | 9 | 40 | 0 | 2.5 s |" in text
        assert "| all-down | All members are killed, and started again. | 0 | 0 | not run |  |" in text
        assert "2 runs of 60 s (seeds 2, 3): 6 faults, 100 attempts, 80 grants" in text
