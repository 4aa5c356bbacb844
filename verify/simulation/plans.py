"""The plans of the processes in a simulation: those of the fault runs, and those that need virtual time."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from django_mongolock.engine.rule.document import Mode
from verify.faults.peers import MARGIN, Plan
from verify.faults.plans import KEYS as REAL_KEYS
from verify.faults.plans import choose, line

#: The probability that all queue at the one key with a visible order, and that one of the plans below is chosen.
QUEUEING: Final = 0.15
OWN: Final = 0.3
#: The probability that an attempt ends otherwise than by a release.
OFTEN: Final = 0.1
#: The probability that the times of a lock are drawn anew.
REDRAWN: Final = 0.3
#: The number of locks that each thread takes in a process that ends with many.
MANY: Final = 60
#: The seconds of a minimum hold and of the work under it. Some are longer than a renewal.
HOLDS: Final = (0.02, 0.3, 0.8, 2.5)
#: Leases in seconds that no fault outlasts. An entry left behind by mistake stays until it is seen.
LONG: Final = 20.0
LONG_WAIT: Final = 10.0
#: The most seconds of a nested wait, longer than a deadlock.
NESTED_WAIT: Final = 4.0
NESTED: Final = ("d0", "d1", "d2")

#: All requested keys.
KEYS: Final = (*REAL_KEYS, "far0", "far1", "limited", "longer", "heir", "deferred", "lapsing", "crowd", "down", *NESTED)


@dataclass(frozen=True, slots=True)
class SimPlan(Plan):
    """The plan of an attempt.

    - max_hold: option of the lock.
    - extension: lease to which it is extended, if not its own.
    - inner: keys requested while it is held.
    - manner: also "strike" (its strand is struck), "defer" (its renewals are deferred) or "downgrade" (it goes on as a
      reader).
    """

    max_hold: float | None = None
    extension: float | None = None
    inner: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        known = Plan.facts(self)
        longest = max(known["server_lease"], (self.extension or 0.0) + MARGIN)
        return known | {"max_hold": self.max_hold, "lease": self.lease, "server_lease": longest}


def _far(chance: random.Random) -> SimPlan:
    """Return a plan with a lease that nobody waits for. Any rest of the attempt is in the way of others."""
    wait, work = chance.choice([0.5, 5.0, 5.0, None]), chance.choice([0.02, 0.1, 0.4])
    manner = chance.choice(["release", "release", "cancel", "cancel", "strike", "forget", "fork"])
    return SimPlan((f"far{chance.randrange(2)}",), "exclusive", 1, wait, LONG, LONG_WAIT, work=work, manner=manner)


def _limited(chance: random.Random) -> SimPlan:
    """Return a plan with a limited hold, renewed or extended or not."""
    manner = chance.choice(["release", "extend"])
    return SimPlan(("limited",), max_hold=chance.choice([0.7, 1.2, 2.0]), work=chance.uniform(0.5, 2.5), manner=manner)


def _longer(chance: random.Random) -> SimPlan:
    """Return a plan whose short lease is made longer, and that works until the lease has been renewed."""
    extension, work = chance.choice([None, 2.5, 4.0]), chance.uniform(2.0, 7.0)
    return SimPlan(("longer",), wait=chance.choice([0.0, 5.0]), extension=extension, work=work, manner="extend")


def _heir(chance: random.Random) -> SimPlan:
    """Return a plan with a long lease of an owner. Another process resumes the run of a dead one."""
    owner, work = f"o{chance.randrange(2)}", chance.uniform(0.2, 1.5)
    return SimPlan(("heir",), "exclusive", 1, 5.0, LONG, LONG_WAIT, owner=owner, work=work)


def _nested(chance: random.Random) -> SimPlan:
    """Return a plan for two nested keys.

    The opposite order elsewhere, and the length of the work, make them collide.
    """
    outer, inner = chance.sample(NESTED, 2)
    return SimPlan((outer,), wait=NESTED_WAIT, inner=(inner,), work=chance.choice([0.1, 0.5]))


def _deferred(chance: random.Random) -> SimPlan:
    """Return a plan that leaves its document alone for as long as that is safe."""
    return SimPlan(("deferred",), wait=0.5, work=chance.uniform(0.5, 3.0), manner="defer")


def _lapsing(chance: random.Random) -> SimPlan:
    """Return a plan that works until its lease ends by itself, while others wait for it. All clocks must agree on the
    end.
    """
    return SimPlan(("lapsing",), wait=20.0, lease=6.0, renew=False, work=chance.choice([1.0, 6.5]))


def _crowd(chance: random.Random) -> SimPlan:
    """Return a plan for readers that stay, or for writers, with places that a short pause costs."""
    if chance.random() < 0.3:
        return SimPlan(("crowd",), "exclusive", 1, 20.0, 8.0, 0.4, work=0.1)
    return SimPlan(("crowd",), "shared", 2**31 - 1, 20.0, 8.0, chance.choice([0.4, 8.0]), work=chance.uniform(0.5, 4.0))


def _down(chance: random.Random) -> SimPlan:
    """Return a plan for an exclusive lock that goes on as a reader, or for others that want one of the two modes."""
    manner = chance.choice(["downgrade", "downgrade", "release"])
    mode: Mode = "exclusive" if manner == "downgrade" else chance.choice(["exclusive", "shared"])
    lease, waiter_lease = chance.choice([(1.5, 1.5), (LONG, LONG_WAIT)])
    wait, work = chance.choice([0.5, 5.0, None]), chance.choice([0.1, 0.4, 2.0])
    return SimPlan(("down",), mode, 1, wait, lease, waiter_lease, work=work, manner=manner)


def many(chance: random.Random, pid: int, begun: int) -> SimPlan:
    """Return a plan for many locks, to be held when the process ends.

    - begun: number of locks requested before.
    """
    keys = tuple(f"many{pid}.{number:03}" for number in range(begun, begun + MANY))
    return SimPlan(keys, "exclusive", 1, 5.0, chance.choice([1.5, 6.0, LONG]), work=60.0)


def _redrawn(chance: random.Random, plan: SimPlan) -> SimPlan:
    """Return the plan with unrelated lengths of lease, place in the queue and minimum hold."""
    lease, place = chance.choice([1.0, 1.5, 3.0, 8.0]), chance.choice([0.5, 1.0, 1.5, 3.0, 8.0])
    return replace(plan, lease=lease, waiter_lease=place, min_hold=chance.choice([0.0, 0.0, 0.0, *HOLDS[:2]]))


_PLANS: Final[list[tuple[int, Callable[[random.Random], SimPlan]]]] = [
    (8, _far),
    (1, _limited),
    (2, _longer),
    (2, _heir),
    (5, _nested),
    (1, _deferred),
    (2, _lapsing),
    (3, _crowd),
    (3, _down),
]


def usual(chance: random.Random, queues: bool) -> SimPlan:
    """Return the next attempt, of any mode and manner. Most end in a release.

    - queues: whether to prefer the key with a visible order.
    """
    if chance.random() < OWN:
        (make,) = chance.choices([make for _, make in _PLANS], [weight for weight, _ in _PLANS])
        made = make(chance)
    else:
        chosen = line(chance) if queues or chance.random() < QUEUEING else _of_the_fault_runs(chance)
        made = SimPlan(**{field.name: getattr(chosen, field.name) for field in fields(chosen)})
        made = _redrawn(chance, made) if chance.random() < REDRAWN else made
    if made.manner != "release":
        return made
    manner = "extend" if chance.random() < 0.1 else "release"
    if chance.random() < OFTEN:
        manner = chance.choice(["cancel", "forget", "strike", "fork"])
    return replace(made, manner=manner)


def _of_the_fault_runs(chance: random.Random) -> Plan:
    chosen = choose(chance)
    while chosen.document:
        chosen = choose(chance)
    if chosen.min_hold:
        return replace(chosen, min_hold=chance.choice(HOLDS), work=chance.choice(HOLDS))
    return chosen
