"""One simulated run: a world, the faults of a schedule, the end, and the checker's verdict."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.exceptions import LockError
from verify.faults.checker import Violation
from verify.faults.history import History
from verify.faults.opportunities import opportunities
from verify.faults.peers import TIMEOUT, Plan
from verify.faults.records import Record
from verify.simulation.constants import IN_PIPELINES, lowered
from verify.simulation.faults import Event, begin
from verify.simulation.plans import KEYS
from verify.simulation.rules import RULES, tolerances
from verify.simulation.schedule import schedule
from verify.simulation.shell import replaced
from verify.simulation.standing import Watch
from verify.simulation.worker import Worker, start
from verify.simulation.world import World

#: The processes of a run.
KINDS: Final = ("sync", "sync", "threads", "async", "threads")
#: The most seconds until all processes have ended.
ENDING: Final = 60.0
#: The seconds for which processes go on after the last fault was healed.
AFTERMATH: Final = 6.0
FREEING: Final = 30.0


@dataclass
class Outcome:
    """The outcome of a run.

    - steps: number of times that each event happened.
    - crashes: uncaught errors.
    - counts: see `World`, and `opportunities`.
    """

    violations: list[Violation]
    records: list[Record] = field(repr=False)
    attempts: int = 0
    grants: int = 0
    steps: int = 0
    crashes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.crashes


def simulate(seed: int, seconds: float, events: Sequence[Event] | None = None) -> Outcome:
    """Run the engine for so many virtual seconds, with these faults or those of the seed."""
    world = World(seed)
    kernel, watch = world.kernel, Watch(world)
    logging.disable(logging.CRITICAL)
    try:
        constants = lowered(seed)
        world.servers.constants = tuple((real, low) for name, real, low in constants if name in IN_PIPELINES)
        with replaced(kernel, constants):
            for kind in KINDS:
                start(world, kind)
            watch.begin()
            for event in schedule(seed, seconds) if events is None else events:
                kernel.run(event.at)
                begin(world, event)
            kernel.run(seconds)
            _end(world)
            watch.end()
            _try_all(world)
            kernel.close()
    finally:
        logging.disable(logging.NOTSET)
    world.records.append({"what": "run", "t": 0.0, "pid": 0, "seed": seed, "timeout": TIMEOUT})
    world.records.append({"what": "start", "t": 0.0, "pid": 100, "group": 100, "kind": "harness"})
    history = History(sorted(world.records, key=lambda record: float(record["t"])), tolerances(kernel.drift))
    violations = [*world.servers.violations, *(violation for rule in RULES for violation in rule(history))]
    grants = sum(record["what"] == "got" for record in world.records)
    crashes = [f"{strand}: {error!r}" for strand, error in kernel.failures]
    counts = world.counts + opportunities(history)
    return Outcome(violations, world.records, world.attempts, grants, kernel.steps, crashes, counts)


def _end(world: World) -> None:
    """Heal everything, kill a third of the processes, let the others end, and try every key."""
    kernel = world.kernel
    _heal(world)
    kernel.run(kernel.time + AFTERMATH)
    if world.ends_with_many:
        begin(world, Event("exit", kernel.time, world.attempts))
        _heal(world)
    for worker in world.workers:
        worker.stopping = True
    alive = [worker for worker in world.workers if worker.process.alive]
    for worker in alive[::3]:
        world.kill(worker)
    _wait_for(world, alive)
    for worker in alive:
        if worker.process.alive and not worker.is_closed:
            worker.close()
    _wait_for(world, alive)
    for worker in alive:
        if worker.is_running:
            world.write("hung", 0, group=worker.process.pid, text=f"{worker.strands}")
        worker.process.alive = False
    world.records.append({"what": "over", "t": kernel.time, "pid": 0})


def _heal(world: World) -> None:
    """Let time pass until all faults have healed themselves."""
    while world.open_faults:
        world.kernel.run(world.kernel.time + 0.5)


def _wait_for(world: World, workers: Sequence[Worker]) -> None:
    """Let time pass until these processes have ended, within a limit."""
    end = world.kernel.time + ENDING
    while world.kernel.time < end and any(worker.is_running for worker in workers):
        world.kernel.run(world.kernel.time + 1.0)


def _try_all(world: World) -> None:
    kernel, over = world.kernel, world.kernel.time
    worker = start(world, "last")
    worker.stopping = True

    def take(key: str) -> None:
        facts: dict[str, str | int] = {"pid": worker.process.pid, "label": "last"}
        lock = MongoLock(lambda: worker.session, (key,), Plan((key,)).terms, LockOptions(wait=FREEING), lambda: facts)
        try:
            lock.acquire()
        except LockError:
            return
        world.records.append({"what": "free", "t": kernel.time, "pid": 0, "key": key, "since": over})
        lock.release()

    for key in KEYS:
        kernel.spawn(worker.process, lambda key=key: take(key), "last")  # type: ignore[misc]
    # The keys of a process that ended with many locks are only looked at. An end written by an earlier clock is far
    # away. Another acquirer would give it a whole lease from now.
    now = world.servers.primary.time(kernel)
    for key in (key for worker in world.workers for key in worker.bulk):
        holders = world.servers.documents.get(key, {}).get("holders", ())
        left = [min((e["until"] - now).total_seconds(), e["server_lease"] / 1000) for e in holders]
        free = over + max([0.0, *left])
        world.records.append({"what": "free", "t": free, "pid": 0, "key": key, "since": over})
    kernel.run(kernel.time + FREEING + 5.0)
