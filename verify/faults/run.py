"""One run: a cluster, workers, random faults from a seed, and the checker's verdict."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from pymongo.errors import PyMongoError

from django_mongolock.engine.store.layout import ensure_indexes
from testproject.servers import ServerError
from testproject.servers.process import patience
from verify.faults import clocks
from verify.faults.aims import Target, contested, holder_tokens
from verify.faults.checker import Violation, check
from verify.faults.cluster import RECOVERY, Cluster
from verify.faults.documents import DOCUMENTS, STALE, OurDocument, at_once, make_documents
from verify.faults.history import History
from verify.faults.injections import AIMED, FAULTS, SKEW, Scene, Skipped
from verify.faults.opportunities import AIMS, opportunities
from verify.faults.peers import COLLECTION, DATABASE, ERRORS, TIMEOUT, Ours, Plan
from verify.faults.plans import HABITS, LONGEST
from verify.faults.records import Journal, now, read
from verify.faults.workers import work

#: The process from which workers are forked. One thread runs in it, and their modules are imported.
_NURSERY: Final = multiprocessing.get_context("forkserver")
_NURSERY.set_forkserver_preload(["verify.faults.workers"])
#: The faults of processes, and of locks that another process takes.
WORKER_FAULTS: Final = {
    "kill-worker": "SIGKILL of a process with all its threads and children; another one replaces it.",
    "stop-worker": "SIGSTOP of a process, often past its leases.",
    "fork": "A process forks while it holds, waits and listens; the child continues by itself.",
    "cancel": "A wait, a task or a block is cancelled, wherever it is.",
    "die": "A thread ends while it holds a lock.",
    "forget": "A lock object is garbage-collected without a release.",
    "client-clocks": "The wall clock of a process jumps, by up to an hour.",
    "force-release": "A process forces releases all the time.",
    "clear-stale": "A process clears stale locks all the time.",
}
NAMES: Final = (*FAULTS, *WORKER_FAULTS)
#: The number of processes of each kind.
CREW: Final = (("sync", 2), ("async", 1), ("threads", 1), ("prefork", 1), ("janitor", 1))
#: Seconds within which all waits must be served when the run is over.
FINISH: Final = 45.0
#: The period in seconds of the calms, and the length of a calm. A calm has no new faults except those of single
#: processes. Only a calm shows the order of arrivals, and locks lost for no reason.
STORM: Final = 30.0
CALM: Final = 12.0
#: The faults that set clocks.
SET_CLOCKS: Final = frozenset(name for name, fault in FAULTS.items() if fault.clocks)
#: The seconds without a fault of a lane after one has ended. If the servers never worked, or the most wanted key were
#: always stuck, nobody would hold a lock.
RESTS: Final = {
    "servers": (1.0, 5.0),
    "network": (1.0, 5.0),
    "replies": (0.2, 3.0),
    "clients": (3.0, 8.0),
    "stop-worker": (0.2, 1.0),
    "kill-worker": (2.0, 6.0),
}
#: The factor by which a fault with an aim is likelier.
FAVOURED: Final = 3
#: The seconds after the lease of a stopped process in which another one should be let in.
RIVAL: Final = 5.0
#: The seconds of a plain write from which the servers stand still. The first renewal of a short lease has no more.
STALL: Final = 0.25


@dataclass(slots=True)
class Outcome:
    """The outcome of a run."""

    seed: int
    seconds: float
    faults: list[str]
    injected: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    grants: int = 0
    looks: int = 0
    violations: list[dict[str, Any]] = field(default_factory=list)
    opportunities: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """The opportunities at which its faults aim, and that it never had."""
        return [aim for name, aim in AIMS.items() if name in self.faults and not self.opportunities.get(aim)]

    @property
    def proves_nothing(self) -> bool:
        """Whether the run never came to a situation in which a promise could have been broken."""
        aimed = AIMS.keys() & set(self.faults)
        return len(self.missed) == len(aimed) if aimed else not self.injected


class Crew:
    """The workers of a run."""

    def __init__(self, folder: Path, uri: str, habits: Sequence[str], chance: random.Random) -> None:
        self._folder = folder
        self._uri = uri
        self._habits = habits
        self._chance = chance
        self.journal = Journal(folder, "harness")
        self.journal.watch()
        self.running: dict[BaseProcess, str] = {}
        self._mutex = threading.Lock()

    def start(self) -> None:
        for kind, count in CREW:
            for _ in range(count):
                self._add(kind)

    def _add(self, kind: str) -> None:
        arguments = (kind, self._folder, self._uri, self._chance.randrange(2**32), self._habits, os.getpid())
        process = _NURSERY.Process(target=work, args=arguments, daemon=True)
        process.start()
        self.running[process] = kind

    def _aim(self, scene: Scene) -> tuple[BaseProcess, Target | None]:
        """Choose a process that holds a lock with another waiter. Sometimes, or if there is none, choose any."""
        targets = scene.poll(lambda: contested(scene.cluster)) if scene.chance.random() < AIMED else []
        workers = {process.pid: process for process, kind in list(self.running.items()) if kind != "janitor"}
        if targets := [target for target in targets if target.group in workers]:
            (target,) = scene.chance.choices(targets, [1 / target.lease for target in targets])
            return workers[target.group], target
        return scene.chance.choice(list(workers.values())), None

    def kill(self, scene: Scene) -> None:
        """Kill one process with all its children, and replace it."""
        (victim, _), since = self._aim(scene), now()
        with self._mutex:
            if victim in self.running:
                self._kill(victim)
                self.journal.write("fault", since, u=now(), name="kill-worker", order=False)
                self._add(self.running.pop(victim))

    def _kill(self, process: BaseProcess) -> None:
        self.journal.write("kill", group=process.pid)
        _signal(process, signal.SIGKILL)
        process.join()

    def stop(self, scene: Scene) -> None:
        """Stop one process for a while.

        If it holds a lock with another waiter, wait until the waiter has been let in.
        """
        (victim, target), since = self._aim(scene), now()
        _signal(victim, signal.SIGSTOP)
        if target is None:
            scene.sleep(scene.chance.choice([0.3, 1.0, 2.5]))
        else:
            self._wait_for_rival(scene, target)
        _signal(victim, signal.SIGCONT)
        self.journal.write("stopped", since, u=now(), group=victim.pid)
        self.journal.write("fault", since, u=now(), name="stop-worker", order=False, group=victim.pid)

    @staticmethod
    def _wait_for_rival(scene: Scene, target: Target) -> None:
        """Wait until another process holds the target's lock. If the target released it just before its stop, return at
        once.
        """
        tokens = holder_tokens(scene.cluster, target.key)
        if tokens is not None and target.token not in tokens:
            return
        end = now() + target.lease + RIVAL
        while now() < end and not scene.sleep(0.1):
            if (tokens := holder_tokens(scene.cluster, target.key)) and target.token not in tokens:
                scene.last(0.1, 1.0)
                return

    def bury(self) -> None:
        """Record processes that ended although nobody asked them to, and replace them."""
        with self._mutex:
            for process, kind in list(self.running.items()):
                if (code := process.exitcode) is not None:
                    self.journal.write("hung", group=process.pid, text=f"{kind} ended with {code}: see workers.log")
                    self._kill(process)
                    del self.running[process]
                    self._add(kind)

    def finish(self) -> None:
        """Kill a third of the processes, and let the others end in order."""
        with self._mutex:
            processes = list(self.running)
            for process in processes[::3]:
                self._kill(process)
            rest = [process for process in processes if process.is_alive()]
            for process in rest:
                _signal(process, signal.SIGTERM)
            end = now() + FINISH
            for process in rest:
                process.join(max(0.0, end - now()))
                if process.is_alive():
                    _signal(process, signal.SIGUSR1)
                    time.sleep(0.5)
                    self.journal.write("hung", group=process.pid, text=f"{self.running[process]}: see workers.log")
                self._kill(process)
            self.running.clear()
            self.journal.write("over")

    def close(self) -> None:
        for process in self.running:
            _signal(process, signal.SIGKILL)
            process.join()


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal to a worker with all its children. A worker that is just starting has no group yet."""
    assert process.pid is not None
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)
            return


