"""The schedule of faults in a simulation, made from the seed. Any part of a schedule can be left out."""

import random
from typing import Final

from verify.simulation.faults import FAULTS, Event

#: The seconds without faults at the beginning, and the most seconds between the beginnings of two faults.
CALM: Final = 1.0
MOST_BETWEEN: Final = 6.0
#: The faults that leave most keys and processes alone, and the probability that no others happen. Nothing may then be
#: felt elsewhere.
LOCAL: Final = ["stuck", "kill", "stop", "close", "force", "request", "clear", "exit", "purge"]
QUIET: Final = 0.25


def schedule(seed: int, seconds: float) -> list[Event]:
    """Return the faults of a run of so many seconds."""
    chance = random.Random(f"faults {seed}")
    kinds = LOCAL if chance.random() < QUIET else list(FAULTS)
    chosen = sorted(chance.sample(kinds, chance.randint(3, len(kinds))))  # fewer kinds at a time, deeper
    weights = [FAULTS[name].weight for name in chosen]
    at, events = CALM, []
    most = chance.uniform(0.5, MOST_BETWEEN)
    while (at := at + chance.uniform(0.0, most)) < seconds:
        (name,) = chance.choices(chosen, weights)
        events.append(Event(name, at, chance.getrandbits(32)))
    return events
