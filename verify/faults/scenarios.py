"""What could go wrong, made to happen on real servers: each scenario returns what was violated, [] if nothing was.

A scenario knows nothing of the defect that it is to find: it only looks at what users rely on. It is run twice, with
the library as it is and with a broken variant of it (`broken.VARIANTS`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import clock
from django_mongolock.engine.document import UNLIMITED, Terms, entry
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.per_process import Sessions
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.step import Step
from django_mongolock.exceptions import LockError
from django_mongolock.inspection.operations import force_release
from tests.engine.clusters import Cluster
from tests.engine.conftest import store_of
from tests.support import lock_documents
from tests.support.grants import grant_of, own
from tests.support.waiting import eventually
from verify.faults.relay import Relay, mentions

Document = dict[str, Any]

DATABASE: Final = "mongolock_faults"
#: A lock that outlives every scenario.
CALM: Final = Terms(lease=60, margin=1, waiter_lease=60)
#: A lock that outlives every scenario, but not a place in its queue.
PLACE: Final = Terms(lease=60, margin=0.1, waiter_lease=8)


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
    """F4, F5: somebody acquires the lock at a primary that cannot reach the others."""
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


def wall_clock_ahead(stage: Stage) -> list[str]:
    """F25: the wall clock of another client is an hour ahead."""
    one, two = stage.session(), stage.session()
    mine, other = stage.lock(one).acquire(), stage.lock(two)
    with mock.patch.object(time, "time", return_value=time.time() + 3_600):
        other.try_acquire()
    return two_holders(mine, other)


def slow_answer(stage: Stage) -> list[str]:
    """F16, F19: the answer that grants the lock takes nearly as long as the lease."""
    one, two = stage.session(relayed=True), stage.session()
    slow, other = stage.lock(one, Terms(lease=1.5, margin=0.1), auto_renew=False), stage.lock(two)
    with stage.relay.holding_replies(mentions(f"{one.id}/"), seconds=1.2), contextlib.suppress(LockError):
        slow.acquire()
    other.acquire()
    return two_holders(slow, other)


def news_at_the_last_moment(stage: Stage) -> list[str]:
    """F42: a waiter is told of its grant, cannot renew it, and so has only what was left of its place in the queue."""
    one, two, three = stage.session(), stage.session(appname="told"), stage.session()
    mine, told = stage.lock(one).acquire(), stage.lock(two, Terms(lease=20, margin=0.1, waiter_lease=4))
    other = stage.lock(three)
    with stage.failing("told", "update"):
        stage.queue(told)
        assert eventually(lambda: two.waits.listener.listening)
        mine.release()
        assert eventually(lambda: told.held or told.lost)
        other.acquire()
        return two_holders(told, other)


def granted_while_renewed(stage: Stage) -> list[str]:
    """F62: a waiter is granted the lock while the answer to its renewal is on its way; no other gets through."""
    one, two, three = stage.session(), stage.session(relayed=True, appname="told"), stage.session()
    mine, told = stage.lock(one).acquire(), stage.lock(two, PLACE)
    other = stage.lock(three)
    stage.queue(told)
    assert eventually(lambda: two.waits.listener.listening)
    (grant,) = two.registry.grants.values()
    with stage.relay.holding_replies(mentions("nModified")) as hold:
        assert hold.caught.wait(10)
        mine.release()
        assert eventually(lambda: told.held, 8)
        with stage.failing("told", "update"):
            hold.let_go()
            assert eventually(lambda: not grant.lease.renewing)
            with contextlib.suppress(LockError):
                other.acquire(wait=12)
            return two_holders(told, other)


def looked_at_its_place(stage: Stage) -> list[str]:
    """F62: a waiter that cannot renew its place looks at it, and is granted the lock when little is left of it."""
    one, two, three = stage.session(), stage.session(appname="told"), stage.session()
    mine, told = stage.lock(one, Terms(lease=1.5, margin=0.5)).acquire(), stage.lock(two, PLACE)
    other = stage.lock(three)
    with stage.failing("told", "update"):
        stage.queue(told)
        (grant,) = two.registry.grants.values()
        assert eventually(lambda: grant.lease.until > 0)
        ends = grant.lease.until
        assert eventually(lambda: two.waits.listener.listening)
        # Whoever is first in the queue looks when the holder's lease seems to end.
        time.sleep(max(0.0, ends - 2.5 - clock.now()))
        mine.release()
        assert eventually(lambda: told.held)
        with contextlib.suppress(LockError):
            other.acquire(wait=ends + 1 - clock.now())
        return two_holders(told, other)


def held_up_after_parsing(stage: Stage) -> list[str]:
    """F61: the renewal of somebody who waits has been parsed, and is held up for longer than a lease before it comes to
    the document; the holder renews meanwhile, and then is cut off; then somebody else tries for the lock."""
    one, two, three = stage.session(appname="renews"), stage.session(), stage.session()
    mine, other = stage.lock(one, Terms(lease=4, margin=0.2)).acquire(), stage.lock(three)
    waiting = store_of(two)
    for key in ("a", "k"):
        waiting.apply(key, Step(ask="w", add=entry("w", "dead", PLACE, {})), 5)
    late = Step(renew=("w",), beat=1)
    with stage.client.start_session() as session, session.start_transaction():
        # Whoever writes to the first of the two documents has to wait for this transaction.
        stage.collection.update_one({"_id": "a"}, {"$inc": {"fence": 1}}, session=session)
        renewing = stage.in_thread(lambda: waiting.renew(["a", "k"], late, 30))
        time.sleep(5)
        mine.extend()
        session.abort_transaction()
    # Cut off from reading, too: who reads that its lock has gone believes in it no more.
    with stage.failing("renews", "update", "findAndModify", "find", "aggregate"):
        renewing.join(20)
        waiting.apply("k", Step(ask="w", remove=("w",), force=True), 5)
        other.try_acquire()
        return two_holders(mine, other)


def lease_over(stage: Stage) -> list[str]:
    """F28: nobody renews the lock, and another one takes it when its lease has ended."""
    one, two = stage.session(), stage.session()
    mine, other = stage.lock(one, Terms(lease=0.5, margin=0.1), auto_renew=False).acquire(), stage.lock(two)
    other.acquire()
    return two_holders(mine, other)


def clock_set_back(stage: Stage) -> list[str]:
    """F23: a holder has died, and the clock of the running primary is set back by two minutes."""
    stage.cluster.dial.set(120)
    stage.cluster.lead(1)
    one, two = stage.session(), stage.session()
    stage.lock(one, Terms(lease=1, margin=0.2)).acquire()
    die(one)
    stage.cluster.dial.set(0)
    assert eventually(lambda: abs(stage.cluster.now(1)) < 5)
    with contextlib.suppress(LockError):
        stage.lock(two).acquire(wait=5)
        return []
    return ["P6: the lock of a dead holder is not free after four leases"]


def failover_to_a_clock_ahead(stage: Stage) -> list[str]:
    """F21: a holder has most of its lease left when a member becomes primary whose clock is 30 s ahead."""
    stage.cluster.dial.set(30)
    one, two = stage.session(), stage.session()
    mine, other = stage.lock(one, Terms(lease=15, margin=0.3), auto_renew=False).acquire(), stage.lock(two)
    stage.cluster.lead(1)
    with contextlib.suppress(LockError):
        other.acquire(wait=1)
    return two_holders(mine, other)


def die(session: Session) -> None:
    """Forget what is held, as a process does that is killed."""
    session.registry.grants.clear()


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


def lock_taken_away(stage: Stage) -> list[str]:
    """F50: the lock is taken from its holder by force and goes to who waits for it; a beat later both know."""
    terms = Terms(lease=2, margin=0.2, waiter_lease=2)
    one, two = stage.session(), stage.session()
    mine, other = stage.lock(one, terms).acquire(), stage.lock(two)
    stage.queue(other)
    force_release(store_of(two), "k", [grant.id for grant in own(mine).grants])
    assert eventually(lambda: other.held)
    if eventually(lambda: not mine.held, 2 * terms.lease):
        return []
    return ["P7: two leases after its loss its holder believes in the lock", *two_holders(mine, other)]


def child_exits(stage: Stage) -> list[str]:
    """F30: a process that holds the lock forks, and the child exits as an interpreter does."""
    sessions = Sessions(lambda: Session(MongoStore(stage.config())))
    session = sessions.current()
    lock = stage.lock(session).acquire()
    freed = False
    for _ in range(3):  # a child that is broken has two seconds to send its release, which a busy machine may need
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            with contextlib.suppress(BaseException):
                Sessions.close_all()
            os._exit(0)
        os.waitpid(pid, 0)
        # A moment later: what the primary has of a release, a majority read need not show at once.
        freed = freed or eventually(lambda: stage.grants() != {grant.id for grant in own(lock).grants}, 1)
    sessions.close()
    return [] if not freed else ["P1: the exit of a forked child has freed the lock of its parent"]


# Unknown outcomes


def late_command(stage: Stage) -> list[str]:
    """F17: a command is held up in the network, given up, removed, and arrives after all."""
    session = stage.session(relayed=True)
    with stage.relay.holding_requests(mentions(f"{session.id}/")) as hold:
        cancel_when(stage.lock(session), hold.caught)
        assert eventually(lambda: not session.cleanup.pending)
        before = stage.document()["changes"]
        hold.let_go()
        assert eventually(lambda: stage.document()["changes"] > before)
    return orphans(stage)


def late_command_of_a_lost_lock(stage: Stage) -> list[str]:
    """F17, F50: a command is held up, sent again and granted; then the lock is taken away, and its holder is told;
    then the first command arrives."""
    session, admin = stage.session(relayed=True, timeout=0.5), stage.session()
    with stage.relay.holding_requests(mentions(f"{session.id}/")) as hold:
        lock = stage.lock(session, Terms(lease=60, margin=1, waiter_lease=0.9)).acquire()
        assert hold.caught.is_set()
        grant = grant_of(lock)
        force_release(store_of(admin), "k", [grant.id])
        grant.lease.renew_at = clock.now()  # its next beat, which may be 20 s away
        session.heartbeat.see_to(grant.lease.renew_at)
        assert eventually(lambda: lock.lost)
        assert eventually(lambda: not session.cleanup.pending and grant.id not in session.registry.grants)
        before = stage.document()["changes"]
        hold.let_go()
        assert eventually(lambda: stage.document()["changes"] > before)
    return orphans(stage)


def cancelled_after_the_grant(stage: Stage) -> list[str]:
    """F15, F36: a task is cancelled when the server has granted the lock and before the answer is there."""
    session = stage.session(relayed=True)
    with stage.relay.holding_replies(mentions(f"{session.id}/")) as hold:
        cancel_when(stage.lock(session), hold.caught)
        eventually(lambda: not orphans(stage), 3)
    return orphans(stage)


def cancel_when(lock: MongoLock, moment: threading.Event) -> None:
    """Acquire the lock in a task, and cancel the task when that *moment* has come."""

    async def run() -> None:
        task = asyncio.ensure_future(lock.aacquire())
        assert await asyncio.to_thread(moment.wait, 10)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def orphans(stage: Stage) -> list[str]:
    document = stage.document()
    left = len(document["holders"]) + len(document["waiters"])
    return [f"P6: {left} entry of nobody's, for a lease of a minute"] if left else []


# Queue and document


def dead_waiter(stage: Stage) -> list[str]:
    """F41: a writer dies while it waits among readers; a reader comes when the writer's place is over."""
    one, two = stage.session(), stage.session()
    reading = Terms("shared", UNLIMITED, lease=60, margin=1, waiter_lease=60)
    stage.lock(one, reading).acquire()
    place = Terms(waiter_lease=0.3, margin=0.1)
    one.store.apply("k", Step(ask="dead", add=entry("dead", "dead", place, {})), 5)
    if eventually(stage.lock(two, reading).try_acquire, 2):
        return []
    return ["P5: a dead waiter keeps out who could go in, long after its place in the queue was over"]


