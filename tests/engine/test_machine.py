"""Anything at all with locks, in any order, at a real server: no two are held at once that exclude each other.

    python3 dev.py test -m program tests/engine/test_machine.py        # a quarter of an hour, beside two busy loops

MONGOLOCK_MACHINE_MINUTES, _BURNERS, _SEED, _WEATHER, _HELD_UP say how long and against what.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.session.session import Session
from tests.engine.conftest import Document, LockMaker, make_lock
from tests.engine.machine import Machine
from tests.engine.world import Errors, Plan, Violation, World
from tests.support.grants import own
from verify.faults.broken import broken

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

#: Threads do not repeat what they did: nothing can be made smaller by trying again.
ONCE = settings(
    deadline=None,
    phases=[Phase.generate],
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
#: What the long run is like, if the environment does not say otherwise.
LONG = {"MINUTES": 15.0, "BURNERS": 2, "SEED": 0, "WEATHER": 1, "HELD_UP": 0}


def setting(name: str) -> float:
    return float(os.environ.get(f"MONGOLOCK_MACHINE_{name}", LONG[name]))


Worlds = Callable[[Plan], World]


@pytest.fixture
def worlds(collection: Collection[Document], mongo_uri: str) -> Iterator[Worlds]:
    """Makes worlds over a collection of this test."""
    logger = logging.getLogger("django_mongolock")
    level = logger.level
    with contextlib.ExitStack() as stack:

        def make(plan: Plan) -> World:
            world = World(mongo_uri, collection.database.name, collection.name, plan)
            stack.callback(world.close)
            handler = Errors(world)
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
            return world

        logger.setLevel(logging.ERROR)  # of a long run, nobody can keep every loss
        try:
            yield make
        finally:
            logger.setLevel(level)


def run(world: World, seed: int, examples: int, steps: int) -> None:
    """Run so many examples. Raises Violation."""
    machine = hypothesis.seed(seed)(type("Machine", (Machine,), {"world": world}))
    run_state_machine_as_test(machine, settings=settings(ONCE, max_examples=examples, stateful_step_count=steps))
    if world.found is not None:
        raise Violation(world.found)


def run_for(world: World, seconds: float, seed: int) -> None:
    """Run examples, a few for each seed, until *seconds* are over."""
    world.ends_at = clock.now() + seconds
    while not world.over:
        seed += 1
        run(world, seed, examples=10, steps=50)
        report(world, f"{world.ends_at - clock.now():.0f} s left, seed {seed}")


def report(world: World, *more: object) -> None:
    counts = " ".join(f"{name}={count}" for name, count in sorted(world.counts.items()))
    sys.stderr.write(f"{' '.join(map(str, more))}: {counts} looks={world.watch.looks} seeming={world.watch.seeming}\n")


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """So many processes that do nothing but work; they end with this one."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1_000_000))"
    started = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.long
def test_no_two_are_held_that_exclude_each_other(worlds: Worlds) -> None:
    """P1, P2, P6: exclusive, shared and semaphores, in three processes; what they do is the same in every run."""
    world = worlds(Plan(leases=(0.5, 1.0), waits=(0.0, 0.02, 0.2, 0.6), leaks=3))
    world.ends_at = clock.now() + 40  # on a machine that is so slow, less will do
    run(world, seed=13, examples=12, steps=30)
    assert world.counts["grants"] > 10


@pytest.mark.program
@pytest.mark.timeout(0)
def test_no_two_are_held_that_exclude_each_other_for_long(worlds: Worlds) -> None:
    """P1, P2, P6: the same for as long as one likes, under load, in bad weather."""
    plan = Plan(weather=bool(setting("WEATHER")), held_up=bool(setting("HELD_UP")))
    seed = int(setting("SEED")) or random.randrange(2**31)
    with burners(int(setting("BURNERS"))):
        run_for(worlds(plan), setting("MINUTES") * 60, seed)


def _held_read_twice(lock: MongoLock) -> bool:
    """`MongoLock.held` as it was once: see `test_what_is_released_is_not_held_to_whoever_looks`."""
    return bool(own(lock).grants) and own(lock).is_ours and all(grant.held for grant in own(lock).grants)


@pytest.mark.program
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "variant", ["no-deadline", "release-by-key", "deadline-from-reply", "deadline-from-news", "held-read-twice"]
)
def test_a_broken_lock_is_found_out(worlds: Worlds, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """P1: a machine that finds nothing would prove nothing."""
    began = clock.now()
    with contextlib.ExitStack() as stack:
        if variant == "held-read-twice":
            monkeypatch.setattr(MongoLock, "held", property(_held_read_twice))
        else:
            stack.enter_context(broken(variant))
        world = worlds(Plan(weather=True))
        with pytest.raises(Violation) as caught:
            run_for(world, 800, seed=1)
    report(world, f"{variant} found after {clock.now() - began:.0f} s", str(caught.value).partition("\n")[0])


# What it has found


class Slow(MongoStore):
    """A store that does not answer a release before it is told to."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self.gone, self.answer = threading.Event(), threading.Event()

    def release_uncontended(self, *arguments: Any) -> bool:
        """See MongoStore.release_uncontended()."""
        was_there = super().release_uncontended(*arguments)
        self.gone.set()
        assert self.answer.wait(10)
        return was_there


def at_line(number: int, look: Callable[[], Any], meanwhile: Callable[[], object]) -> tuple[Any, bool]:
    """What *look* returns if at its line or call of that *number* something happens *meanwhile*; and whether it did."""
    events = itertools.count(1)
    happened = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event in ("call", "line") and next(events) == number:
            happened.append(meanwhile())
        return trace

    sys.settrace(trace)
    try:
        return look(), bool(happened)
    finally:
        sys.settrace(None)


@pytest.mark.long
@pytest.mark.parametrize(("name", "expected"), [("held", False), ("remaining", 0.0), ("in_danger", False)])
def test_what_is_released_is_not_held_to_whoever_looks(
    config: StoreConfig, other: LockMaker, name: str, expected: object
) -> None:
    """P1: another thread releases a lock and somebody else has got it; at whatever line the end of the release meets
    one who looks, to him the lock is not held."""
    for number in itertools.count(1):
        store = Slow(config)
        session = Session(store)
        mine = make_lock(session).acquire()
        releasing = threading.Thread(target=mine.release)
        releasing.start()
        assert store.gone.wait(10)
        next_one = other().acquire()

        def end_the_release(store: Slow = store, releasing: threading.Thread = releasing) -> None:
            store.answer.set()
            releasing.join(10)

        seen, happened = at_line(number, lambda lock=mine: getattr(lock, name), end_the_release)  # type: ignore[misc]
        end_the_release()
        assert next_one.held
        assert seen == expected, f"at line {number}"
        next_one.release()
        session.close()
        if not happened:
            break
    assert number > 3
