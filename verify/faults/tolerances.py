"""How late things may be before the checker accuses: on a machine that others use too, and under virtual time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerances:
    """Times are in seconds.

    grace: how much later one must have come to be certainly behind in the queue, where nothing interferes: who is next
    in its own process stands in the document half a second later, and a command of a calm day takes no second.
    calm_arrivals: whether only those are judged whose first command nothing held up, be it that it found no thread in
    its process: what is late is taken to have come when it arrives (docs/evidence/simulation.md).
    resumes_the_dead: whether an owner may only resume a run whose process is gone.
    clock_grace: the same where a clock was set meanwhile: the server knows the order of arrival by its times.
    headless: within how long of a grant the line of a process may have been without an entry in the document: one that
    left without naming the next waiter; the next learns of that at its next renewal.
    unnoticed: how long it may take until it learns of that.
    names_next: the errors after which the next waiter of a line was named all the same.
    giving_up: within how long after a waiter gave up that is written down.
    wait: how much longer than a command may take one that may not wait any more may be kept: the machine that runs this
    is shared by all processes and servers of the run. (What a process was stopped or starved is not counted.)
    slack: how long after a lease a key may take to be had again.
    recovery: how long after a fault work may take to go on as usual: a command that was on its way still fails after
    four, and is sent again within one.
    lapse: a pause of a process that is shorter costs it no place in a queue: a place lives a second longer when its
    renewal is due.
    idle: how long a process may not get to run where a lock must not be lost.
    work: how long a holder works at most; it says so to itself.
    telling: within how long a loss is told after the program left the block.
    standstill: the longest time without any grant after everything was healed.
    drift: by which part of the time two clocks may get apart. stands: for how much longer something may stand in a
    document for that.
    """

    grace: float = 2.0
    calm_arrivals: bool = False
    resumes_the_dead: bool = False
    clock_grace: float = 2.0
    headless: float = 2.0
    unnoticed: float = 2.0
    names_next: frozenset[str] = frozenset()
    giving_up: float = 1.0
    wait: float = 1.0
    slack: float = 3.0
    recovery: float = 5.0
    lapse: float = 0.8
    idle: float = 0.2
    work: float = 3.0
    telling: float = 6.0
    standstill: float = 30.0
    drift: float = 0.0
    stands: float = 0.0


REAL_TIME = Tolerances()