def order_of_arrival(stage: Stage) -> list[str]:
    """Two processes wait for a lock, one after the other."""
    mine = stage.lock(stage.session()).acquire()
    first, second = stage.lock(stage.session()), stage.lock(stage.session())
    stage.queue(first)
    stage.queue(second)
    mine.release()
    assert eventually(lambda: first.held or second.held)
    return ["P5: who came later was served first"] if second.held else []


def line_and_queue(stage: Stage) -> list[str]:
    """F69: one process holds the lock, and another of its threads waits; then a second process comes."""
    one, two = stage.session(), stage.session()
    mine, first, second = stage.lock(one).acquire(), stage.lock(one), stage.lock(two)
    stage.in_thread(first.acquire)
    assert eventually(lambda: len(one.queue.waiting) == 1)
    time.sleep(0.2)
    stage.queue(second)
    mine.release()
    assert eventually(lambda: first.held or second.held)
    return ["P5: who came later was served first"] if second.held else []


def renewed_after_the_release(stage: Stage) -> list[str]:
    """F64: a renewal arrives when the lock was given back, and is only kept for its minimum hold."""
    session = stage.session()
    lock = stage.lock(session, Terms(lease=60, margin=1, min_hold=30)).acquire()
    grant = grant_of(lock)
    lock.release()
    store_of(session).renew(["k"], Step(renew=(grant.id,), beat=99), 5)
    (kept,) = stage.document()["holders"]
    held = kept["until"] - kept["acquired_at"]
    return [f"F64: kept for {held} instead of 30 s"] if held.total_seconds() != 30 else []


