"""Servers die, hang, step down, are cut off, and come back, while locks are taken, on real members."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Self

import pytest
from pymongo import ReadPreference
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Step, Terms
from django_mongolock.engine.rule.document import entry as new_entry
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockBackendFailed, LockError, LockLost, LockNotAcquired
from testproject.servers import Mongod, ReplicaSet
from tests.engine.conftest import Document, make_lock, store_of
from tests.engine.waiters import InThread, Waiter
from tests.support import DATABASE
from tests.support.grants import grant_of
from tests.support.proxies import proxied
from tests.support.waiting import eventually
from verify.faults.proxy import Rule

#: Up to three runs, because a member without processor time for seconds looks like a failed one.
pytestmark = [pytest.mark.long, pytest.mark.timeout(240), pytest.mark.flaky(reruns=2)]

CALM = Terms(lease=60, margin=0.5, waiter_lease=8)


@pytest.fixture(scope="module")
def members() -> Iterator[ReplicaSet]:
    """Three members that elect another primary after four seconds."""
    with ReplicaSet(members=3, election_timeout=4, parameters={"enableTestCommands": 1}) as replica_set:
        yield replica_set


@pytest.fixture
def cluster(members: ReplicaSet) -> Iterator[ReplicaSet]:
    """Return the three members. They are well before the test, and are repaired after it."""
    assert eventually(lambda: len(members.primaries() + members.secondaries()) == 3, 60)
    yield members
    for member in members.members:
        if not member.running:
            member.restart()
        elif member.paused:
            member.resume()
    members.primary()


def locks_of(session: Session) -> Collection[Document]:
    """Return the collection of the session's locks."""
    return store_of(session).collection


Sessions = Callable[..., Session]


@pytest.fixture
def sessions(members: ReplicaSet, session_at: Sessions) -> Sessions:
    """Return a function that makes sessions at the set, or at *uri*."""
    return lambda uri=members.uri, **options: session_at(uri, **options)


def lock(session: Session, key: str = "k", terms: Terms = CALM, wait: float | None = 0) -> MongoLock:
    return make_lock(session, key, terms=terms, wait=wait)


def left(session: Session) -> int:
    """Return the number of holders and waiters, or -1 if the server does not answer."""
    with contextlib.suppress(PyMongoError):
        return sum(len(found["holders"]) + len(found["waiters"]) for found in locks_of(session).find())
    return -1


class Traffic:
    """Threads of two sessions that contend for three keys, their beliefs, and the durations of their calls."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = [sessions(), sessions()]
        self.held: dict[str, list[tuple[int, float, float]]] = {f"k{number}": [] for number in range(3)}
        self.strange: list[BaseException] = []
        self.longest = 0.0
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(6)]
        for thread in self._threads:
            thread.start()
        assert eventually(lambda: all(self.held.values()), 20)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        key, session = f"k{number % 3}", self.sessions[number % 2]
        while not self._ends.is_set():
            mine, called = lock(session, key, wait=3), clock.now()
            try:
                mine.acquire()
                self.longest = max(self.longest, clock.now() - called)
                entered = clock.now()
                time.sleep(0.002)
                if mine.held:
                    self.held[key].append((mine.fencing_token, entered, clock.now()))
                mine.release()
            except (LockBackendFailed, LockNotAcquired, LockLost):
                self.longest = max(self.longest, clock.now() - called)
            except BaseException as error:  # noqa: BLE001 - told by the test
                self.strange.append(error)

    def goes_on(self, since: float) -> bool:
        """Return whether each key has been taken since then."""
        return all(any(entered > since for _, entered, _ in list(turns)) for turns in self.held.values())

    def check(self) -> None:
        """One holder at a time, tokens that grow, and no error that is not the library's."""
        assert self.strange == []
        for turns in self.held.values():
            by_time = sorted(turns, key=lambda turn: turn[1])
            assert all(before[2] <= after[1] for before, after in pairwise(by_time))
            assert all(before[0] < after[0] for before, after in pairwise(by_time))


def kill(cluster: ReplicaSet, primary: Mongod) -> None:
    primary.kill()


def stop(cluster: ReplicaSet, primary: Mongod) -> None:
    primary.pause()


def step_down(cluster: ReplicaSet, primary: Mongod) -> None:
    with primary.client() as client, contextlib.suppress(PyMongoError):
        client.admin.command("replSetStepDown", 10, secondaryCatchUpPeriodSecs=5)


