"""What the state machine of locks moves in: processes, the network between them and the server, and who looks on."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.processes import Fate
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockBackendFailed, LockNotAcquired
from tests.engine.actors import Actor, TaskActor, ThreadActor
from tests.engine.watching import NEVER, Kind, Watch
from tests.support.failpoints import failpoint

Document = dict[str, Any]

#: How many threads and tasks ask in each process.
THREADS, TASKS = 2, 1
#: How many lines of what happened go into a report.
LINES = 120


class Violation(AssertionError):
    """A promise was seen broken."""


@dataclass(frozen=True)
class Plan:
    """What a run is like. Times are in seconds. weather: commands and answers are late or get lost, for a few
    commands or for a while. held_up: the server
    stops commands between the moment when it fixes their time and the write. leaks: every so many examples, see that
    all keys are free again."""

    processes: int = 3
    permits: tuple[int, ...] = (2, 3)
    leases: tuple[float, ...] = (0.4, 0.7, 1.5)
    margin: float = 0.1
    waiter_lease: float = 0.5
    waits: tuple[float, ...] = (0.0, 0.1, 0.5, 1.5, 3.0)
    delays: tuple[float, ...] = (0.02, 0.15, 0.6, 1.2)
    weather: bool = False
    held_up: bool = False
    leaks: int = 4


class Weather:
    """What becomes of the commands of one process: of the next few, in one of the ways of a bad network."""

    def __init__(self) -> None:
        self._next: list[tuple[str, float]] = []
        self._away_until = 0.0

    def cut_off(self, seconds: float) -> None:
        """Nothing gets through for so long."""
        self._away_until = clock.now() + seconds

    def turns(self, way: str, seconds: float, count: int) -> None:
        """The next *count* commands go this *way*."""
        self._next = [(way, seconds)] * count

    def carry(self, call: Callable[[], Any]) -> Any:
        """Make the call, or have it made."""
        if clock.now() < self._away_until:
            raise LockBackendFailed("no connection")
        try:
            way, seconds = self._next.pop()
        except IndexError:
            return call()
        if way == "held up":  # the sender hears nothing, and it arrives when nobody reckons with it any more
            threading.Timer(seconds, functools.partial(_quietly, call)).start()
            raise LockBackendFailed("the connection broke")
        if way == "late":
            time.sleep(seconds)
        result = call()
        if way == "answered late":
            time.sleep(seconds)
        if way == "no answer":
            raise LockBackendFailed("the answer was lost")
        return result


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(LockBackendFailed):
        call()


class Rough(MongoStore):
    """A store behind a network that has its weather."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self.weather = Weather()

    def apply(self, *arguments: Any) -> Any:
        return self.weather.carry(functools.partial(super().apply, *arguments))

    def take_free(self, *arguments: Any) -> Any:
        return self.weather.carry(functools.partial(super().take_free, *arguments))

    def release_all(self, *arguments: Any) -> Any:
        return self.weather.carry(functools.partial(super().release_all, *arguments))

    def release_uncontended(self, *arguments: Any) -> Any:
        return self.weather.carry(functools.partial(super().release_uncontended, *arguments))

    def read(self, *arguments: Any) -> Any:
        return self.weather.carry(functools.partial(super().read, *arguments))

    def renew(self, *arguments: Any) -> Any:
        return self.weather.carry(functools.partial(super().renew, *arguments))


class OneOfMany(Session):
    """A session that counts as a process of its own, and can be killed: nothing of it reaches the server then, while
    its lock objects stay, to be looked at."""

    killed: ClassVar[set[str]] = set()
    dies = False

    def name_process(self) -> str:
        """See Session.name_process()."""
        return self.id

    def fate(self, process: str) -> Fate:
        """See Session.fate()."""
        return "gone" if process in self.killed else "alive"

    def kill(self) -> None:
        """Cut it off for ever."""
        self.store.close()
        self.killed.add(self.id)


@dataclass
class Process:
    """A session, and who asks in it."""

    session: OneOfMany
    store: Rough
    actors: list[Actor]