def purged_document(stage: Stage) -> list[str]:
    """F10: the TTL monitor removes the document of a lock that nobody uses."""
    session = stage.session()
    tokens = []
    for _ in range(2):
        with stage.lock(session) as lock:
            tokens.append(lock.fencing_token)
        stage.collection.delete_one({"_id": "k"})
    return [] if tokens[0] < tokens[1] else ["P2: the later grant has no larger fencing token"]


def damaged_document(stage: Stage) -> list[str]:
    """F55: somebody holds the lock, and a program that is not ours has written something else than a date into its
    end, or a text where the holders stand."""
    session = stage.session()
    violations = []
    election = lock_documents.clock(stage.client)
    ends: list[Any] = ["2999-01-01", True, Int64(32_503_680_000_000), [], None]
    damage: list[Document] = [{"holders": [lock_documents.entry(until=end)]} for end in ends]
    for change in (*damage, {"holders": "somebody"}):
        stage.collection.replace_one(
            {"_id": "k"}, lock_documents.document("k", change={"clock": election, **change}), upsert=True
        )
        before, lock = stage.document(), stage.lock(session, wait=0)
        with contextlib.suppress(LockError):
            lock.acquire()
        if lock.held or stage.document() != before:
            violations.append(f"F55: a document with {change} was used")
    return violations


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        held_without_the_majority,
        handed_over_without_the_majority,
        looked_before_the_majority,
        renewed_by_nobody,
        wall_clock_ahead,
        slow_answer,
        news_at_the_last_moment,
        granted_while_renewed,
        looked_at_its_place,
        held_up_after_parsing,
        lease_over,
        late_release,
        lock_taken_away,
        child_exits,
        late_command,
        late_command_of_a_lost_lock,
        cancelled_after_the_grant,
        dead_waiter,
        order_of_arrival,
        line_and_queue,
        renewed_after_the_release,
        purged_document,
        damaged_document,
        # These change the primary.
        clock_set_back,
        failover_to_a_clock_ahead,
    )
}
#: Those that set the clock of a member.
WITH_CLOCKS: Final = {"clock_set_back", "failover_to_a_clock_ahead"}
