"""The processes of a simulation. Like the processes of the fault runs, they act and write records."""

from __future__ import annotations

import contextlib
import random
import weakref
from dataclasses import replace
from functools import partial
from typing import Any, Final

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.session import bulk
from django_mongolock.exceptions import LockError, LockLost
from verify.simulation.client import SimStore
from verify.simulation.invariants import amplified_end
from verify.simulation.kernel import Process, Strand
from verify.simulation.plans import MANY, SimPlan, many, usual
from verify.simulation.strikes import LineStrike, Struck
from verify.simulation.world import SimSession, World

#: Strands of a process that has several: sometimes more than a small pool has threads.
STRANDS: Final = (4, 4, 4, 12)
#: The number of locks of a process that is to end with many. The other strands of the process act as always.
BULK: Final = 3 * MANY
#: The last line of the engine, counted from its beginning, at which an attempt is struck. Most attempts have fewer
#: lines.
LINES: Final = 1_500
#: The probability that a coroutine is struck just when it is woken, and the last wake-up at which that happens.
AT_A_WAKE: Final = 0.5
WAKES: Final = 6
#: The most seconds until an attempt is cancelled or struck, and until it is struck during its release.
SOON: Final = 0.5
RELEASING: Final = 0.02
#: The most seconds of a callback.
CALLBACK: Final = 2.0
#: The probability of a strike during a downgrade.
STRUCK: Final = 0.3


def start(world: World, kind: str) -> Worker:
    """Start a process."""
    worker = Worker(world, world.kernel.process(kind))
    world.workers.append(worker)
    return worker


#: The number of grants from which the commands of an end are counted.
MANY_GRANTS: Final = 50


