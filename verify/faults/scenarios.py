"""What could go wrong, made to happen on real servers: each scenario returns what was violated, [] if nothing was.

A scenario knows nothing of the defect that it is to find: it only looks at what users rely on. It is run twice, with
the library as it is and with a broken variant of it (`broken.PATCHES`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError
from tests.engine.clusters import Cluster
from tests.engine.conftest import store_of
from tests.support.grants import own
from tests.support.waiting import eventually
from verify.faults.relay import Relay, mentions

Document = dict[str, Any]

DATABASE: Final = "mongolock_faults"
#: A lock that outlives every scenario.
CALM: Final = Terms(lease=60, margin=1, waiter_lease=60)


class Stage:
    """Three members, the first of them primary; a collection, sessions (each as of a process of its own) and locks."""

    def __init__(self, cluster: Cluster, relay: Relay) -> None:
        self.cluster = cluster
        self.relay = relay
        self.client: MongoClient[Document] = MongoClient(cluster.replica_set.uri, tz_aware=True, timeoutMS=20_000)
        # Made now: a majority read of a collection that the majority does not have would wait for it.
        self.collection: Collection[Document] = self.client[DATABASE].create_collection(f"locks_{uuid.uuid4().hex}")
        self._sessions: list[Session] = []
        self._threads: list[threading.Thread] = []
        self._locks: list[MongoLock] = []
        self._over: list[threading.Event] = []

    def config(self, *, relayed: bool = False, appname: str = "scenario") -> StoreConfig:
        host = self.relay.uri if relayed else self.cluster.replica_set.uri
        client = {"host": host, "heartbeatFrequencyMS": 500, "appname": appname}
        return StoreConfig(client, DATABASE, self.collection.name)

    def session(self, *, relayed: bool = False, timeout: float = 5.0, appname: str = "scenario") -> Session:
        """A process of its own, which has been talking to the server before."""
        session = Session(MongoStore(self.config(relayed=relayed, appname=appname)), timeout)
        self._sessions.append(session)
        store_of(session).collection.find_one()
        return session

    def lock(
        self, session: Session, terms: Terms = CALM, *, wait: float | None = 10, auto_renew: bool = True
    ) -> MongoLock:
        lock = MongoLock(lambda: session, ("k",), Options(terms, wait, auto_renew=auto_renew))
        self._locks.append(lock)
        return lock

    def in_thread(self, call: Callable[[], object]) -> threading.Thread:
        """Start a thread, whose complaints do not matter."""

        def run() -> None:
            with contextlib.suppress(LockError):
                call()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def queue(self, lock: MongoLock) -> None:
        """Have somebody wait for *lock*, who keeps it to the end; return when it stands in the document."""
        before, over = len(self.document()["waiters"]), threading.Event()
        self._over.append(over)

        def wait() -> None:
            with lock:
                over.wait(60)

        self.in_thread(wait)
        assert eventually(lambda: len(self.document()["waiters"]) > before)

    def document(self) -> Document:
        """The document as the primary has it."""
        found = self.collection.find_one({"_id": "k"})
        return found or {"holders": [], "waiters": [], "changes": 0}

    def grants(self) -> set[str]:
        """Who holds the key, by what the majority has."""
        found = self.collection.with_options(read_concern=ReadConcern("majority")).find_one({"_id": "k"})
        return {holder["grant"] for holder in (found or {"holders": []})["holders"]}

    @contextlib.contextmanager
    def no_majority(self) -> Iterator[None]:
        """Nothing reaches the other two members, as if the primary were cut off and had not noticed yet."""
        others = self.cluster.replica_set.members[1:]
        try:
            for member in others:
                _failpoint(member.uri, "rsSyncApplyStop", "alwaysOn")
            yield
        finally:
            for member in others:
                _failpoint(member.uri, "rsSyncApplyStop", "off")

    def failing(self, appname: str, *commands: str) -> contextlib.AbstractContextManager[None]:
        """The primary refuses *commands* to the clients of this name."""
        return _failing(self.cluster.replica_set.members[0].uri, commands, appname)

    def close(self) -> None:
        for over in self._over:
            over.set()
        for thread in self._threads:
            thread.join(15)
        for lock in self._locks:
            with contextlib.suppress(LockError):
                lock.release()
        for session in self._sessions:
            session.close()
        self.collection.drop()
        self.client.close()


def _failpoint(uri: str, name: str, mode: str, **data: Any) -> None:
    with MongoClient[Document](uri, timeoutMS=5_000) as client:
        client.admin.command({"configureFailPoint": name, "mode": mode, **({"data": data} if data else {})})


@contextlib.contextmanager
def _failing(uri: str, commands: Sequence[str], appname: str) -> Iterator[None]:
    _failpoint(uri, "failCommand", "alwaysOn", failCommands=list(commands), appName=appname, errorCode=13)
    try:
        yield
    finally:
        _failpoint(uri, "failCommand", "off")


Scenario = Callable[[Stage], list[str]]


def two_holders(*locks: MongoLock) -> list[str]:
    """Do more than one of these exclusive locks believe at this moment that they are held?"""
    return ["P1: two holders at the same time"] if sum(lock.held for lock in locks) > 1 else []


def too_early(stage: Stage, lock: MongoLock) -> list[str]:
    """Does it believe in a grant that the majority does not have?"""
    if lock.held and not stage.grants() & {grant.id for grant in own(lock).grants}:
        return ["P3: it is held, and the majority does not have the grant"]
    return []


# Majority


def held_without_the_majority(stage: Stage) -> list[str]:
    """F4, F5: a client acquires the lock at a primary that cannot reach the others."""
    lock = stage.lock(stage.session(timeout=0.7), wait=0)
    with stage.no_majority():
        with contextlib.suppress(LockError):
            lock.acquire()
        return too_early(stage, lock)


def handed_over_without_the_majority(stage: Stage) -> list[str]:
    """F5: the same, by hand-over from one thread to another."""
    session = stage.session(timeout=0.7)
    mine, next_one = stage.lock(session).acquire(), stage.lock(session, wait=2)
    stage.in_thread(next_one.acquire)
    assert eventually(lambda: len(session.queue.waiting) == 1)
    with stage.no_majority():
        mine.release()
        return too_early(stage, next_one) if eventually(lambda: next_one.held, 0.5) else []


def looked_before_the_majority(stage: Stage) -> list[str]:
    """F5, F7: nobody may listen, so a waiter looks; the release that lets it in is at the primary only."""
    one, two = stage.session(), stage.session(timeout=0.7, appname="looker")
    mine, waiting = stage.lock(one).acquire(), stage.lock(two, wait=5)
    with stage.failing("looker", "create", "convertToCapped"):
        stage.queue(waiting)
        with stage.no_majority():
            mine.release()
            assert eventually(lambda: len(stage.document()["waiters"]) == 0)
            return too_early(stage, waiting) if eventually(lambda: waiting.held, 2.2) else []


def renewed_by_nobody(stage: Stage) -> list[str]:
    """F6: a lease goes by while the primary cannot reach the others, who may have elected somebody else."""
    terms = Terms(lease=1.5, margin=0.1, waiter_lease=1.5)
    lock = stage.lock(stage.session(), terms).acquire()
    with stage.no_majority():
        ends = clock.now() + terms.lease + 0.1
        time.sleep(terms.lease + 0.2)
        return ["P1: held after its lease, on the word of a primary alone"] if lock.held and clock.now() > ends else []


# Time


def failover_to_a_clock_ahead(stage: Stage) -> list[str]:
    """F21: a holder has most of its lease left when a member becomes primary whose clock is 30 s ahead."""
    stage.cluster.dial.set(30)
    one, two = stage.session(), stage.session()
    mine, other = stage.lock(one, Terms(lease=15, margin=0.3), auto_renew=False).acquire(), stage.lock(two)
    stage.cluster.lead(1)
    with contextlib.suppress(LockError):
        other.acquire(wait=1)
    return two_holders(mine, other)


# One grant and another


def late_release(stage: Stage) -> list[str]:
    """F38: a release is held up on its way until somebody else holds the lock."""
    one, two, three = stage.session(relayed=True), stage.session(), stage.session()
    mine = stage.lock(one, Terms(lease=0.8, margin=0.1), auto_renew=False).acquire()
    with stage.relay.holding_requests(mentions("update", stage.collection.name)) as hold:
        releasing = stage.in_thread(mine.release)
        assert hold.caught.wait(5)
        next_one = stage.lock(two).acquire()
        hold.let_go()
        releasing.join(5)
    third = stage.lock(three)
    third.try_acquire()
    return two_holders(next_one, third)


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        held_without_the_majority,
        handed_over_without_the_majority,
        looked_before_the_majority,
        renewed_by_nobody,
        late_release,
        failover_to_a_clock_ahead,  # changes the primary
    )
}
#: Those that set the clock of a member.
WITH_CLOCKS: Final = {"failover_to_a_clock_ahead"}
