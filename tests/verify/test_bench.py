"""python3 dev.py bench measures its subject, and throws out libraries that are no locks. The figures are no test."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bench.__main__ as command
from bench import machine, report
from bench.bench import Bench
from bench.contend import Liar, in_a_loop, prove
from bench.contenders import BARE, OURS, Contender
from bench.measure import Piece, Spread, Table, Turn, Turns, interleaved
from bench.peers import Peer
from bench.questions import QUESTIONS, Question
from bench.workers import State, WorkerError, workers
from bench.world import World
from testproject.servers import ServerError
from tests.support.packages import ROOT
from tests.support.programs import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux")


class NoLock(Peer):
    """Lets everybody in."""

    needs = "directory"

    def acquire(self, key: str) -> None:
        pass

    release = acquire


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as found:
        yield found


def contender(make: type[Peer]) -> Contender:
    return Contender(make.__name__, make, make.needs)


# The checker


@pytest.mark.long
def test_what_is_no_lock_is_found_out(world: World) -> None:
    bench = Bench(world, quick=True)
    with workers(2) as crew:
        bench.open(crew, contender(NoLock))
        with pytest.raises(Liar, match="it is no lock"):
            prove(crew, "key")


@pytest.mark.long
def test_ours_is_found_to_be_one(world: World) -> None:
    """The same checker finds no fault in two processes that use this library, and sees them take turns."""
    bench = Bench(world, quick=True)
    with workers(2) as crew:
        bench.open(crew, OURS)
        prove(crew, "first")
        turns, begin, cpu = in_a_loop(crew, "second", seconds=0.3)
    assert {turn.worker for turn in turns.turns} == {0, 1}
    assert turns.hand_overs
    assert cpu > 0
    assert min(turn.asked for turn in turns.turns) >= begin


def test_turns() -> None:
    fair = [Turn(0.0, 1.0, 2.0), Turn(0.5, 2.01, 3.0), Turn(0.9, 3.02, 4.0), Turn(4.5, 4.6, 5.0)]
    turns = Turns(list(reversed(fair)))
    assert turns.held_twice == 0
    assert [round(time) for time in turns.hand_overs] == [10, 20]  # nobody waited for the last one
    assert Turns([*fair, Turn(0.1, 3.5, 3.6)]).held_twice == 1


# Measuring


def test_rounds_are_interleaved_and_who_fails_is_left_out() -> None:
    asked: list[str] = []
    failed: list[str] = []

    def measure(name: str) -> float:
        asked.append(name)
        if name == "b" and asked.count("b") == 2:
            raise ValueError("it ended")
        return float(asked.count(name))

    found = interleaved("abc", 4, measure, lambda name, error: failed.append(f"{name}: {error}"))
    assert found == {"a": [1, 2, 3, 4], "c": [1, 2, 3, 4]}
    assert failed == ["b: it ended"]
    assert all(sorted(asked[n : n + 3]) == list("abc") for n in (0, 3))
    assert asked.count("b") == 2


# The workers


def fail(state: State) -> None:
    raise ValueError("said so")


def sleep(state: State, seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


@pytest.mark.long
def test_a_worker_that_fails_hangs_or_dies_is_told() -> None:
    """The error has the type and the place of the worker's error. No caller waits for it without end, and nothing of it
    is left behind."""
    with workers(3) as (fails, hangs, dies):
        with pytest.raises(WorkerError, match=r"ValueError: said so \(test_bench\.py:\d+\)"):
            fails.call(fail)
        assert fails.call(sleep, 0.0) == fails.pid
        hangs.begin(sleep, 60)
        with pytest.raises(WorkerError, match="no result within"):
            hangs.result(0.1)
        dies.begin(sleep, 60)
        os.kill(dies.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="has ended"):
            dies.result()
        pids = [worker.pid for worker in (fails, hangs, dies)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_is_missing_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package or server is named with a reason, once."""

    class Nowhere(NoLock):
        package = "there-is-no-such-package"

    bench, elsewhere = Bench(world), Contender("elsewhere", NoLock, "redis")
    monkeypatch.setattr(World, "_server", staticmethod(missing_server))
    for _ in range(2):
        assert list(bench.ready([contender(Nowhere), elsewhere, contender(NoLock)])) == ["NoLock"]
    assert bench.notes == [
        "Nowhere: left out: there-is-no-such-package is not installed",
        "elsewhere: left out: no redis-server on PATH: apt-get install redis-server",
    ]