class Worker:
    """One process with a session and with strands that lock."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.kernel = world.kernel
        self.process = process
        self.chance = random.Random(world.chance.random())
        self.stopping = self.is_closed = False
        self.store = SimStore(world.kernel, world.servers, process)
        self.session = SimSession(self.store, world, process)
        self.session.pid = process.pid
        self.store.grants = self.session.registry.grants
        self.strands: list[Strand] = []
        #: The requested keys of a process that is to end with many locks.
        self.bulk: list[str] = []
        self.kept: list[Any] = []
        self._names = 0
        world.write("start", process.pid, group=process.pid, kind=process.kind)
        for _ in range(1 if process.kind == "sync" else self.chance.choice(STRANDS)):
            self.strands.append(self.kernel.spawn(process, self._live, process.kind, self.chance.uniform(0, 0.05)))
        process.main = None if process.kind == "async" else self.strands[0]

    def _live(self) -> None:
        while not self.stopping:
            with contextlib.suppress(Struck):
                self.cycle(self._plan())
                self.kernel.sleep(self.chance.uniform(0.003, 0.025))

    def _plan(self) -> SimPlan:
        if self.process.kind == "many" and len(self.bulk) < BULK:
            made = many(self.chance, self.process.pid, len(self.bulk))
            self.bulk += made.keys
            return made
        queues = self.process.kind == "sync" and self.chance.random() < 0.5
        return usual(self.chance, queues)

    @property
    def is_running(self) -> bool:
        """Whether the process is alive and one of its strands runs."""
        return self.process.alive and not all(strand.ended for strand in self.strands)

    @property
    def _is_main(self) -> bool:
        """Whether the running strand is the main thread. A signal may strike the main thread at any line."""
        return self.kernel.current is self.process.main

    @property
    def _can_be_struck(self) -> bool:
        return self._is_main or self.process.kind == "async"

    def close(self) -> None:
        """Close the session in a strand of its own, whatever the others do. A second call does nothing."""
        if self.is_closed:
            return
        self.stopping = self.is_closed = True

        def run() -> None:
            self.world.write("closed", self.process.pid)
            self.world.write("end", self.process.pid)
            grants, store = list(self.store.grants.values()), self.store
            removals, failures = store.removals, store.failures
            single = len(self.session.background.pending) + sum(
                grant.in_doubt or not (grant.token or grant.lease.until) for grant in grants
            )
            self.session.close()
            self.world.write("shut", self.process.pid)
            if store.failures == failures and MANY_GRANTS <= len(grants) <= bulk.BATCH:
                ended = amplified_end(len(grants), single, store.removals - removals, self.kernel.time)
                self.world.servers.violations += ended

        self.strands.append(self.kernel.spawn(self.process, run, "closer"))

    # One attempt

    def cycle(self, plan: SimPlan, inner: str | None = None, within: str | None = None) -> None:
        """Make one attempt, in this strand.

        - inner: attempt whose lock it shares.
        - within: attempt in whose block it is.
        """
        self._names += 1
        self.world.attempts += 1
        name = f"{self.process}-{self._names}"
        names = [name]
        lock = self._new_lock(names, plan)
        self.world.write("ask", id=name, inner=inner, within=within, **self._facts(plan))
        strike = self._disturb(plan, lock)
        if not self._acquire(name, lock, strike):
            return
        with contextlib.suppress(Struck):
            held = self._work(name, lock, plan)
            if plan.manner == "downgrade" and held:
                if not self._downgrade(names, lock, plan):
                    return
                name = names[-1]
                self._work(name, lock, plan)
            if inner is None and plan.reentrant and held:
                self.cycle(replace(plan, wait=0.0, work=0.0, manner="release"), inner=name)
            if plan.inner and held:
                self.cycle(replace(plan, keys=plan.inner, inner=(), manner="release"), within=name)
        if plan.manner == "forget":
            # A slow callback may still have the lock.
            weakref.finalize(lock, self.world.write, "dropped", self.process.pid, id=name).atexit = False
            del lock
            self._happened("forget")
            return
        if plan.manner == "strike" and self.process.kind == "async":  # not struck before
            self._strike_within(RELEASING, lock)
        self._give_back(name, lock, strike)

    def _facts(self, plan: SimPlan) -> dict[str, Any]:
        """Return the facts of a plan for the checker in virtual time.

        Lengths by the caller's clock are lower bounds. Lengths by a server's clock are upper bounds.
        """
        facts = plan.facts()
        for name in ("wait", "lease", "max_hold"):
            if facts.get(name) is not None:
                facts[name] /= self.process.rate
        return facts | {"server_lease": facts["server_lease"] / (1.0 - self.kernel.drift)}

    def _called(self, what: str, names: list[str]) -> None:
        """Record a callback, and let it take its time."""
        for name in names:
            self.world.write(what, self.process.pid, id=name)
        if self.world.receivers_take_time:
            self.kernel.sleep(self.chance.uniform(0.0, CALLBACK))

    def _new_lock(self, names: list[str], plan: SimPlan) -> MongoLock:
        pid = self.process.pid
        options = LockOptions(
            wait=plan.wait,
            reentrant=plan.reentrant,
            auto_renew=plan.renew,
            max_hold=plan.max_hold,
            on_lost=lambda _: self._called("told", names),
            on_release_requested=lambda _: self._called("requested", names),
        )
        # The document contains the label, so that each standing entry can be attributed.
        return MongoLock(lambda: self.session, plan.keys, plan.terms, options, lambda: {"pid": pid, "label": names[-1]})

    def _acquire(self, name: str, lock: MongoLock, strike: LineStrike) -> bool:
        """Return whether the lock was acquired. Raises a strike of the strand."""
        try:
            with strike:
                lock.acquire()
        except BaseException as error:
            self.world.write("refused", id=name, error=type(error).__name__)
            if isinstance(error, LockError):
                return False
            raise
        finally:
            self._count(strike)
            if self.kernel.current is not None:
                self.kernel.current.doom = None
        self.world.write("got", id=name, tokens=dict(lock.fencing_tokens))
        return True

    def _disturb(self, plan: SimPlan, lock: MongoLock) -> LineStrike:
        """Cancel the wait at any time of the attempt, or strike the coroutine where it waits.

        Return the strike at a line for the main thread. Signals strike only the main thread, so other threads are
        cancelled.
        """
        if plan.manner == "cancel" or (plan.manner == "strike" and not self._can_be_struck):
            self.kernel.spawn(self.process, partial(self._cancel, lock), "canceller", self.chance.uniform(0, SOON))
        elif plan.manner == "strike" and self._is_main:
            return LineStrike(self.kernel, self.chance.randint(1, LINES))
        elif plan.manner == "strike" and self.chance.random() < AT_A_WAKE:
            assert self.kernel.current is not None
            self.kernel.current.doom = self.chance.randint(1, WAKES), Struck()
        elif plan.manner == "strike":
            self._strike_within(SOON, lock)
        return LineStrike(self.kernel, 0)

    def _strike_within(self, seconds: float, lock: MongoLock) -> None:
        strike = partial(self._strike, self.kernel.current, lock)
        self.kernel.spawn(self.process, strike, "striker", self.chance.uniform(0, seconds))

    def _cancel(self, lock: MongoLock) -> None:
        self.world.counts["cancellations"] += lock._own.wanted is not None
        lock.cancel()
        self._happened("cancel")

    def _strike(self, strand: Strand | None, lock: MongoLock) -> None:
        if strand is not None and not strand.ended:
            self.kernel.strike(strand, Struck())
            self.world.counts["signals"] += lock._own._busy.locked()  # during acquire()
            self._happened("strike")

    def _count(self, strike: LineStrike) -> None:
        if strike.has_struck:
            self.world.counts["signals"] += 1
            self._happened("strike")

    def _happened(self, fault: str) -> None:
        now = self.kernel.time
        self.world.fault(fault, now, now, order=False)

    def _look(self, name: str, lock: MongoLock) -> bool:
        """Record the state that the lock reports."""
        now = self.kernel.time
        held, left = lock.held, lock.remaining
        self.world.write("see", u=now, id=name, held=held, left=left / self.process.rate)
        return held

    def _work(self, name: str, lock: MongoLock, plan: SimPlan) -> bool:
        end, extends = self.kernel.time + plan.work, plan.manner == "extend"
        if plan.manner == "fork":
            self._fork(name, lock)
        if plan.manner == "defer":
            for grant in lock._own.grants:  # as at the beginning of a transaction
                grant.defer_renewals()
        while held := self._look(name, lock):
            if extends and self.kernel.time >= end - plan.work * 0.8:
                extends = False
                self._extend(name, lock, plan)
            if self.kernel.time >= end:
                break
            self.kernel.sleep(self.chance.uniform(0.02, 0.15) * len(plan.keys))
        return held

    def _extend(self, name: str, lock: MongoLock, plan: SimPlan) -> None:
        since = self.kernel.time
        with contextlib.suppress(LockError):
            lock.extend(plan.extension)
            lease = max(plan.lease, plan.extension or 0.0) / self.process.rate
            self.world.write("extended", since=since, id=name, lease=lease)

    def _downgrade(self, names: list[str], lock: MongoLock, plan: SimPlan) -> bool:
        """Let the lock go on as a reader, under a new attempt name in *names*. Return whether it does.

        If not, the lock holds nothing afterwards. The reader has an owner of its own. Attempts with an owner are in no
        queue.
        """
        write, before, reader = self.world.write, names[-1], f"{names[-1]}-reader"
        terms = self._facts(plan) | {"mode": "shared", "owner": reader, "wait": None}
        write("leave", id=before)
        names.append(reader)
        write("ask", id=reader, inner=None, within=None, **terms)
        strikes = self.chance.random() < STRUCK
        strike = LineStrike(self.kernel, self.chance.randint(1, LINES) if strikes and self._is_main else 0)
        if strikes and self.process.kind == "async":
            self._strike_within(RELEASING, lock)
        try:
            with strike:
                lock.downgrade()
        except BaseException as error:
            write("refused", id=reader, error=type(error).__name__)
            write("left", id=before, was="lost" if isinstance(error, LockLost) else "unknown")
            if not isinstance(error, (LockError, Struck)):
                raise
            with contextlib.suppress(LockError):
                lock.release()
            return False
        finally:
            self._count(strike)
        write("left", id=before, was="released")
        write("got", id=reader, tokens=dict(lock.fencing_tokens))
        write("downgraded", id=reader, before=before)
        return True

    def _fork(self, name: str, lock: MongoLock) -> None:
        """Fork a child that leaves the block of its parent. The child sees the parent's memory, not a copy."""
        child = self.kernel.process("child", self.process)
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

    def _give_back(self, name: str, lock: MongoLock, strike: LineStrike) -> None:
        write = self.world.write
        write("leave", id=name)
        was, struck_before = "unknown", strike.has_struck
        try:
            with strike:
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
            if strike.has_struck > struck_before:
                self._count(strike)
            elif was != "released":
                self.kept.append(lock)