@pytest.mark.parametrize("go_away", [kill, stop, step_down])
def test_a_primary_that_goes_away_under_load(
    cluster: ReplicaSet, sessions: Sessions, go_away: Callable[[ReplicaSet, Mongod], None]
) -> None:
    """F1, F2, F3, F18: A primary is killed, steps down, or is stopped with silent open connections. No grant is lost or
    given twice. A held lock stays held, and is renewed under the next primary. Every call ends within its own bounds,
    work goes on, and nothing is left."""
    keeper = sessions()
    with lock(keeper, "kept", Terms(lease=24, margin=0.5)) as kept, Traffic(sessions) as traffic:
        token, gone = kept.fencing_token, clock.now()
        go_away(cluster, cluster.primary())
        assert eventually(lambda: traffic.goes_on(gone + 1), 60)
        assert eventually(lambda: clock.now() + kept.remaining > gone + 24.5, 30)
        assert kept.held
        assert kept.fencing_token == token
        stored = locks_of(keeper).find_one({"_id": "kept"})
        assert stored is not None
        assert [holder["token"] for holder in stored["holders"]] == [token]
    traffic.check()
    assert traffic.longest < 3 + 2 * 5 + 5  # its wait, and a command and its repetition, on a busy machine
    assert eventually(lambda: left(keeper) == 0, 60)


def test_a_primary_that_hangs_ends_every_call_in_time(sessions: Sessions) -> None:
    """F3, F18: Without another member, an RST or an answer, acquiring, trying, releasing and closing end by
    themselves."""
    with ReplicaSet() as alone:
        session = sessions(alone.uri, timeout=1.0)
        with contextlib.suppress(LockLost), lock(session, "held", Terms(lease=4, margin=0.2)) as held:
            alone.members[0].pause()
            started = clock.now()
            with pytest.raises(LockBackendFailed, match=r"did not answer|no primary here"):
                lock(session).acquire()
            assert clock.now() - started < 6
            assert eventually(lambda: held.in_danger or held.lost, 10)
            assert eventually(lambda: held.lost, 10)
        started = clock.now()
        session.close()
        assert clock.now() - started < 10
        alone.members[0].resume()


def test_without_the_majority_nothing_is_granted(cluster: ReplicaSet, sessions: Sessions) -> None:
    """F4: Both secondaries hang. A grant that only the primary has applied is reported to no caller, and is rolled back
    when the secondaries return."""
    session = sessions(timeout=1.5)
    with lock(session, "warm"):
        pass
    others = cluster.secondaries()
    for other in others:
        other.pause()
    started, mine = clock.now(), lock(session)
    with pytest.raises(LockBackendFailed):
        mine.acquire()
    assert not mine.held
    assert clock.now() - started < 10
    for other in others:
        other.resume()
    assert eventually(lambda: not session.background.pending, 60)
    assert left(session) == 0
    assert lock(session, wait=30).acquire().release()


def test_a_primary_that_was_left_behind_grants_nothing(cluster: ReplicaSet, sessions: Sessions) -> None:
    """F5, F6: A primary was stopped, and another was elected. When the old primary goes on, it still believes that it
    is the primary, and answers delayed commands. No session takes these answers for a lock or for a renewal."""
    old = cluster.primary()
    session, before = sessions(), sessions(old.uri, timeout=20)
    asking = [sessions(old.uri, timeout=20) for _ in range(6)]  # each with a connection that is there already
    for one in asking:
        one.store.read("k", "g", 5)
    with contextlib.suppress(LockLost), lock(before, "old", Terms(lease=3, margin=0.2)) as lost_one:
        old.pause()
        assert eventually(lambda: any(member is not old for member in cluster.primaries()), 60)
        with lock(session, wait=30, terms=CALM) as mine:
            held: list[bool] = []

            def ask(number: int) -> None:
                step = Step(ask=f"g{number}", add=new_entry(f"g{number}", "s", CALM, {}), trial=True)
                with contextlib.suppress(LockError):
                    held.append(asking[number].store.apply("k" if number % 2 else f"new{number}", step, 20).held)

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            time.sleep(4)  # longer than the lease of the lock that it had granted
            old.resume()
            for thread in threads:
                thread.join()
            assert not any(held)
            assert mine.held
            assert not lost_one.held


def hear(member: Mongod, mode: str) -> None:
    """Set whether a secondary fetches the primary's writes ("off") or not ("alwaysOn"). A stopped process would still
    have the writes in its sockets."""
    with member.client() as client:
        client.admin.command("configureFailPoint", "stopReplProducer", mode=mode)


def tokens_at(member: Mongod, session: Session) -> list[int]:
    """Return the tokens of all holders, as this member has them."""
    name, anywhere = locks_of(session).name, ReadPreference.SECONDARY_PREFERRED
    with member.client() as client:
        found = list(client[DATABASE].get_collection(name, read_preference=anywhere).find())
    return sorted(holder["token"] for document in found for holder in document["holders"])


