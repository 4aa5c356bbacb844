"""Virtual time. Strands run one at a time, in an order that a seed decides."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Final, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")

FOREVER: Final = float("inf")
#: The most seconds by which a strand runs late. The order of simultaneous strands therefore differs by seed.
JITTER: Final = 0.000_2
#: The largest relative error of a clock's rate. Two such clocks are just less apart than the least margin of a lease, a
#: tenth.
DRIFT: Final = 0.045


class Killed(BaseException):
    """The end of a strand whose process is gone. The strand runs no clean-up that sends anything."""


class Process:
    """A unit that is stopped, and dies, as one.

    - pid: result of `os.getpid` in its strands.
    - rate: seconds that its clock counts in one second.
    - main: strand that is its main thread.
    """

    def __init__(self, pid: int, kind: str, rate: float = 1.0) -> None:
        self.pid = pid
        self.kind = kind
        self.rate = rate
        self.main: Strand | None = None
        self.alive = True
        self.stopped_until = 0.0

    def __repr__(self) -> str:
        return f"{self.kind}-{self.pid}"


def _nothing() -> None:
    """Do nothing, as the remaining work of a strand that has begun."""


class Strand:
    """One line of execution. Outside a simulation, this is a thread or a coroutine."""

    def __init__(self, kernel: Kernel, process: Process, run: Callable[[], object], name: str = "") -> None:
        self.process = process
        self.name = name
        self.ended = False
        self.due = 0  # number of the event that resumes it (others are outdated)
        self.strike: BaseException | None = None
        self.doom: tuple[int, BaseException] | None = None  # the strike when it is woken for that time
        self._kernel = kernel
        self._run = run
        self.greenlet = greenlet(self._main, kernel.hub)

    def __repr__(self) -> str:
        return f"<{self.name or 'strand'} of {self.process}>"

    def is_alive(self) -> bool:
        return not self.ended and self.process.alive

    def _main(self) -> None:
        run, self._run = self._run, _nothing  # keep no reference, because the function may lead to a lock object
        try:
            run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the run is read
            self._kernel.failures.append((self, error))
        finally:
            self.ended = True


class Kernel:
    """The virtual clock and its events.

    - time: seconds since the beginning.
    - chance: source of all randomness.
    - drift: see `DRIFT`.
    """

    def __init__(self, seed: int, drift: float = 0.0) -> None:
        self.hub = getcurrent()
        self.time = 0.0
        self.chance = random.Random(seed)
        self.drift = drift
        self.failures: list[tuple[Strand, BaseException]] = []
        self.steps = 0
        self.over = False
        self._numbers = itertools.count(1)
        self._pids = itertools.count(101)
        self._events: list[tuple[float, int, Strand | Callable[[], None]]] = []
        self._strands: list[Strand] = []
        self._by_greenlet: dict[greenlet, Strand] = {}
        self.outside = Process(100, "harness")
        self.current: Strand | None = None

    # Processes and strands

    def process(self, kind: str, parent: Process | None = None) -> Process:
        """Return a new process, on the machine of its *parent*."""
        return Process(next(self._pids), kind, self.rate() if parent is None else parent.rate)

    def rate(self) -> float:
        """Return a random rate of a clock."""
        return 1.0 + self.chance.uniform(-self.drift, self.drift)

    def spawn(self, process: Process, run: Callable[[], object], name: str = "", after: float = 0.0) -> Strand:
        """Start a strand, *after* so many seconds."""
        strand = Strand(self, process, run, name)
        self._strands.append(strand)
        if len(self._strands) > 10_000:
            self._strands = [each for each in self._strands if not each.ended]
        self._resume(strand, self.time + after)
        return strand

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a *call* after so many seconds. The call must not wait."""
        self._push(self.time + seconds, call)

    @property
    def pid(self) -> int:
        """The process of the running strand."""
        return (self.outside if self.current is None else self.current.process).pid

    # Waiting

    def now(self) -> float:
        """Return the seconds that the clock of the running strand's process shows."""
        strand = self.current
        return self.time if strand is None else self.time * strand.process.rate

    def sleep(self, seconds: float) -> None:
        """Wait in this strand, by the clock of its process."""
        self.park(seconds)

    def park(self, seconds: float = FOREVER) -> None:
        """Wait until `wake` is called, for at most so many seconds of the process's clock. Raises a strike of the
        strand.
        """
        strand = self.current
        if strand is None:
            raise RuntimeError("only a strand can wait")
        self._end_if_gone(strand)
        strand.due = 0
        if seconds != FOREVER:
            self._resume(strand, self.time + max(0.0, seconds) / strand.process.rate)
        self.hub.switch()
        self._end_if_gone(strand)
        if strand.strike is not None:
            try:
                raise strand.strike
            finally:
                strand.strike = None

    def _end_if_gone(self, strand: Strand) -> None:
        if self.over or not strand.process.alive:
            raise Killed

    def wake(self, strand: Strand) -> None:
        """End the wait of a strand."""
        if strand.ended:
            return
        if strand.doom is not None:
            left, error = strand.doom
            strand.doom = (left - 1, error) if left > 1 else None
            strand.strike = error if left == 1 else strand.strike
        self._resume(strand, self.time)

    def strike(self, strand: Strand, error: BaseException) -> None:
        """Raise *error* in a strand where it waits, as a signal handler or a cancellation does."""
        strand.strike = error
        self.wake(strand)

    # Running

    def run(self, until: float) -> None:
        """Let time pass until *until*."""
        while self._events and self._events[0][0] <= until:
            due, number, what = heapq.heappop(self._events)
            self.time = max(self.time, due)
            if not isinstance(what, Strand):
                what()
                continue
            if what.due != number or what.ended or not what.process.alive:
                continue
            if what.process.stopped_until > self.time:
                self._resume(what, what.process.stopped_until)
                continue
            self._switch_to(what)
        self.time = max(self.time, until)

    def close(self) -> None:
        """End all strands. No clean-up of theirs reaches a server."""
        self.over = True
        for strand in self._strands:
            while not strand.ended and strand.greenlet:
                self._switch_to(strand)
            strand.ended = True

    def _switch_to(self, strand: Strand) -> None:
        self.steps += 1
        self.current = strand
        try:
            strand.greenlet.switch()
        finally:
            self.current = None

    def _resume(self, strand: Strand, at: float) -> None:
        strand.due = self._push(at, strand)

    def _push(self, at: float, what: Strand | Callable[[], None]) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (at + self.chance.random() * JITTER, number, what))
        return number
