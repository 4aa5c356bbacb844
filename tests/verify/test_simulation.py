"""The engine under virtual time. No seed breaks a promise, and a broken engine is found and reported."""

import json
from datetime import timedelta
from functools import partial

import pytest

from django_mongolock.engine.session.commands import Commands
from django_mongolock.engine.session.ending import Cleanup
from django_mongolock.engine.session.grant_registry import GrantRegistry, LocalQueue
from tests.support.programs import python
from tests.verify.test_mutants import engine
from verify.simulation.constants import EXEMPT, LOW, VALUES, constants, lowered
from verify.simulation.faults import FAULTS, Event
from verify.simulation.kernel import Kernel, Process
from verify.simulation.link import Link
from verify.simulation.run import Outcome, simulate
from verify.simulation.schedule import schedule
from verify.simulation.standing import Watch
from verify.simulation.story import story
from verify.simulation.strikes import LineStrike, Struck
from verify.simulation.world import World

#: The number of runs of a minute.
RUNS = 24


def told(outcome: Outcome) -> str:
    """Return the records of a run, as text."""
    return json.dumps(outcome.records, sort_keys=True)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1, RUNS + 1, 8))
def test_no_promise_is_broken(first: int) -> None:
    """P1 to P7: Eight minutes of faults, judged by the checker of the fault runs."""
    for seed in range(first, first + 8):
        outcome = simulate(seed, 60.0)
        assert outcome.violations == [], f"python3 dev.py simulate --seed {seed}"
        assert outcome.crashes == []
        assert outcome.grants > 30


@pytest.mark.long
def test_a_seed_is_always_the_same_run() -> None:
    """The outcome of a seed depends on nothing else, so that a failure can be run again. Earlier runs and the order of
    sets, different in another process, do not matter."""
    first = told(simulate(7, 6.0))
    assert told(simulate(8, 6.0)) != first
    assert told(simulate(7, 6.0)) == first
    program = "from tests.verify.test_simulation import *; print(told(simulate(7, 6.0)))"
    said = python("-c", program, PYTHONHASHSEED="1", DJANGO_SETTINGS_MODULE="testproject.settings")
    assert said.strip() == first


def test_every_fault_is_chosen_by_some_seed() -> None:
    assert {event.name for seed in range(1, 60) for event in schedule(seed, 60.0)} == set(FAULTS)


@pytest.mark.long
def test_every_fault_is_injected() -> None:
    """Each fault is begun and healed. The processes' own faults are, too."""
    events = [Event(name, 1.0 + place / 2, place) for place, name in enumerate(FAULTS)]
    outcome = simulate(13, 20.0, sorted([*events, *schedule(13, 20.0)], key=lambda event: event.at))
    seen = {record["name"] for record in outcome.records if record["what"] == "fault"}
    assert seen >= {*FAULTS, "cancel", "strike"}
    assert outcome.is_good
    counts = outcome.counts + simulate(14, 20.0).counts
    assert all(counts[name] > 0 for name in ("answers lost", "commands twice", "cancellations", "signals"))
    usual = {record["name"] for record in simulate(7, 20.0, []).records if record["what"] == "fault"}
    assert usual == {"cancel", "strike", "forget", "fork"}


def test_a_fault_that_ends_heals_nothing_else() -> None:
    world = World(1)
    world.janitor.begin(cut := Link(cut=True, slow=2.0))
    world.janitor.begin(slow := Link(slow=1.0))
    assert world.janitor.link == Link(cut=True, slow=2.0)
    world.janitor.end(cut)
    assert world.janitor.link == slow
    world.janitor.end(slow)
    assert world.janitor.link == Link()


@pytest.mark.parametrize(("ends", "stands"), [("told", False), ("refused", True)])
def test_who_hears_of_a_loss_while_it_waits_for_the_next_key_is_not_over(ends: str, stands: bool) -> None:
    world = World(1)
    watch, now = Watch(world), world.servers.primary.time(world.kernel)
    world.write("ask", 5, id="one", keys=("a", "b"), inner=None, wait=5.0)
    world.write(ends, 5, id="one")
    entry = {"grant": "g", "label": "one", "pid": 5, "until": now + timedelta(seconds=9)}
    world.servers.documents["a"] = {"holders": [entry], "waiters": []}
    world.kernel.run(1.0)
    watch.begin()
    world.kernel.run(3.0)
    watch.end()
    assert [record["id"] for record in world.records if record["what"] == "stood"] == (["one"] if stands else [])


