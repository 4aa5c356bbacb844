"""The tolerances of the checker, on a machine that others use too, and under virtual time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerances:
    """The tolerances of the checker. Times are in seconds.

    - grace: the least difference of arrival for certainty about the order of the queue, without interference. A next
      waiter of its own process is in the document half a second later. A command of a calm day takes no second.
    - calm_arrivals: whether only waiters with an undelayed first command are judged. A delay includes a process without
      a free thread. A late command counts as coming when it arrives (docs/evidence/simulation.md).
    - resumes_the_dead: whether an owner may only resume a run of a process that is gone.
    - clock_grace: the grace if a clock was set meanwhile. The server knows the order of arrival by its times.
    - headless: the time before a grant within which the line of a process may have had no entry in the document. A
      waiter left without naming the next one, and the next one learns of that at its next renewal.
    - unnoticed: the time until the next waiter learns of that.
    - names_next: the errors after which the next waiter of a line was named all the same.
    - giving_up: the time until a waiter's giving up is recorded.
    - wait: the extra time beyond a command for which a caller that may not wait any more is kept. All processes and
      servers of the run share the machine. (Time in which a process was stopped or starved does not count.)
    - slack: the time after a lease until a key can be acquired again.
    - recovery: the time after a fault until work goes on as usual. A command that was on its way still fails after four
      seconds, and is sent again within one.
    - lapse: the pause of a process below which it loses no place in a queue. A place lives a second longer when its
      renewal is due.
    - idle: the time for which a process may not get to run while a lock must not be lost.
    - work: the longest work of a holder. A holder limits its work by itself.
    - telling: the time until a loss is reported after the program left the block.
    - standstill: the longest time without any grant after everything was healed.
    - drift: the part of the time by which two clocks may get apart.
    - stands: the extra time for which an entry may stand in a document because of the drift.
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
