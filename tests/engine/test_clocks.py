"""Clocks: of primaries that do not agree, that are set back, and of clients. Real members."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.engine.election import ClockEncoder
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from tests import parts
from tests.engine.clusters import Cluster, cluster_with_a_dial
from tests.engine.conftest import Document, store_of
from tests.engine.processes import processes
from tests.support import DATABASE
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, parts.needs("a C compiler")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A replica set of three, whose second member has a clock of its own."""
    with cluster_with_a_dial() as cluster:
        yield cluster


Sessions = Callable[[], Session]


@pytest.fixture
def sessions(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Sessions]:
    """Makes sessions at the replica set, over a collection of this test."""
    made: list[Session] = []
    name = f"clocks_{request.node.name[:40]}".replace("[", "_").replace("]", "").replace(" ", "_")
    config = StoreConfig({"host": cluster.replica_set.uri, "heartbeatFrequencyMS": 500}, DATABASE, name)

    def new() -> Session:
        made.append(Session(MongoStore(config)))
        return made[-1]

    yield new
    for session in made:
        session.close()


def lock(session: Session, lease: float, *, wait: float | None = 0, renew: bool = False) -> MongoLock:
    terms = Terms(lease=lease, margin=0.3, waiter_lease=min(lease, 2.0))
    return MongoLock(lambda: session, ("k",), Options(terms, wait, auto_renew=renew))


def die(session: Session) -> None:
    """Forget what is held, as a process does that is killed."""
    session.registry.grants.clear()


def tries(session: Session, seconds: float) -> list[float]:
    """Try to take the lock for so long; when it was had."""
    end, had = clock.now() + seconds, []
    while clock.now() < end:
        with contextlib.suppress(Exception):
            thief = lock(session, 1)
            if thief.try_acquire():
                had.append(clock.now())
                thief.release()
        time.sleep(0.05)
    return had


def twice(cluster: Cluster, sessions: Sessions) -> bool:
    """Fail over to a member that is 30 s ahead while a lock is held: does another get it meanwhile?"""
    cluster.dial.set(30)
    assert cluster.now(1) > 29
    cluster.lead(1)  # a member whose clock has leapt calls an election: that is over then
    cluster.lead(0)
    one, two = sessions(), sessions()
    store_of(two).collection.find_one()
    mine = lock(one, 15).acquire()
    assert abs(mine.acquired_at.timestamp() - time.time()) < 15  # not by the clock that is ahead
    cluster.lead(1)
    had = tries(two, 3)
    assert mine.held
    mine.release()
    return bool(had)


def test_a_failover_to_a_clock_that_is_ahead_makes_no_second_holder(cluster: Cluster, sessions: Sessions) -> None:
    """F21: a lease of 15 s, and the new primary's clock 30 s ahead: nobody else gets the lock."""
    assert not twice(cluster, sessions)


def test_without_the_name_of_the_clock_there_are_two_holders(
    cluster: Cluster, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F21: the test above sees what it is about: with the defence taken out, another does get it."""
    monkeypatch.setattr(ClockEncoder, "transform_python", lambda self, value: "")
    assert twice(cluster, sessions)


def test_a_living_holder_survives_the_failover(cluster: Cluster, sessions: Sessions) -> None:
    """F21: it is renewed under the new primary, with the same token, and is not told anything."""
    cluster.dial.set(30)
    cluster.lead(0)
    one, two = sessions(), sessions()
    mine = lock(one, 6, renew=True).acquire()
    token = mine.fencing_token
    cluster.lead(1)
    assert tries(two, 7) == []
    assert mine.held
    assert mine.fencing_token == token
    assert mine.release()
    assert lock(two, 2, wait=2).acquire().fencing_token > token


def test_a_failover_to_a_clock_that_is_behind_frees_a_dead_holder_s_lock(cluster: Cluster, sessions: Sessions) -> None:
    """F22: written under a clock 30 s ahead, it does not live 30 s longer, but at most two leases."""
    cluster.dial.set(30)
    cluster.lead(1)
    one, two = sessions(), sessions()
    lease = 4.0
    began = clock.now()
    dead = lock(one, lease).acquire()
    die(one)
    cluster.lead(0)
    with lock(two, lease, wait=25, renew=True) as mine:
        assert clock.now() - began < 2 * (lease + 0.3) + 10
        assert mine.fencing_token > dead.fencing_token
        assert not dead.held


def test_a_clock_that_is_set_back_lengthens_no_lease(cluster: Cluster, sessions: Sessions) -> None:
    """F23: two minutes back on the running primary: what ends in two minutes and a lease is cut to a lease."""
    cluster.dial.set(120)
    cluster.lead(1)
    one, two = sessions(), sessions()
    lease = 3.0
    dead = lock(one, lease).acquire()
    die(one)
    elected = cluster.replica_set.members[1].hello()["electionId"]
    cluster.dial.set(0)
    assert eventually(lambda: abs(cluster.now(1)) < 5)
    began = clock.now()
    with lock(two, lease, wait=25, renew=True) as mine:
        assert clock.now() - began < 2 * (lease + 0.3) + 10
        assert not dead.held
        time.sleep(lease)
        assert mine.held
        assert cluster.replica_set.members[1].hello().get("electionId") == elected


def test_a_client_s_wall_clock_means_nothing(collection: Collection[Document]) -> None:
    """F25: it jumps by hours in both directions; the lock is held on, with its token."""
    with processes(1, "tell_time", collection.name) as (holder,):
        holder.hear()
        told = [holder.say(str(offset)).hear() for offset in (0, 3 * 3600, -5 * 3600)]
    assert [answer["held"] for answer in told] == [True] * 3
    assert not any(answer["danger"] for answer in told)
    assert len({answer["token"] for answer in told}) == 1
    assert told[1]["wall"] - told[0]["wall"] > 3600
    assert told[2]["wall"] - told[0]["wall"] < -3600
    document = collection.find_one({"_id": "k"})
    assert document is not None
    assert [held["token"] for held in document["holders"]] == [told[0]["token"]]


def test_a_running_primary_that_is_set_forward_tells_the_holder(cluster: Cluster, sessions: Sessions) -> None:
    """F24: the documented limit: another gets the lock at once. The holder learns of it at its next renewal, long
    before its lease would end, and what it writes then has the older token."""
    cluster.dial.set(0)
    cluster.lead(1)
    one, two = sessions(), sessions()
    mine = lock(one, 15, renew=True).acquire()
    taken = clock.now()
    cluster.dial.set(40)
    assert cluster.now(1) > 39
    theirs = lock(two, 15, wait=20, renew=True).acquire()
    assert eventually(lambda: mine.lost, 10)
    assert clock.now() - taken < 15
    assert theirs.held
    assert theirs.fencing_token > mine.fencing_token
    theirs.release()
    cluster.dial.set(0)