def missing_server(name: str) -> Any:
    raise ServerError("no redis-server on PATH: apt-get install redis-server")


# The command


def fine(bench: Bench) -> Iterator[Piece]:
    """Fine."""
    yield Table("T", ["a", "b"], [["x", Spread(1.0, 0.5, 2.0)]], note="n")


def breaks(bench: Bench) -> Iterator[Piece]:
    """Break after the first table."""
    yield Table("first", ["a"], [["x"]])
    raise ValueError("broken")


def hangs(bench: Bench) -> Iterator[Piece]:
    """Never end."""
    yield Table("begun", ["a"])
    time.sleep(60)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "facts", lambda: {"servers": {}, "packages": {}})
    for name in list(QUESTIONS):
        monkeypatch.delitem(QUESTIONS, name)
    for ask, limit in ((hangs, 0.3), (breaks, 30.0), (fine, 30.0)):
        monkeypatch.setitem(QUESTIONS, ask.__name__, Question(ask, limit))


def test_a_question_that_breaks_or_hangs_does_not_end_the_run(
    fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The findings until then are kept, the other questions are asked, and the exit code reports the failure."""
    file, started = tmp_path / "figures.json", time.monotonic()
    with pytest.raises(SystemExit):
        command.main(["fien"])
    assert "there is no question fien, only hangs" in capsys.readouterr().err
    assert command.main(["fine", "--json", str(file)]) == 0
    assert list(json.loads(file.read_text())["questions"]) == ["fine"]
    assert command.main(["--json", str(file)]) == 1
    assert time.monotonic() - started < 30  # a question that hangs would do so for a minute
    found = json.loads(file.read_text())["questions"]
    assert list(found) == ["hangs", "breaks", "fine"]
    assert found["hangs"]["error"] == "ended after 0 s"
    assert found["hangs"]["tables"][0]["title"] == "begun"
    assert found["breaks"]["error"] == "ValueError: broken"
    assert found["breaks"]["tables"][0]["title"] == "first"
    assert "error" not in found["fine"]
    assert "| a | b" in capsys.readouterr().out


@pytest.mark.long
def test_quick_questions_end_to_end(tmp_path: Path) -> None:
    """Quick questions work, including the one that uses a session of the engine by names that may change."""
    file = tmp_path / "figures.json"
    said = python("-m", "bench", "alone", "contended", "held", "--quick", "--json", str(file), folder=ROOT)
    assert "One node: acquire and release, uncontended" in said
    answers = json.loads(file.read_text())
    assert answers["machine"]["cores"]
    rows = {row[0]: row for row in answers["questions"]["alone"]["tables"][0]["rows"]}
    assert {OURS.name, BARE.name} <= set(rows)
    assert all(row[1][0] > 0 for row in rows.values())
    (timeline,) = (found for found in answers["questions"]["contended"]["tables"] if "where the time" in found["title"])
    assert all(row[1] > 0 for row in timeline["rows"])
    assert [row[1][0] for row in answers["questions"]["held"]["tables"][0]["rows"]][:2] == [2, 2]  # commands of a beat
    report.draw(answers["questions"], tmp_path)
    assert OURS.name in (tmp_path / "benchmark-alone.svg").read_text()
    report.write(answers, page := tmp_path / "page.md")
    assert "**One node: acquire and release, uncontended**" in page.read_text()


@pytest.mark.long
def test_workers_end_with_those_who_started_them(tmp_path: Path) -> None:
    """If the command is killed, nothing is left behind, because a worker without a partner ends."""
    code = "from bench.workers import Worker; w = Worker(); print(w.pid, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
