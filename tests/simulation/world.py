"""What the processes of a simulation do: what those of the fault runs do, and they write down the same records."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from django_mongolock.engine import runner
from django_mongolock.engine.actions import Pause, Protocol
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.options import Options
from django_mongolock.engine.processes import Fate
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError, LockLost
from tests.faults.peers import TIMEOUT, Plan
from tests.faults.plans import choose, line
from tests.faults.records import Record
from tests.simulation.client import Link, SimStore
from tests.simulation.kernel import Kernel, Process, Strand
from tests.simulation.server import Servers

#: Strands of a process that has several.
MANY: Final = 4
#: How often everybody queues at the one key where the order can be seen, beside what is chosen.
QUEUEING: Final = 0.15
#: How long a minimum hold is, and how long work under it takes, in seconds: sometimes longer than a renewal.
HOLDS: Final = (0.02, 0.3, 0.8, 2.5)
#: How often an attempt ends in another manner than by a release.
OFTEN: Final = 0.1


class Struck(Exception):
    """What strikes a strand where it waits, as a signal handler or a cancellation does."""


class SimSession(Session):
    """The session of a simulated process. in_main_thread: its commands are sent by its worker threads."""

    def __init__(self, store: SimStore, world: World, process: Process, *, in_main_thread: bool) -> None:
        super().__init__(store, command_timeout=TIMEOUT, now=world.kernel.now)
        self.world = world
        self.process = process
        self.in_main_thread = in_main_thread

    def run(self, steps: Protocol[Any]) -> Any:
        """See Session.run()."""
        return runner.run(steps, self.commands.call if self.in_main_thread else self._send)

    def _send(self, action: Any) -> Any:
        return self.waits.pause(action) if isinstance(action, Pause) else self.commands.send(action)

    def name_process(self) -> str:
        """See Session.name_process()."""
        return str(self.process.pid)

    def fate(self, process: str) -> Fate:
        """See Session.fate()."""
        return "alive" if self.world.is_alive(int(process)) else "gone"


class World:
    """The servers, the processes, and what they write down."""

    def __init__(self, seed: int) -> None:
        self.kernel = Kernel(seed)
        self.servers = Servers(self.kernel)
        self.link = Link()
        self.chance = self.kernel.chance
        self.records: list[Record] = []
        self.workers: list[Worker] = []
        self.attempts = 0
        self.open_faults = 0
        #: Until when documents were removed, by the clock that was furthest ahead, in seconds since the beginning.
        self.purged = 0.0
        self._operator = self.kernel.process("janitor")
        self.janitor = SimStore(self.kernel, self.servers, self._operator, self.link)

    def write(self, what: str, pid: int | None = None, t: float | None = None, **facts: Any) -> None:
        """Write down that this happens now, or happened at *t*."""
        if self.kernel.over:
            return
        pid = self.kernel.pid if pid is None else pid
        self.records.append({"what": what, "t": self.kernel.time if t is None else t, "pid": pid, **facts})

    def is_alive(self, pid: int) -> bool:
        """Whether a process of that number runs."""
        return any(worker.process.pid == pid and worker.process.alive for worker in self.workers)

    def start(self, kind: str) -> Worker:
        """Start a process."""
        worker = Worker(self, self.kernel.process(kind))
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """SIGKILL."""
        self.write("kill", 0, group=worker.process.pid)
        worker.process.alive = False

    def stop(self, worker: Worker, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        now = self.kernel.time
        worker.process.stopped_until = max(worker.process.stopped_until, now + seconds)
        self.write("stopped", 0, group=worker.process.pid, u=worker.process.stopped_until)

    def by_janitor(self, call: Callable[[], object]) -> None:
        """Have an operator do something; what fails, fails."""

        def run() -> None:
            with contextlib.suppress(LockError):
                call()

        self.kernel.spawn(self._operator, run, "janitor")

    def fault(self, name: str, since: float, until: float, **facts: Any) -> None:
        """Write down that a fault lasted from then until then."""
        self.records.append({"what": "fault", "t": since, "u": until, "pid": 0, "name": name, **facts})


class Worker:
    """One process: a session, and strands that lock."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.kernel = world.kernel
        self.process = process
        self.chance = random.Random(world.chance.random())
        self.stopping = False
        self.store = SimStore(world.kernel, world.servers, process, world.link)
        in_main = process.kind in ("sync", "async")
        self.session = SimSession(self.store, world, process, in_main_thread=in_main)
        self.session.pid = process.pid
        self.strands: list[Strand] = []
        self.kept: list[Any] = []
        self._names = 0
        world.write("start", process.pid, group=process.pid, kind=process.kind)
        for _ in range(1 if process.kind == "sync" else MANY):
            self.strands.append(self.kernel.spawn(process, self._live, process.kind, self.chance.uniform(0, 0.05)))

    def _live(self) -> None:
        while not self.stopping:
            with contextlib.suppress(Struck):
                self.cycle(self._plan())
                self.kernel.sleep(self.chance.uniform(0.003, 0.025))

    def _plan(self) -> Plan:
        plan = choose(self.chance, whole=True)
        while plan.document:
            plan = choose(self.chance, whole=True)
        if self.chance.random() < QUEUEING or (self.process.kind == "sync" and self.chance.random() < 0.5):
            plan = line(self.chance)
        if plan.min_hold:
            plan = dataclasses.replace(plan, min_hold=self.chance.choice(HOLDS), work=self.chance.choice(HOLDS))
        manner = "extend" if self.chance.random() < 0.1 else "release"
        if self.chance.random() < OFTEN:
            manner = self.chance.choice(["cancel", "forget", "strike", "fork"])
        return dataclasses.replace(plan, manner=manner)

    # One attempt

    def cycle(self, plan: Plan, inner: str | None = None) -> None:
        """One attempt, in this strand."""
        self._names += 1
        self.world.attempts += 1
        name = f"{self.process}-{self._names}"
        write = self.world.write
        options = Options(
            plan.terms,
            plan.wait,
            reentrant=plan.reentrant,
            auto_renew=plan.renew,
            on_lost=lambda _: write("told", self.process.pid, id=name),
        )
        lock = MongoLock(lambda: self.session, plan.keys, options, lambda: {"pid": self.process.pid})
        write("ask", id=name, inner=inner, **plan.facts())
        self._disturb_soon(plan, lock)
        try:
            lock.acquire()
        except BaseException as error:
            write("refused", id=name, error=type(error).__name__)
            if isinstance(error, LockError):
                return
            raise
        write("got", id=name, tokens=dict(lock.fencing_tokens))
        with contextlib.suppress(Struck):
            held = self._work(name, lock, plan)
            if inner is None and plan.reentrant and held:
                self.cycle(dataclasses.replace(plan, wait=0.0, work=0.0, manner="release"), inner=name)
        if plan.manner == "forget":
            write("dropped", id=name)
            del lock
            self._happened("forget")
            return
        self._give_back(name, lock)

    def _disturb_soon(self, plan: Plan, lock: MongoLock) -> None:
        """Cancel the wait, or strike the strand, at any time of the attempt."""
        strand, after = self.kernel.current, self.chance.uniform(0, 0.5)
        assert strand is not None
        if plan.manner == "cancel":
            self.kernel.spawn(self.process, partial(self._cancel, lock), "canceller", after)
        elif plan.manner == "strike":
            self.kernel.spawn(self.process, partial(self._strike, strand, self._names), "striker", after)

    def _cancel(self, lock: MongoLock) -> None:
        lock.cancel()
        self._happened("cancel")

    def _strike(self, strand: Strand, attempt: int) -> None:
        if attempt == self._names or len(self.strands) > 1:
            self.kernel.strike(strand, Struck())
            self._happened("cancel")

    def _happened(self, fault: str) -> None:
        now = self.kernel.time
        self.world.fault(fault, now, now, order=False)

    def _look(self, name: str, lock: MongoLock) -> bool:
        """Write down what the lock says of itself."""
        now = self.kernel.time
        held, left = lock.held, lock.remaining
        self.world.write("see", u=now, id=name, held=held, left=left)
        return held

    def _work(self, name: str, lock: MongoLock, plan: Plan) -> bool:
        end, extends = self.kernel.time + plan.work, plan.manner == "extend"
        if plan.manner == "fork":
            self._fork(name, lock)
        while held := self._look(name, lock):
            if extends and self.kernel.time >= end - plan.work / 2:
                extends = False
                with contextlib.suppress(LockError):
                    lock.extend()
            if self.kernel.time >= end:
                break
            self.kernel.sleep(self.chance.uniform(0.01, 0.1))
        return held

    def _fork(self, name: str, lock: MongoLock) -> None:
        """Fork a child that leaves the block of its parent. It sees the parent's memory, not a copy of it."""
        child = self.kernel.process("child")
        self.world.write("forked", id=name)
        self.world.write("start", child.pid, group=self.process.pid, kind="child")

        def leave() -> None:
            self._look(name, lock)
            with contextlib.suppress(LockError):
                if self.chance.random() < 0.5:
                    lock.release()
                else:
                    lock.__exit__(None, None, None)
            self._look(name, lock)
            self.world.write("end", child.pid)

        self.kernel.spawn(child, leave, "child")
        self._happened("fork")

    def _give_back(self, name: str, lock: MongoLock) -> None:
        write = self.world.write
        write("leave", id=name)
        was = "unknown"
        try:
            if self.chance.random() < 0.5:
                lock.__exit__(None, None, None)
                was = "released"
            else:
                was = "released" if lock.release() else "lost"
        except LockLost:
            was = "lost"
        except LockError:
            pass
        finally:
            write("left", id=name, was=was)
            if was != "released":
                self.kept.append(lock)