@pytest.mark.long
def test_what_is_abandoned_and_not_removed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of an attempt that is over is seen where it stands."""
    monkeypatch.setattr(Cleanup, "ensure_removed", lambda self, grant, **_: None)
    found = [violation.text for violation in simulate(1, 20.0, []).violations if violation.rule == "stood"]
    assert any("an entry of an attempt that is over" in text for text in found)


@pytest.fixture
def no_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the arrival time (F69 again). A waiter that comes back to the queue has then just arrived."""
    monkeypatch.setattr(Commands, "with_arrival", lambda self, step, grant, now: step)


@pytest.mark.long
@pytest.mark.usefixtures("no_arrival")
def test_a_broken_engine_is_found_and_told() -> None:
    """The checker finds the fault, and reports the actions of the named attempts in a few lines."""
    runs = ((seed, simulate(seed, 60.0)) for seed in range(1, 20))
    seed, found = next(run for run in runs if any(each.rule == "order" for each in run[1].violations))
    text = story(found, schedule(seed, 60.0))
    assert text.splitlines()[0].startswith(f"{min(found.violations, key=lambda each: each.at).rule} at ")
    assert 5 <= len(text.splitlines()) <= 30


def test_the_engine_is_left_as_it_was() -> None:
    before = engine()
    with pytest.raises(KeyError):
        simulate(1, 2.0, [Event("no such fault", 1.0, 1)])
    assert engine() == before


def test_every_constant_of_the_engine_is_lowered_in_some_run_or_says_why_not() -> None:
    """A threshold that no run reaches hides later faults. F107 lay behind a queue of more than 32."""
    assert set(constants()) == {*LOW, *EXEMPT}
    assert not set(LOW) & set(EXEMPT)
    assert all(VALUES[name] > low for name, low in LOW.items())
    assert {name for seed in range(200) for name, _, _ in lowered(seed)} == {name.rpartition(".")[2] for name in LOW}


# The kernel


def test_time_goes_by_when_all_wait() -> None:
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
    kernel, seen = Kernel(1), []
    stopped, dead = kernel.process("stopped"), kernel.process("dead")

    def strand(process: Process) -> None:
        kernel.sleep(1.0)
        seen.append((process.kind, round(kernel.time)))

    for process in (stopped, dead):
        kernel.spawn(process, partial(strand, process))
    kernel.spawn(dead, lambda: seen.append(("unborn", 0)), after=0.6)
    kernel.run(0.5)
    stopped.stopped_until = 5.0
    dead.alive = False
    kernel.run(10.0)
    kernel.close()
    assert seen == [("stopped", 5)]


def test_a_strand_is_struck_where_it_waits() -> None:
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


def test_a_strand_is_struck_at_a_line() -> None:
    """A strand is struck once at the line of the engine with that number, and only where an interpreter checks for
    signals."""
    kernel, struck = Kernel(1), []
    queue = LocalQueue(9, GrantRegistry(None))  # type: ignore[arg-type]

    def strand(number: int) -> None:
        strike = LineStrike(kernel, number)
        try:
            with strike:
                queue.wake_first(("k", "exclusive", 1, 1, None, 0))
                queue.wake_first(("k", "exclusive", 1, 1, None, 0))
        except Struck:
            struck.append(number)
        assert strike.has_struck == (number in struck)
        assert not queue._mutex.locked()
        if strike.has_struck:
            with strike:
                queue.wake_first(("k", "exclusive", 1, 1, None, 0))  # it strikes no more

    for number in range(20):
        kernel.spawn(kernel.outside, partial(strand, number), after=number)
    kernel.run(30.0)
    assert kernel.failures == []
    assert struck == list(range(1, len(struck) + 1))
    assert 6 <= len(struck) <= 12
