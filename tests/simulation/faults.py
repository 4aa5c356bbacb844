"""What goes wrong in a simulation: a schedule made from the seed, of which any part can be left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tests.faults.peers import TIMEOUT
from tests.faults.plans import KEYS
from tests.simulation.client import RETENTION
from tests.simulation.world import Worker, World

#: How far the clocks of two members may be apart, in seconds, and how far that of a running primary may be set back.
SKEW: Final = 8.0
FAR_BACK: Final = 600.0
#: Seconds at the beginning in which nothing goes wrong, and between the beginnings of two faults at most.
CALM: Final = 1.0
MOST_BETWEEN: Final = 6.0


@dataclass(frozen=True)
class Event:
    """A fault that begins then. seed: what the choices in it come from."""

    name: str
    at: float
    seed: int

    def __str__(self) -> str:
        return f"{self.at:8.3f} {self.name}"


#: A fault does something, yields for how many seconds it lasts, and heals what it did. It returns facts for its record.
Steps = Generator[float, None, dict[str, Any] | None]


@dataclass(frozen=True)
class Fault:
    """weight: how often it is chosen. order: may a waiter lose its place by it? clocks: does it set one?"""

    inject: Callable[[World, random.Random], Steps]
    weight: int = 2
    order: bool = True
    servers: bool = True
    clocks: bool = False


def schedule(seed: int, seconds: float) -> list[Event]:
    """What goes wrong in a run of so many seconds."""
    chance = random.Random(f"faults {seed}")
    chosen = sorted(chance.sample(list(FAULTS), chance.randint(3, len(FAULTS))))  # fewer kinds at a time, deeper
    weights = [FAULTS[name].weight for name in chosen]
    at, events = CALM, []
    most = chance.uniform(0.5, MOST_BETWEEN)
    while (at := at + chance.uniform(0.0, most)) < seconds:
        (name,) = chance.choices(chosen, weights)
        events.append(Event(name, at, chance.getrandbits(32)))
    return events


def begin(world: World, event: Event) -> None:
    """Inject the fault of an event, which is now, and heal it in time."""
    fault, since = FAULTS[event.name], world.kernel.time
    steps = fault.inject(world, random.Random(event.seed))

    def go_on() -> None:
        facts: dict[str, Any] = {}
        try:
            pause = next(steps)
        except StopIteration as end:
            facts = end.value or {}
            world.open_faults -= 1
        else:
            world.kernel.at(pause, go_on)
            return
        marks = {"order": fault.order, "servers": fault.servers, "clocks": fault.clocks}
        world.fault(event.name, since, world.kernel.time, **marks, **facts)

    world.open_faults += 1
    go_on()


def _some(world: World, chance: random.Random) -> list[Worker]:
    """All processes, or one of them."""
    alive = [worker for worker in world.workers if worker.process.alive]
    return alive if chance.random() < 0.5 or not alive else [chance.choice(alive)]


def _one(world: World, chance: random.Random) -> Worker | None:
    alive = [worker for worker in world.workers if worker.process.alive]
    return chance.choice(alive) if alive else None


# The servers


def elect(world: World, chance: random.Random) -> Steps:
    """Another member becomes the primary, or the same one again; what the majority has not yet may be undone."""
    servers = world.servers
    member = chance.choice(servers.members)
    if member is not servers.primary and chance.random() < 0.5:
        member.ahead = chance.uniform(-SKEW, SKEW)
    if member is not servers.primary:  # a clock that is set forward under a running primary is a named limit
        member.ahead = max(member.ahead, _lowest(world))
    servers.elect(member, chance.randint(0, 3), chance.uniform(0.0, 3.0))
    yield max(0.0, servers.away_until - world.kernel.time)
    return None


def no_majority(world: World, chance: random.Random) -> Steps:
    """The primary writes alone for a while; then the others follow it, or elect another one."""
    servers, term = world.servers, world.servers.term
    servers.lose_majority()
    yield chance.uniform(0.2, 5.0)
    if servers.term == term and chance.random() < 0.5:
        servers.elect(chance.choice(servers.members), 0, chance.uniform(0.0, 2.0))
        yield max(0.0, servers.away_until - world.kernel.time)
    elif servers.term == term:
        servers.regain_majority()
    return None


def all_down(world: World, chance: random.Random) -> Steps:
    """No member answers for a while; it is the same primary afterwards."""
    seconds = chance.uniform(0.5, 6.0)
    world.servers.away_until = max(world.servers.away_until, world.kernel.time + seconds)
    yield seconds
    return None


def _lowest(world: World) -> float:
    """By how much a clock must be ahead at least, in seconds. A document that is made again after its removal starts
    with a larger token unless a clock is behind its last: so no clock is set to before the time of a removal."""
    return world.purged - world.kernel.time


def clock_set_back(world: World, chance: random.Random) -> Steps:
    """The clock of the running primary is set back."""
    far = FAR_BACK if chance.random() < 0.3 else 2 * SKEW
    member = world.servers.primary
    member.ahead = min(member.ahead, max(_lowest(world), member.ahead - chance.uniform(0.5, far)))
    yield 0.0
    return None


def end_streams(world: World, chance: random.Random) -> Steps:
    """Every change stream ends."""
    world.servers.end_streams()
    yield 0.0
    return None


def stuck(world: World, chance: random.Random) -> Steps:
    """A transaction has written to a document, and stands still."""
    key = chance.choice(KEYS)
    world.servers.stuck.add(key)
    yield chance.uniform(1.0, 20.0)
    world.servers.stuck.discard(key)
    return {"key": key}


def purge(world: World, chance: random.Random) -> Steps:
    """The documents of locks that have been free for long are removed. How far clocks are apart is nothing beside the
    seven days that they are kept: so here one stays for as long in virtual time, too."""
    servers = world.servers
    for key, document in list(servers.documents.items()):
        is_old = world.kernel.time - servers.written[key] > RETENTION
        if is_old and document["purge_at"] <= servers.primary.time(world.kernel) and servers.has_majority:
            servers.write(key, None)
            world.purged = max(world.purged, world.kernel.time + max(member.ahead for member in servers.members))
    yield 0.0
    return None


# The network


def _linked(change: Callable[[Any, random.Random], None], longest: float) -> Callable[[World, random.Random], Steps]:
    """A fault of the links of all processes, or of one."""

    def inject(world: World, chance: random.Random) -> Steps:
        stores = [worker.store for worker in _some(world, chance)]
        for store in stores:
            store.link = store.link.copy()
            change(store.link, chance)
        yield chance.uniform(0.3, longest)
        for store in stores:
            store.link = world.link
        return None

    return inject


def _set(**ranges: tuple[float, float]) -> Callable[[Any, random.Random], None]:
    def change(link: Any, chance: random.Random) -> None:
        for name, (least, most) in ranges.items():
            setattr(link, name, chance.uniform(least, most))

    return change


def _cut(link: Any, chance: random.Random) -> None:
    link.cut = True


# The processes


def kill(world: World, chance: random.Random) -> Steps:
    """SIGKILL; another process takes its place."""
    if (worker := _one(world, chance)) is not None:
        world.kill(worker)
        world.start(worker.process.kind)
    yield 0.0
    return None


def stop(world: World, chance: random.Random) -> Steps:
    """SIGSTOP for a while."""
    seconds = chance.choice([0.3, 1.0, 2.5, 5.0])
    if (worker := _one(world, chance)) is not None:
        world.stop(worker, seconds)
    yield seconds
    return None


def force(world: World, chance: random.Random) -> Steps:
    """An operator takes a key from one of its holders."""
    key, janitor = chance.choice(KEYS), world.janitor

    def take() -> None:
        holders = world.servers.documents.get(key, {}).get("holders", [])
        world.write("force", 0, key=key, tokens=[holder["token"] for holder in holders[:1]])
        if holders:
            janitor.force(key, holders[0]["grant"], TIMEOUT)

    world.by_janitor(take)
    yield 0.0
    return None


def clear(world: World, chance: random.Random) -> Steps:
    """An operator clears stale locks."""
    world.by_janitor(partial(world.janitor.clear, KEYS, TIMEOUT))
    yield 0.0
    return None


FAULTS: Final[dict[str, Fault]] = {
    "elect": Fault(elect, 3, clocks=True),
    "no-majority": Fault(no_majority),
    "all-down": Fault(all_down, 1),
    "clock-set-back": Fault(clock_set_back, 1, order=False, clocks=True),
    "streams-end": Fault(end_streams),
    "stuck": Fault(stuck, servers=False),
    "purge": Fault(purge, order=False, servers=False),
    "cut": Fault(_linked(_cut, 5.0)),
    "slow": Fault(_linked(_set(slow=(0.01, 1.0)), 6.0)),
    "lost-answers": Fault(_linked(_set(lost=(0.05, 0.5)), 6.0)),
    "late-commands": Fault(_linked(_set(late=(0.05, 0.5), late_by=(1.0, 12.0)), 6.0)),
    "held-up": Fault(_linked(_set(held_up=(0.05, 0.6), held_up_by=(0.5, 8.0)), 6.0)),
    "twice": Fault(_linked(_set(twice=(0.05, 0.5)), 6.0)),
    "kill": Fault(kill, order=False, servers=False),
    "stop": Fault(stop, 3, order=False, servers=False),
    "force": Fault(force, order=False, servers=False),
    "clear": Fault(clear, order=False, servers=False),
}
