"""What goes wrong in a simulation, and when: made from the seed, and any part can be left out."""

import random
from typing import Final

from verify.simulation.faults import FAULTS, Event

#: Seconds at the beginning in which nothing goes wrong, and between the beginnings of two faults at most.
CALM: Final = 1.0
MOST_BETWEEN: Final = 6.0
#: What leaves most keys and processes alone, and how often nothing else happens: so nothing else may be felt there.
LOCAL: Final = ["stuck", "kill", "stop", "close", "force", "request", "clear", "exit", "purge"]
QUIET: Final = 0.25


def schedule(seed: int, seconds: float) -> list[Event]:
    """What goes wrong in a run of so many seconds."""
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
