"""A simulated world: servers, processes that lock, an operator, and their records."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_mongolock.engine.protocol import actions
from django_mongolock.engine.protocol.actions import Protocol
from django_mongolock.engine.protocol.processes import Fate
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError
from verify.faults.peers import TIMEOUT
from verify.faults.records import Record
from verify.simulation import kernel
from verify.simulation.client import SimStore
from verify.simulation.kernel import Kernel, Process
from verify.simulation.server import Servers

if TYPE_CHECKING:
    from verify.simulation.worker import Worker


#: The most seconds of a receiver of a lock's signals, in the caller's thread, and for a loss.
RECEIVER, RECEIVER_OF_LOSS = 0.03, 1.0


class SimSession(Session):
    """The session of a simulated process. In a process of the kind "async", each strand is a coroutine."""

    def __init__(self, store: SimStore, world: World, process: Process) -> None:
        kernel = world.kernel
        super().__init__(store, TIMEOUT, self._observe, lambda: kernel.time * process.rate)
        self.world = world
        self.process = process

    def run(self, steps: Protocol[Any]) -> Any:
        return actions.run(steps, self.commands.call) if self.process.kind == "async" else super().run(steps)

    def _observe(self, event: str, grant: Grant) -> None:
        """Let the receivers take their time."""
        if self.world.receivers_take_time and self.world.kernel.current is not None:
            most = RECEIVER_OF_LOSS if event == "lost" else RECEIVER
            self.world.kernel.sleep(self.world.chance.uniform(0.0, most))

    def name_process(self) -> str:
        return str(self.process.pid)

    def fate(self, process: str) -> Fate:
        return "alive" if self.world.is_alive(int(process)) else "gone"


class World:
    """The servers, the processes, and their records."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"world {seed}")
        self.kernel = Kernel(seed, chance.choice([0.0, kernel.DRIFT, kernel.DRIFT]))
        self.receivers_take_time = chance.random() < 0.5
        #: Whether a process ends with many locks when all faults are healed.
        self.ends_with_many = chance.random() < 0.25
        #: The process and the key of the grant at which a fault aims.
        self.aim: tuple[int, str] | None = None
        self.servers = Servers(self.kernel)
        self.chance = self.kernel.chance
        self.records: list[Record] = []
        self.workers: list[Worker] = []
        self.attempts = 0
        self.open_faults = 0
        #: The numbers of ambiguous answers, cancelled waits and struck callers.
        self.counts = self.servers.counts
        #: The time until which documents were removed, by the clock furthest ahead, in seconds since the beginning.
        self.purged = 0.0
        self._operator = self.kernel.process("janitor")
        self.janitor = SimStore(self.kernel, self.servers, self._operator)

    def write(self, what: str, pid: int | None = None, t: float | None = None, **facts: Any) -> None:
        """Record an event of now, or of *t*."""
        if self.kernel.over:
            return
        pid = self.kernel.pid if pid is None else pid
        self.records.append({"what": what, "t": self.kernel.time if t is None else t, "pid": pid, **facts})

    def is_alive(self, pid: int) -> bool:
        """Return whether a process of that number runs."""
        return any(worker.process.pid == pid and worker.is_running for worker in self.workers)

    def kill(self, worker: Worker) -> None:
        """Send SIGKILL."""
        self.write("kill", 0, group=worker.process.pid)
        worker.process.alive = False

    def stop(self, worker: Worker, seconds: float) -> None:
        """Send SIGSTOP, and SIGCONT after so many seconds."""
        now = self.kernel.time
        worker.process.stopped_until = max(worker.process.stopped_until, now + seconds)
        self.write("stopped", 0, group=worker.process.pid, u=worker.process.stopped_until)

    def by_janitor(self, call: Callable[[], object]) -> None:
        """Run *call* as an operator. Lock errors are ignored."""

        def run() -> None:
            with contextlib.suppress(LockError):
                call()

        self.kernel.spawn(self._operator, run, "janitor")

    def fault(self, name: str, since: float, until: float, **facts: Any) -> None:
        """Record the duration of a fault."""
        self.records.append({"what": "fault", "t": since, "u": until, "pid": 0, "name": name, **facts})
