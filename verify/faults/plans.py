"""The requests of the workers: every mode and manner, at random from a seed, over few keys."""

import random
from collections.abc import Callable
from typing import Final

from verify.faults.documents import DOCUMENTS, STALE
from verify.faults.peers import Plan

#: The longest lease of a run in seconds. The lock of a killed holder lasts as long.
LONGEST: Final = 8.0
#: The faults that a worker may inflict on itself, and the resulting ends of an attempt.
HABITS: Final = ("fork", "cancel", "die", "forget", "client-clocks")


def _wait(chance: random.Random) -> float | None:
    return chance.choice([0.0, 0.5, 2.0, 5.0, None])


def _exclusive(chance: random.Random) -> Plan:
    return Plan((f"e{chance.randrange(2)}",), wait=_wait(chance), work=chance.choice([0.0, 0.02, 0.2]))


def line(chance: random.Random) -> Plan:
    """Return a plan for the key where everybody queues and the order is visible."""
    return Plan(("line",), wait=chance.choice([None, 20.0]), work=chance.uniform(0.2, 0.5))


def _read_or_write(chance: random.Random) -> Plan:
    mode, work = chance.choice([("exclusive", 0.05), ("shared", 0.2), ("shared", 0.2)])
    capacity = 1 if mode == "exclusive" else 2**31 - 1
    return Plan(("rw",), "exclusive" if mode == "exclusive" else "shared", capacity, _wait(chance), work=work)


def _semaphore(chance: random.Random) -> Plan:
    weight = chance.choice([1, 1, 2, 3])
    return Plan(("sem",), "semaphore", 3, _wait(chance), work=chance.uniform(0.0, 0.3), weight=weight)


def _several(chance: random.Random) -> Plan:
    keys = tuple(sorted(chance.sample(["m0", "m1", "m2"], chance.choice([2, 3]))))
    return Plan(keys, wait=chance.choice([0.0, 2.0, 5.0]), work=0.05)


def _reentrant(chance: random.Random) -> Plan:
    return Plan(("again",), wait=_wait(chance), reentrant=True, work=0.05)


def _owned(chance: random.Random) -> Plan:
    """Return a plan with an owner. A later holder with the same owner takes the place of an earlier one."""
    return Plan(("own",), owner=f"o{chance.randrange(3)}", wait=2.0, work=chance.uniform(0.05, 0.4))


def _long(chance: random.Random) -> Plan:
    """Return a plan with a lease that lives through a failover, and work longer than others' leases."""
    return Plan(("long",), lease=LONGEST, wait=_wait(chance), work=chance.uniform(0.5, 2.5))


def _renewed(chance: random.Random) -> Plan:
    """Return a plan with a short lease, and work until it has been renewed several times."""
    return Plan((f"w{chance.randrange(3)}",), wait=chance.choice([0.0, 0.5]), work=chance.uniform(2.0, 3.0))


def _unrenewed(chance: random.Random) -> Plan:
    """Return a plan with a lease that nobody renews, and that may end under the work."""
    return Plan(("bare",), lease=1.0, renew=False, wait=_wait(chance), work=chance.choice([0.1, 0.5, 1.3]))


def _kept(chance: random.Random) -> Plan:
    return Plan(("kept",), min_hold=0.3, wait=_wait(chance), work=0.02)


def _document(chance: random.Random) -> Plan:
    """Return a plan for a document that nobody waits for. Sometimes the work takes longer than it may."""
    owner = chance.choice([None, None, None, f"o{chance.randrange(2)}"])
    work = chance.choice([0.0, 0.05, 0.3, 0.6, STALE + 0.5])
    key = chance.choice(DOCUMENTS)
    return Plan((key,), document=True, wait=0.0, lease=STALE, owner=owner, renew=False, work=work)


_PLANS: Final[list[tuple[int, Callable[[random.Random], Plan]]]] = [
    (5, _exclusive),
    (6, line),
    (3, _read_or_write),
    (3, _semaphore),
    (2, _several),
    (2, _reentrant),
    (2, _owned),
    (2, _long),
    (4, _renewed),
    (2, _unrenewed),
    (1, _kept),
    (5, _document),
]
#: All requested keys of named locks.
KEYS: Final = (
    "e0", "e1", "line", "rw", "sem", "m0", "m1", "m2", "own", "long", "w0", "w1", "w2", "bare", "kept", "again",
)  # fmt: skip


def choose(chance: random.Random) -> Plan:
    """Return the next attempt."""
    (make,) = chance.choices([make for _, make in _PLANS], [weight for weight, _ in _PLANS])
    return make(chance)