class World:
    """What is the same for all examples of a run: the server, the processes, who looks on, and what was found.

    ends_at: after that nothing more is done.
    """

    def __init__(self, uri: str, database: str, collection: str, plan: Plan) -> None:
        self.plan = plan
        self.config = StoreConfig({"host": uri, "heartbeatFrequencyMS": 500}, database, collection)
        self.client = MongoClient[Document](uri, serverSelectionTimeoutMS=5_000)
        self.documents = self.client[database][collection]
        self.outside = MongoStore(self.config)
        self.watch = Watch()
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self.found: str | None = None
        self.ends_at = NEVER
        self.unexpected: list[str] = []
        self.began = clock.now()
        self._retired: list[OneOfMany] = []
        self._closed = False
        self._holding_up: threading.Thread | None = None
        self.processes = [self._process(number) for number in range(plan.processes)]
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def actors(self) -> list[tuple[Process, Actor]]:
        return [(process, actor) for process in self.processes for actor in process.actors]

    @property
    def over(self) -> bool:
        """Is nothing more to be done, because something was found, or the time is over?"""
        return self.found is not None or clock.now() > self.ends_at

    def tell(self, what: str) -> None:
        self.story.append(f"{clock.now() - self.began:9.3f} {what}")

    def fail(self, what: str) -> None:
        self.tell(f"!!! {what}")
        self.unexpected.append(what)

    def check(self) -> None:
        """If something is wrong, keep how it came to that."""
        if self.found is None and (wrong := self.watch.violations + self.unexpected):
            self.found = "\n".join([*wrong[:5], "", *self.story[-LINES:], "", *self._changes()])

    def kill(self, process: Process) -> None:
        """Kill it, and put another one in its place."""
        killed = process.session
        self._retired.append(killed)
        killed.dies = True
        for watched in list(self.watch.watched):
            # Whoever asks with the owner of a process that is gone gets the lock at once. Nobody sees its `held` then.
            if watched.grant.who.startswith(killed.id) and " for " in watched.grant.who:
                self.watch.cut(watched.grant)
        killed.kill()
        process.session, process.store = self._session()

    def hold_up(self, seconds: float, then: Weather | None) -> None:
        """Have the server stop updates before they write, for so long. then: who is cut off afterwards."""
        if self._holding_up is not None and self._holding_up.is_alive():
            return

        def run() -> None:
            with self._failing("hangDuringBatchUpdate"):
                time.sleep(seconds)
                if then is not None:
                    then.cut_off(2.0)

        self._holding_up = threading.Thread(target=run, daemon=True)
        self._holding_up.start()

    def calm(self) -> None:
        """Let all come to an end that was begun, and release what is held."""
        for process in self.processes:
            process.store.weather.turns("", 0, 0)
            process.store.weather.cut_off(0)
        while busy := [actor for _, actor in self.actors if actor.busy]:
            for actor in busy:
                actor.cancel()
            busy[0].wait(0.1)
        for watched in self.watch.open():
            self.watch.releases(watched)
            with contextlib.suppress(LockBackendFailed):
                assert watched.lock is not None
                watched.lock.release()
        if self._holding_up is not None:
            self._holding_up.join()

    def are_free(self, keys: list[str]) -> None:
        """P6: nothing is left of anybody but the leases of the dead."""
        for key in keys:
            lock = self.lock(self.processes[0], key, Kind("exclusive"), Options(Terms(lease=5.0, margin=0.1), 60.0))
            try:
                lock.acquire()
            except LockNotAcquired as error:
                self.fail(f"not free a minute after everybody left: {error}")
            lock.release()

    def forget(self) -> None:
        """Start anew."""
        for session in self._retired:
            session.close()
        self._retired.clear()
        self.watch.clear()
        self.story.clear()

    def close(self) -> None:
        self._closed = True
        self._sampler.join()
        self.calm()
        self.forget()
        for process in self.processes:
            for actor in process.actors:
                actor.close()
            process.session.close()
        self.outside.close()
        self.documents.drop()
        self.client.close()

    def lock(self, process: Process, key: str, kind: Kind, options: Options) -> MongoLock:
        session = process.session
        return MongoLock(lambda: session, (key,), options)

    @contextlib.contextmanager
    def _failing(self, point: str) -> Iterator[None]:
        with failpoint(self.client, point, {"nss": self.documents.full_name}):
            yield

    def _process(self, number: int) -> Process:
        actors: list[Actor] = [ThreadActor(f"process {number} thread {n}") for n in range(THREADS)]
        actors += [TaskActor(f"process {number} task {n}") for n in range(TASKS)]
        return Process(*self._session(), actors)

    def _session(self) -> tuple[OneOfMany, Rough]:
        store = Rough(self.config)
        return OneOfMany(store), store

    def _sample(self) -> None:
        while not self._closed:
            self.watch.look_at_all()
            time.sleep(0.003)

    def _changes(self) -> list[str]:
        """What became of the documents, as the oplog has it."""
        keys = {grant.key for watched in self.watch.watched for grant in [watched.grant]}
        where = {
            "ns": self.documents.full_name,
            "$or": [{"o2._id": {"$in": list(keys)}}, {"o._id": {"$in": list(keys)}}],
        }
        try:
            changes = list(self.client.local["oplog.rs"].find(where).sort("$natural", -1).limit(LINES))
        except PyMongoError as error:
            return [f"no oplog: {error}"]
        return [
            f"{change['wall']:%H:%M:%S.%f} {change['op']} {change.get('o2')} {change['o']}" for change in changes[::-1]
        ]


class Errors(logging.Handler):
    """What the engine logs as an error is one."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.fail(self.format(record))
