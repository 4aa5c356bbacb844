"""The engine under virtual time: no seed breaks a promise, and a broken engine is found and told."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest

from django_mongolock.engine.session import heartbeat, wakeups
from django_mongolock.engine.session.commands import Commands
from tests.simulation.faults import FAULTS, schedule
from tests.simulation.kernel import Kernel, Process
from tests.simulation.run import Outcome, simulate
from tests.simulation.shrink import shrunk, story

#: How many runs of a minute are made.
RUNS = 40


def told(outcome: Outcome) -> str:
    """The records of a run, as text."""
    return json.dumps(outcome.records, sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, RUNS + 1, 8))
def test_no_promise_is_broken(first: int) -> None:
    """P1 to P7: eight minutes of faults, judged by the checker of the fault runs."""
    for seed in range(first, first + 8):
        outcome = simulate(seed, 60.0)
        assert outcome.violations == [], f"python3 dev.py simulate --seed {seed}"
        assert outcome.crashes == []
        assert outcome.grants > 30


def test_a_seed_is_always_the_same_run() -> None:
    """What a seed does depends on nothing else, so that a failure can be run again."""
    first = simulate(7, 10.0)
    assert told(simulate(7, 10.0)) == told(first)
    assert told(simulate(8, 10.0)) != told(first)


def test_every_fault_is_injected() -> None:
    """No fault is only listed."""
    names = {event.name for seed in range(1, 60) for event in schedule(seed, 60.0)}
    assert names == set(FAULTS)
    seen = {record["name"] for seed in (1, 2, 3, 6, 9) for record in simulate(seed, 40.0).records if "name" in record}
    assert len(seen) >= 16


@pytest.fixture
def no_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """F69 again: a waiter that comes back to the queue has just arrived."""
    monkeypatch.setattr(Commands, "with_arrival", lambda self, step, entry, grant, now: step)


@pytest.mark.usefixtures("no_arrival")
def test_a_broken_engine_is_found_and_told() -> None:
    """The checker finds it, the schedule is made shorter, and what is left is told in a few lines."""
    found = next(seed for seed in range(1, 20) if any(v.rule == "order" for v in simulate(seed, 60.0).violations))
    case = shrunk(found, 60.0, "order", patience=8.0)
    assert case.seconds < 60.0
    assert len(case.events) < len(schedule(found, 60.0)) / 2
    text = story(case, case.run())
    assert "was overtaken by" in text
    assert 5 <= len(text.splitlines()) <= 30
    assert text == story(case, case.run())


def test_the_engine_is_left_as_it_was() -> None:
    """After a run the engine's modules have their threads again."""
    wait = wakeups.Wakeup.wait
    simulate(1, 2.0)
    assert vars(heartbeat)["threading"] is threading
    assert wakeups.Wakeup.wait is wait


# The kernel


def test_time_goes_by_when_all_wait() -> None:
    """Strands run in the order in which they are due, whatever they were started in."""
    kernel, seen = Kernel(1), []

    def strand(seconds: float) -> None:
        kernel.sleep(seconds)
        seen.append((seconds, round(kernel.time, 2)))

    for seconds in (3.0, 1.0, 2.0):
        kernel.spawn(kernel.outside, partial(strand, seconds))
    kernel.run(10.0)
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert kernel.time == 10.0


def test_a_stopped_process_runs_later_and_a_dead_one_never() -> None:
    """SIGSTOP and SIGKILL."""
    kernel, seen = Kernel(1), []
    stopped, dead = kernel.process("stopped"), kernel.process("dead")

    def strand(process: Process) -> None:
        kernel.sleep(1.0)
        seen.append((process.kind, round(kernel.time)))

    for process in (stopped, dead):
        kernel.spawn(process, partial(strand, process))
    kernel.run(0.5)
    stopped.stopped_until = 5.0
    dead.alive = False
    kernel.run(10.0)
    kernel.close()
    assert seen == [("stopped", 5)]


def test_a_strand_is_struck_where_it_waits() -> None:
    """What a signal handler raises comes out of the wait, once."""
    kernel, seen = Kernel(1), []

    def strand() -> None:
        try:
            kernel.sleep(100.0)
        except ZeroDivisionError:
            seen.append(kernel.time)
        kernel.sleep(1.0)
        seen.append(kernel.time)

    struck = kernel.spawn(kernel.outside, strand)
    kernel.run(2.0)
    kernel.strike(struck, ZeroDivisionError())
    kernel.run(10.0)
    assert [round(at) for at in seen] == [2, 3]
    assert kernel.failures == []