@contextlib.contextmanager
def a_release_undone(cluster: ReplicaSet, session: Session, *locks: MongoLock) -> Iterator[None]:
    """Release *locks* in the block, on the primary only, and kill the primary."""
    primary, others = cluster.primary(), cluster.secondaries()
    tokens = sorted(mine.fencing_token for mine in locks)
    assert eventually(lambda: all(tokens_at(other, session) == tokens for other in others))
    for other in others:
        hear(other, "alwaysOn")
    yield
    assert tokens_at(primary, session) == []
    primary.kill()
    for other in others:
        assert tokens_at(other, session) == tokens
        hear(other, "off")
    cluster.primary()


def test_a_release_that_is_rolled_back_is_made_again(cluster: ReplicaSet, sessions: Sessions) -> None:
    """F7: On the next primary, released locks are held again for a lease. The session that released them releases them
    again, even if it has no other work."""
    session = sessions(timeout=1.5)
    alone, shared = lock(session, "alone").acquire(), lock(session, "shared").acquire()
    grant_of(shared).lease.uncontended = False  # as if a waiter had come, so that the other form of release is sent
    with a_release_undone(cluster, session, alone, shared):
        assert alone.release()
        assert shared.release()
    later, started = sessions(), clock.now()
    for key in ("alone", "shared"):
        with lock(later, key, wait=20) as next_one:
            assert next_one.fencing_token > 0
    assert clock.now() - started < CALM.lease / 2
    assert eventually(lambda: left(later) == 0)


def test_all_members_are_away_for_a_while(sessions: Sessions, in_thread: InThread) -> None:
    """F9: A waiter goes on waiting and gets its lock when the members are back. A waiter with a timeout gets a clear
    error. The holder is in danger, and then keeps the lock or learns of its loss. No restart is needed."""
    with ReplicaSet() as alone:
        one, two = sessions(alone.uri, timeout=1.0), sessions(alone.uri, timeout=1.0)
        holder = lock(one, terms=Terms(lease=12, margin=0.3)).acquire()
        waiter = Waiter(in_thread, lock(two, terms=CALM, wait=60))
        assert eventually(lambda: left(one) == 2)
        alone.members[0].kill()
        assert eventually(lambda: holder.in_danger or holder.lost, 20)
        with pytest.raises(LockBackendFailed, match=r"did not answer|no primary here"):
            lock(two, "other", wait=1).acquire()
        assert not waiter.done
        alone.members[0].restart()
        if holder.held:
            assert eventually(lambda: not holder.in_danger, 20)
            holder.release()
        assert waiter.end(60).has_it
        waiter.let_go()
        assert eventually(lambda: left(one) == 0, 20)


def test_racing_for_an_unused_key(new_session: Callable[..., Session]) -> None:
    """F12: Eight sessions try to make the same documents at the same moment. One session gets each lock, and no session
    sees a duplicate key error."""
    made, rounds = [new_session() for _ in range(8)], 40
    start = threading.Barrier(len(made), timeout=30)
    won: list[str] = []

    def race(session: Session) -> None:
        for number in range(rounds):
            start.wait()
            mine = make_lock(session, f"new{number}", terms=CALM, wait=0)
            if mine.try_acquire():
                won.append(mine.key)
            start.wait()
            mine.release()

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(race, made))
    assert sorted(won) == sorted(f"new{number}" for number in range(rounds))


def test_half_a_second_each_way(sessions: Sessions) -> None:
    """F19: Renewals that take a second each keep a lock alive over several leases. The holder never believes in more
    time than the server gives."""
    with ReplicaSet() as alone, proxied(alone.members[0].port, Rule(delay=0.5)) as (uri, _):
        session, near = sessions(uri, timeout=8.0), sessions(alone.uri)
        locks_of(near).database.client.admin.command("ping")
        with lock(session, terms=Terms(lease=12, margin=0.5), wait=30) as mine:
            end = clock.now() + 14
            while clock.now() < end:
                assert mine.held
                believes, asked = mine.remaining, clock.now()
                found = locks_of(near).find_one({"_id": "k"}, {"holders.until": 1, "now": "$$NOW"})
                assert found is not None
                gives = (found["holders"][0]["until"] - found["now"]).total_seconds()
                assert believes <= gives + (clock.now() - asked) + 0.05
                time.sleep(0.5)
            assert not lock(near).try_acquire()
        assert eventually(lambda: lock(near).try_acquire(), 10)
