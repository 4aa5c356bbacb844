"""The faults of a simulation."""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django_mongolock.engine.session import core
from verify.faults.peers import TIMEOUT
from verify.simulation.client import RETENTION
from verify.simulation.link import Link
from verify.simulation.plans import KEYS
from verify.simulation.server import REPLICATION
from verify.simulation.worker import Worker, start
from verify.simulation.world import World

#: The largest difference between the clocks of two members in seconds, and the most by which a running primary's clock
#: is set back.
SKEW: Final = 8.0
FAR_BACK: Final = 600.0
#: The steps of a fault. It acts, yields the seconds that it lasts, and heals the damage.
Steps = Generator[float, None, None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    - inject: function that acts. It may return facts for its record.
    - weight: relative frequency.
    - order: whether a waiter may lose its place.
    - clocks: whether the fault sets a clock.
    """

    inject: Callable[[World, random.Random], Generator[float, None, dict[str, Any] | None]]
    weight: int = 2
    order: bool = True
    servers: bool = True
    clocks: bool = False


def _alive(world: World) -> list[Worker]:
    """Return the living processes that may be struck. If a fault aims at a grant, only its process may be struck."""
    alive = [worker for worker in world.workers if worker.process.alive and not worker.stopping]
    return [worker for worker in alive if world.aim is None or worker.process.pid == world.aim[0]]


def _some(world: World, chance: random.Random) -> list[Worker]:
    """Return all processes, or one of them."""
    alive = _alive(world)
    return alive if chance.random() < 0.5 or not alive else [chance.choice(alive)]


def _one(world: World, chance: random.Random) -> Worker | None:
    alive = _alive(world)
    return chance.choice(alive) if alive else None


def _keys(world: World, chance: random.Random, most: int) -> list[str]:
    return chance.sample(KEYS, chance.randint(1, most)) if world.aim is None else [world.aim[1]]


# The servers


def elect(world: World, chance: random.Random) -> Steps:
    """Make another member, or the same one, the primary. Writes that the majority does not have may be undone."""
    servers = world.servers
    member = chance.choice(servers.members)
    if member is not servers.primary and chance.random() < 0.5:
        member.set(world.kernel, chance.uniform(-SKEW, SKEW))
    if member is not servers.primary:  # setting a running primary's clock forward is a named limit
        member.set(world.kernel, max(member.ahead(world.kernel), _lowest(world)))
    servers.elect(member, chance.randint(0, 3), chance.uniform(0.0, 3.0))
    yield max(0.0, servers.away_until - world.kernel.time)


def no_majority(world: World, chance: random.Random) -> Steps:
    """Let the primary write alone for a while. After that, the others follow it, or elect another one."""
    servers, term = world.servers, world.servers.term
    servers.lose_majority()
    yield chance.uniform(0.2, 5.0)
    if servers.term == term and chance.random() < 0.5:
        servers.elect(chance.choice(servers.members), 0, chance.uniform(0.0, 2.0))
        yield max(0.0, servers.away_until - world.kernel.time)
    elif servers.term == term:
        servers.regain_majority()


def all_down(world: World, chance: random.Random) -> Steps:
    """Let no member answer for a while. The primary stays the same."""
    seconds = chance.uniform(0.5, 6.0)
    world.servers.away_until = max(world.servers.away_until, world.kernel.time + seconds)
    yield seconds


def _lowest(world: World) -> float:
    """Return the least number of seconds by which a clock must be ahead.

    If a document is made again after its removal, its first token is larger unless a clock is behind its last time. No
    clock is therefore set to before the time of a removal.
    """
    return world.purged - world.kernel.time


def clock_set_back(world: World, chance: random.Random) -> Steps:
    """Set the clock of the running primary back. The clock stands still, goes back some seconds, or goes back far."""
    far = chance.choice([0.9, 0.9, 2 * SKEW, FAR_BACK])
    member, kernel = world.servers.primary, world.kernel
    ahead = member.ahead(kernel)
    member.set(kernel, min(ahead, max(_lowest(world), ahead - chance.uniform(0.05, far))))
    yield 0.0


def drop_bells(world: World, chance: random.Random) -> Steps:
    """Drop the collections of the bells."""
    world.servers.drop_bells()
    yield 0.0


def stuck(world: World, chance: random.Random) -> Generator[float, None, dict[str, Any]]:
    """Let a transaction that has written to a document stand still."""
    (key,) = _keys(world, chance, 1)
    world.servers.stuck.append(key)
    yield chance.uniform(1.0, 20.0)
    world.servers.stuck.remove(key)
    return {"key": key}


def purge(world: World, chance: random.Random) -> Steps:
    """Remove the documents of locks that have been free for long.

    Documents are really kept for seven days, far longer than clocks are apart. In virtual time, a document therefore
    stays until no clock is before the time of its removal.
    """
    servers = world.servers
    earliest = min(member.time(world.kernel) for member in servers.members)
    for key, document in list(servers.documents.items()):
        is_old = world.kernel.time - servers.written[key] > RETENTION
        if is_old and document["purge_at"] <= earliest and servers.has_majority:
            servers.write(key, None)
            ahead = max(member.ahead(world.kernel) for member in servers.members)
            world.purged = max(world.purged, world.kernel.time + ahead)
    yield 0.0


def slow_storage(world: World, chance: random.Random) -> Steps:
    """Let the disks take long. The majority then gets a write late."""
    world.servers.replication = (0.02, chance.uniform(0.1, 1.5))
    yield chance.uniform(0.5, 5.0)
    world.servers.replication = REPLICATION


# The network


def _linked(make: Callable[[random.Random], Link], longest: float) -> Callable[[World, random.Random], Steps]:
    """Return a fault of the links of all processes, or of one."""

    def inject(world: World, chance: random.Random) -> Steps:
        stores, trouble = [worker.store for worker in _some(world, chance)], make(chance)
        for store in stores:
            store.begin(trouble)
        yield chance.uniform(0.3, longest)
        for store in stores:
            store.end(trouble)

    return inject


def _late(chance: random.Random) -> Link:
    return Link(late=chance.uniform(0.05, 0.5), late_by=chance.uniform(1.0, 12.0))


def _held_up(chance: random.Random) -> Link:
    return Link(held_up=chance.uniform(0.05, 0.6), held_up_by=chance.uniform(0.5, 8.0))


# The processes


def kill(world: World, chance: random.Random) -> Steps:
    """Send SIGKILL to a process. Another process takes its place."""
    if (worker := _one(world, chance)) is not None:
        world.kill(worker)
        start(world, worker.process.kind)
    yield 0.0


def close(world: World, chance: random.Random) -> Steps:
    """Close the session of a process, whatever it does. Another process takes its place."""
    if (worker := _one(world, chance)) is not None:
        worker.close()
        start(world, worker.process.kind)
    yield 0.0


def stop(world: World, chance: random.Random) -> Steps:
    """Send SIGSTOP to a process for a while."""
    seconds = chance.choice([0.3, 1.0, 2.5, 5.0])
    if (worker := _one(world, chance)) is not None:
        world.stop(worker, seconds)
    yield seconds


def exit_with_many(world: World, chance: random.Random) -> Steps:
    """End a process that holds hundreds of locks, with some of their documents stuck.

    The first document may be stuck too. The stuck documents are too few to keep all threads of the process, at two
    threads each.
    """
    worker, servers = start(world, "many"), world.servers
    yield chance.uniform(1.0, 8.0)
    stuck = [key for key in worker.bulk if chance.random() < 0.05] if chance.random() < 0.6 else []
    del stuck[core.COMMAND_THREADS // 2 - 1 :]
    since = world.kernel.time
    servers.stuck += stuck
    if chance.random() < 0.6:  # the process goes on for a while
        yield chance.uniform(1.0, 8.0)
    worker.close()
    yield chance.uniform(3.0, 6.0)
    for key in stuck:
        servers.stuck.remove(key)  # only once, because another fault may keep it stuck
        world.fault("stuck", since, world.kernel.time, order=True, servers=False, key=key)


def pair(world: World, chance: random.Random) -> Steps:
    """Strike the same grant with two faults, at once or one shortly after the other."""
    documents = world.servers.documents.items()
    there = [(e["pid"], key) for key, each in documents for e in (*each["holders"], *each["waiters"])]
    if not there:
        return
    aim = chance.choice(there)
    for pause in (0.0, chance.choice([0.0, 0.02, 0.2, 1.0])):
        yield pause
        world.aim = aim
        begin(world, Event(chance.choice(AIMED), world.kernel.time, chance.getrandbits(32)))
        world.aim = None


def force(world: World, chance: random.Random) -> Steps:
    """Take some keys from one of their holders each, as an operator."""
    for key in _keys(world, chance, 8):
        world.by_janitor(partial(_take, world, key))
    yield 0.0


def _take(world: World, key: str) -> None:
    holders = world.servers.documents.get(key, {}).get("holders", [])[:1]
    tokens = [holder["token"] for holder in holders]
    world.write("force", 0, key=key, tokens=tokens, ids=[holder["label"] for holder in holders])
    for holder in holders:
        world.janitor.force(key, holder["grant"], TIMEOUT)
        world.write("taken", 0, key=key, tokens=tokens)


def request(world: World, chance: random.Random) -> Steps:
    """Ask some holders to release their keys, as an operator."""
    for key in _keys(world, chance, 8):
        world.by_janitor(partial(_ask_for, world, key))
    yield 0.0


def _ask_for(world: World, key: str) -> None:
    for holder in world.servers.documents.get(key, {}).get("holders", [])[:1]:
        world.janitor.request(key, holder["grant"], TIMEOUT)
        world.write("request", 0, key=key, tokens=[holder["token"]])


def clear(world: World, chance: random.Random) -> Steps:
    """Clear stale locks, as an operator."""
    world.by_janitor(partial(world.janitor.clear, KEYS, TIMEOUT))
    yield 0.0


FAULTS: Final[dict[str, Fault]] = {
    "elect": Fault(elect, 3, clocks=True),
    "no-majority": Fault(no_majority),
    "all-down": Fault(all_down),
    "clock-set-back": Fault(clock_set_back, 1, order=False, clocks=True),
    "bells-dropped": Fault(drop_bells),
    "stuck": Fault(stuck, servers=False),
    "purge": Fault(purge, 3, order=False, servers=False),
    "slow-storage": Fault(slow_storage),
    "cut": Fault(_linked(lambda _: Link(cut=True), 5.0), 3),
    "slow": Fault(_linked(lambda chance: Link(slow=chance.uniform(0.01, 1.0)), 6.0)),
    "lost-answers": Fault(_linked(lambda chance: Link(lost=chance.uniform(0.05, 0.5)), 6.0)),
    "late-commands": Fault(_linked(_late, 6.0)),
    "held-up": Fault(_linked(_held_up, 6.0)),
    "twice": Fault(_linked(lambda chance: Link(twice=chance.uniform(0.05, 0.5)), 6.0)),
    "kill": Fault(kill, order=False, servers=False),
    "stop": Fault(stop, 3, order=False, servers=False),
    "close": Fault(close, 3, order=False, servers=False),
    "force": Fault(force, 3, order=False, servers=False),
    "request": Fault(request, 3, order=False, servers=False),
    "clear": Fault(clear, order=False, servers=False),
    "exit": Fault(exit_with_many, 1, order=False, servers=False),
    "pair": Fault(pair, 5, order=False, servers=False),
}
#: The faults that may be one of a pair.
AIMED: Final = tuple(name for name in FAULTS if name not in ("purge", "clear", "exit", "pair"))


@dataclass(frozen=True)
class Event:
    """A fault that begins at a moment.

    - seed: seed of the choices in the fault.
    """

    name: str
    at: float
    seed: int

    def __str__(self) -> str:
        return f"{self.at:8.3f} {self.name}"


def begin(world: World, event: Event) -> None:
    """Inject the fault of a present event, and heal it in time."""
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
