"""The harness itself, with a short run of many faults, and proof that it finds the faults of a broken lock."""

import re
import sys
from pathlib import Path

import bson
import pytest

from tests.support.packages import ROOT
from tests.verify.test_checker import Story
from verify.faults.aims import granted_by
from verify.faults.history import History
from verify.faults.injections import FAULTS
from verify.faults.opportunities import AIMS, opportunities
from verify.faults.run import WORKER_FAULTS, Outcome, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops and kills process groups")

#: Faults that need no election, because a short run shall see many.
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


def test_opportunities() -> None:
    """A run counts a rival that is let in past a stopped holder, and a rival that waits when the holder is killed. An
    attempt without an answer counts if it does not know yet that it holds the lock. A release that another primary does
    not know counts, too."""
    story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 1.5).ask(10, "b").got(12, "b", 2).see(12, "b", 1.0)
    story.tell("stopped", 10.5, "harness", u=13, group=story.pid("a")).leave(14, "b").lost(14, "a", told=14)
    story.ask(20, "b.2").got(20, "b.2", 3).see(20, "b.2", 1.5).ask(20, "c", wait=20.0).got(24, "c", 4).leave(25, "c")
    story.tell("kill", 20.5, "harness", group=story.pid("b")).fault(23, 26, lost=[("c", 23.5), ("c", 24.5)])
    found = opportunities(History(story.fault(25, 26, undone=["c", "b.2"]).end().records))
    assert {aim: found[aim] for aim in AIMS.values()} == dict.fromkeys(AIMS.values(), 1)


def test_a_run_that_proves_nothing_says_so() -> None:
    """A run proves nothing if none of its aims had an opportunity, or if its only faults never happened. Any other run
    names the aims that it missed."""
    stops, kills = AIMS["stop-worker"], AIMS["kill-worker"]
    idle = Outcome(1, 60.0, ["stop-worker", "kill-worker", "ttl"], injected={"ttl": 3, "stop-worker": 2})
    assert (idle.missed, idle.proves_nothing) == ([stops, kills], True)
    one = Outcome(1, 60.0, ["stop-worker", "kill-worker"], opportunities={kills: 1})
    assert (one.missed, one.proves_nothing) == ([stops], False)
    assert Outcome(1, 60.0, ["ttl"]).proves_nothing
    assert not Outcome(1, 60.0, ["ttl"], injected={"ttl": 1}).proves_nothing


def test_an_answer_that_grants_a_lock_is_told_from_others() -> None:
    """The bytes of a server's reply show the holder of a granted lock, and nothing if it is not held."""
    header = bytes(21)
    assert (
        granted_by(header + bson.encode({"value": {"mine": {"label": "sync-1-2", "token": 7}}, "ok": 1.0}))
        == "sync-1-2"
    )
    assert granted_by(header + bson.encode({"value": {"place": 2, "holder": {"label": "mine"}}, "ok": 1.0})) is None
    assert granted_by(header + bson.encode({"value": None, "mine": 1})) is None


def test_every_fault_is_in_the_docs() -> None:
    """The table has every fault by its name, with the text of the code."""
    texts = {name: fault.text.partition("\n")[0] for name, fault in FAULTS.items()} | WORKER_FAULTS
    table = Path(ROOT, "docs/evidence/faults.md").read_text().partition("## The faults")[2].partition("\n## ")[0]
    assert dict(re.findall(r"(?m)^\| ([a-z-]+) \| (.*[.]) \|$", table)) == texts