class Run:
    """One run of *seconds*, with the faults that have these *names*."""

    def __init__(self, folder: Path, *, seed: int, seconds: float, names: Sequence[str]) -> None:
        self.folder = folder
        self.seed = seed
        self.seconds = seconds
        no_clocks = clocks.missing()
        self.skipped = {name: no_clocks for name in names if name in SET_CLOCKS and no_clocks}
        self.names = [name for name in names if name not in self.skipped]
        self._stop = threading.Event()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._began = 0.0
        self._grants = 0
        self._read: Counter[Path] = Counter()

    def __call__(self) -> Outcome:
        """Make the run and check it. Raises ServerError if the servers, and not the lock, failed."""
        with Cluster(self.seed, clocks=bool(SET_CLOCKS & set(self.names))) as cluster:
            crew = Crew(self.folder, cluster.uri, self._habits(), random.Random(self.seed))
            crew.journal.write("run", seed=self.seed, names=self.names, timeout=TIMEOUT)
            watch = threading.Thread(target=self._watch, args=(cluster, crew), daemon=True)
            try:
                _make_collections(cluster)
                crew.start()
                watch.start()
                self._storm(cluster, crew)
                cluster.run_all()
                cluster.recover()
                self._wait_for_grant(10.0)
                crew.finish()
                self._take_all(cluster, crew)
            finally:
                self._over.set()
                crew.close()
                if watch.is_alive():
                    watch.join()
        return self._outcome()

    def _habits(self) -> list[str]:
        return [name for name in self.names if name in (*HABITS, "force-release", "clear-stale")]

    def _storm(self, cluster: Cluster, crew: Crew) -> None:
        """Let the faults happen."""
        if not self._wait_for_grant(60.0):
            raise ServerError("no worker got a lock in the beginning: see workers.log")
        self._began = now()
        threads = list(self._lanes(cluster, crew))
        for thread in threads:
            thread.start()
        end = self._began + self.seconds
        while now() < end and self._failure is None:
            time.sleep(0.1)
            crew.bury()
        self._stop.set()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _watch(self, cluster: Cluster, crew: Crew) -> None:
        """Record when the machine or its servers stood still, even without a fault."""
        while not self._over.wait(0.1):
            before = now()
            cluster.write()
            if now() - before > STALL:
                crew.journal.write("stall", before, u=now())

    def _lanes(self, cluster: Cluster, crew: Crew) -> Iterator[threading.Thread]:
        """Return a thread for each lane of faults. The lanes act at the same time."""
        actions = {"kill-worker": crew.kill, "stop-worker": crew.stop}
        lanes: dict[str, list[str]] = {}
        for name in self.names:
            if name in FAULTS or name in actions:
                lanes.setdefault(FAULTS[name].lane if name in FAULTS else name, []).append(name)
        for lane, names in lanes.items():
            sleep = self._stop.wait if lane in ("clients", *actions) else self._sleep_until_calm
            scene = Scene(cluster, random.Random(f"{self.seed} {lane}"), sleep)

            def trouble(lane: str = lane, names: list[str] = names, scene: Scene = scene) -> None:
                try:
                    while self._rest(scene.chance, lane):
                        (name,) = scene.chance.choices(names, [FAVOURED if name in AIMS else 1 for name in names])
                        if name in actions:
                            actions[name](scene)
                        elif self._inject(scene, crew, name):
                            cluster.recover()
                            self._wait_for_grant(30.0)
                except BaseException as error:  # noqa: BLE001 - it is raised where the lanes are waited for
                    self._failure = error

            yield threading.Thread(target=trouble)

    def _rest(self, chance: random.Random, lane: str) -> bool:
        """Wait for the time of the next fault, outside the calms. Return False if the run ends."""
        self._stop.wait(chance.uniform(*RESTS[lane]))
        if lane not in WORKER_FAULTS:
            while (now() - self._began) % STORM > STORM - CALM and not self._stop.wait(0.1):
                pass
        return not self._stop.is_set()

    def _sleep_until_calm(self, seconds: float) -> bool:
        """Sleep so long, though not far into the calm. A fault that lasts into it excuses only its own key.

        Return whether the run has ended.
        """
        left = STORM - CALM - (now() - self._began) % STORM
        return self._stop.wait(min(seconds, max(0.3, left)))

    def _inject(self, scene: Scene, crew: Crew, name: str) -> bool:
        fault, since = FAULTS[name], now()
        facts = {"name": name, "order": fault.order, "servers": fault.servers, "clocks": fault.clocks}
        try:
            more = fault.inject(scene) or {}
        except Skipped:
            return False
        crew.journal.write("fault", since, u=now(), linger=fault.linger, **facts, **more)
        return True

    def _wait_for_grant(self, seconds: float) -> bool:
        """Wait until a worker gets a lock from now on. Return whether one did in time."""
        self._count_grants()
        before, end = self._grants, now() + seconds
        while now() < end:
            self._count_grants()
            if self._grants > before:
                return True
            time.sleep(0.05)
        return False

    def _count_grants(self) -> None:
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            self._grants += whole.count(b'{"what":"got"')

    def _take_all(self, cluster: Cluster, crew: Crew) -> None:
        """Take every requested key by a new process, as soon as it is available."""
        asked = {key for record in read(self.folder) if record["what"] == "ask" for key in record["keys"]}
        site = Ours(cluster.uri)
        self._take(asked - set(DOCUMENTS), LONGEST + 7, site, crew)
        # A document is stale by the clock of the present primary. The clock has to be nearly right for that.
        for dial in cluster.dials:
            dial.set(0.0)
        self._take(asked & set(DOCUMENTS), STALE + SKEW + 7, site, crew)
        site.close()

    def _take(self, keys: set[str], seconds: float, site: Ours, crew: Crew) -> None:
        since = now()
        while keys and now() < since + seconds:
            for key in sorted(keys):
                lock = site.lock(Plan((key,), document=key in DOCUMENTS, wait=0.0), lambda: None, "last")
                with contextlib.suppress(*ERRORS):
                    if isinstance(lock, OurDocument):
                        site.documents.sweep()
                        at_once(lock.acquire(False))
                    else:
                        lock.acquire()
                    seen = {"seen": lock.seen} if isinstance(lock, OurDocument) else {}
                    crew.journal.write("free", key=key, since=since, **seen)
                    keys.discard(key)
                    if isinstance(lock, OurDocument):
                        at_once(lock.release(False))
                    else:
                        lock.release()
            time.sleep(0.05)

    def _outcome(self) -> Outcome:
        history = History(read(self.folder))
        outcome = Outcome(self.seed, self.seconds, self.names)
        outcome.injected = dict(Counter(fault["name"] for fault in history.faults))
        outcome.attempts, outcome.grants = len(history.attempts), len(history.grants)
        outcome.looks = sum(len(attempt.samples) for attempt in history.attempts.values())
        outcome.violations = [describe(history, violation) for violation in check(history)]
        outcome.opportunities = dict(opportunities(history))
        outcome.skipped = self.skipped
        return outcome


def _make_collections(cluster: Cluster) -> None:
    """Create the collections of `migrate` and the documents. The first election may still be under way."""
    with patience(RECOVERY, "the replica set takes no index") as still_time:
        while True:
            with contextlib.suppress(PyMongoError), cluster.client(20) as client:
                ensure_indexes(client[DATABASE][COLLECTION])
                make_documents(client[DATABASE])
                return
            still_time()


def describe(history: History, violation: Violation) -> dict[str, Any]:
    """Return a violation, with the faults of the ten seconds before it."""
    names = [fault["name"] for fault in history.faults if fault["t"] <= violation.at <= fault["u"] + 10]
    return {"rule": violation.rule, "at": violation.at, "text": violation.text, "faults": sorted(set(names))}
