"""One simulated run: a world, the faults of a schedule, the end of it all, and what the checker makes of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.options import Options
from django_mongolock.exceptions import LockError
from tests.faults.checker import RULES, Violation
from tests.faults.history import History
from tests.faults.peers import TIMEOUT, Plan
from tests.faults.plans import KEYS
from tests.faults.records import Record
from tests.simulation.faults import Event, begin, schedule
from tests.simulation.invariants import watched
from tests.simulation.shell import replaced
from tests.simulation.world import World

#: The processes of a run.
KINDS: Final = ("sync", "sync", "threads", "async", "threads")
#: How long the processes may take to end, and then all keys to be free, in seconds.
ENDING: Final = 60.0
#: How long they go on when the last fault was healed, in seconds.
AFTERMATH: Final = 6.0
FREEING: Final = 30.0


@dataclass
class Outcome:
    """What came of a run. steps: how often something happened. crashes: what was raised where nothing catches it."""

    violations: list[Violation]
    records: list[Record] = field(repr=False)
    attempts: int = 0
    grants: int = 0
    steps: int = 0
    crashes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.crashes


def simulate(seed: int, seconds: float, events: Sequence[Event] | None = None, kinds: Sequence[str] = KINDS) -> Outcome:
    """Run the engine for so many virtual seconds, with these faults or those of the seed."""
    world = World(seed)
    kernel = world.kernel
    logging.disable(logging.CRITICAL)
    try:
        with replaced(kernel), watched() as broken_writes:
            for kind in kinds:
                world.start(kind)
            for event in schedule(seed, seconds) if events is None else events:
                kernel.run(event.at)
                begin(world, event)
            kernel.run(seconds)
            _end(world)
            kernel.close()
    finally:
        logging.disable(logging.NOTSET)
    world.records.append(
        {"what": "run", "t": 0.0, "pid": 0, "seed": seed, "tells": True, "fair": True, "timeout": TIMEOUT}
    )
    world.records.append({"what": "start", "t": 0.0, "pid": 100, "group": 100, "kind": "harness"})
    history = History(sorted(world.records, key=lambda record: float(record["t"])))
    violations = [*broken_writes, *(violation for rule in RULES for violation in rule(history))]
    grants = sum(record["what"] == "got" for record in world.records)
    crashes = [f"{strand}: {error!r}" for strand, error in kernel.failures]
    return Outcome(violations, world.records, world.attempts, grants, kernel.steps, crashes)


def _end(world: World) -> None:
    """Heal everything, kill a third, let the others end; then try every key."""
    kernel = world.kernel
    while world.open_faults:  # they heal themselves
        kernel.run(kernel.time + 0.5)
    kernel.run(kernel.time + AFTERMATH)
    for worker in world.workers:
        worker.stopping = True
    alive = [worker for worker in world.workers if worker.process.alive]
    for worker in alive[::3]:
        world.kill(worker)
    end = kernel.time + ENDING
    while kernel.time < end and any(w.process.alive and not all(s.ended for s in w.strands) for w in alive):
        kernel.run(kernel.time + 1.0)
    for worker in alive:
        if worker.process.alive:
            world.write("end", worker.process.pid)
            worker.process.alive = False
    world.records.append({"what": "over", "t": kernel.time, "pid": 0})
    _try_all(world)


def _try_all(world: World) -> None:
    kernel, over = world.kernel, world.kernel.time
    worker = world.start("last")
    worker.stopping = True

    def take(key: str) -> None:
        lock = MongoLock(lambda: worker.session, (key,), Options(Plan((key,)).terms, FREEING))
        try:
            lock.acquire()
        except LockError:
            return
        world.records.append({"what": "free", "t": kernel.time, "pid": 0, "key": key, "since": over})
        lock.release()

    for key in KEYS:
        kernel.spawn(worker.process, lambda key=key: take(key), "last")  # type: ignore[misc]
    kernel.run(kernel.time + FREEING + 5.0)
