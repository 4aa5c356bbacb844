"""A discrete-event simulation of processes that want one key, on the cores that they share with the server.

Every step that uses CPU takes a core for as long as was measured with nobody else there; what waits for the disk
takes none. Nothing here was fitted to a contended run: what comes out is compared with one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Steps:
    """What each step costs, in milliseconds. *_cpu take a core."""

    client_cpu: float  # of an acquire and release, in the process
    acquire_cpu: float  # of the command, in the server
    release_cpu: float
    journal: float  # from the end of a command's work until it is on the disk and answered
    wake_cpu: float  # of a bell: the server's reply and the client's reading it
    stream_cpu: float  # of a change, for each that listens and is not meant
    queued_cpu: float  # of a command on a key that others hold or wait for, in the server
    waiter_cpu: float  # of such a command, for each of the waiters in its document
    cores: int = 2
    near: int = 0  # how many at the head of the queue are woken by every change: none, since there are bells
    rest: float = 1.0  # for what part of its time a waiter further back is not woken by every change


@dataclass
class Result:
    """Milliseconds, and how many a second."""

    hand_overs: list[float] = field(default_factory=list)
    acquisitions: int = 0
    elapsed: float = 0.0
    busy: float = 0.0

    @property
    def per_second(self) -> float:
        return self.acquisitions / self.elapsed * 1000 if self.elapsed else 0.0


class Cores:
    """So many cores, and who waits for one, first come, first served."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.queue: deque[tuple[float, Process]] = deque()


Process = Generator[tuple[str, float], None, None]


class Simulation:
    """Processes that take one key over and over. A process yields ("cpu", ms), ("sleep", ms) or ("wait", 0)."""

    def __init__(self, steps: Steps, processes: int, milliseconds: float) -> None:
        self.steps, self.end = steps, milliseconds
        self.now = 0.0
        self.result = Result()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._cores = Cores(steps.cores)
        self._queue: deque[Process] = deque()
        self._holder: Process | None = None
        self._released = 0.0
        self._self: Process = _nobody()
        for number in range(processes):
            self._at(number * 0.1, self._starter(self._life()))

    def run(self) -> Result:
        while self._events and self.now < self.end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.result.elapsed = self.now
        return self.result

    # Who does what

    def _life(self) -> Process:
        steps = self.steps
        while True:
            me = self._self
            is_free = self._holder is None and not self._queue
            yield "cpu", steps.client_cpu / 2 + (steps.acquire_cpu if is_free else self._queued())
            if self._holder is None and not self._queue:
                self._holder = me
                yield "sleep", steps.journal
            else:
                self._queue.append(me)
                self._tell(None)
                yield "wait", 0.0
                self.result.hand_overs.append(self.now - self._released)
            self.result.acquisitions += 1
            self._released = self.now
            yield "cpu", steps.client_cpu / 2 + (self._queued() if self._queue else steps.release_cpu)
            self._grant()
            yield "sleep", steps.journal

    def _queued(self) -> float:
        """What a command on the key costs the server, with those who wait there."""
        return self.steps.queued_cpu + self.steps.waiter_cpu * len(self._queue)

    def _grant(self) -> None:
        """The release was written."""
        self._holder = self._queue.popleft() if self._queue else None
        if self._holder is not None:
            self._tell(self._holder)

    def _tell(self, granted: Process | None) -> None:
        """A change was written: when it is on the disk, it wakes those that listen to every change, and *granted*."""
        behind = max(0, len(self._queue) - self.steps.near)
        others = len(self._queue) - behind + round(behind * (1 - self.steps.rest))

        def tell() -> None:
            for _ in range(others):
                self._use(self.steps.stream_cpu, None)
            if granted is not None:
                self._use(self.steps.wake_cpu, granted)

        self._at(self.now + self.steps.journal, tell)

    # How time goes by

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _starter(self, process: Process) -> Callable[[], None]:
        return lambda: self._go_on(process)

    def _go_on(self, process: Process) -> None:
        self._self = process
        what, milliseconds = next(process)
        if what == "cpu":
            self._use(milliseconds, process)
        elif what == "sleep":
            self._at(self.now + milliseconds, self._starter(process))

    def _use(self, milliseconds: float, then: Process | None) -> None:
        """Have a core for so long, as soon as there is one; then that process goes on."""
        if self._cores.free == 0:
            self._cores.queue.append((milliseconds, then or _nobody()))
            return
        self._cores.free -= 1
        self.result.busy += milliseconds
        self._at(self.now + milliseconds, lambda: self._leave(then))

    def _leave(self, then: Process | None) -> None:
        self._cores.free += 1
        if self._cores.queue:
            self._use(*self._cores.queue.popleft())
        if then is not None:
            self._go_on(then)


def _nobody() -> Process:
    """Somebody who only uses a core."""
    while True:
        yield "wait", 0.0


def simulate(steps: Steps, processes: int, milliseconds: float = 20_000.0) -> Result:
    """So many processes for so long, by the simulation's own clock."""
    return Simulation(steps, processes, milliseconds).run()
