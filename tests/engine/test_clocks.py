"""Clocks of clients and of primaries that disagree or are set back or forward, on real members."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from pymongo.errors import PyMongoError

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.session import Session
from testproject.servers import Mongod, ReplicaSet
from tests import parts
from tests.engine.conftest import make_lock, store_of
from tests.support import DATABASE
from tests.support.waiting import eventually
from verify.faults.clocks import Dial

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), parts.needs("a C compiler")]


class Servers:
    """A replica set whose members' clocks differ from ours by *offsets*, in seconds."""

    def __init__(self, *offsets: float) -> None:
        self.replica_set = ReplicaSet(len(offsets), parameters={"enableTestCommands": 1})
        self.members = self.replica_set.members
        self.dials = [Dial() for _ in offsets]
        for member, dial, offset in zip(self.members, self.dials, offsets, strict=True):
            dial.set(offset)
            member.environment |= dial.environment
        self.replica_set.start()

    def ahead(self, number: int) -> float:
        """Return the seconds by which the clock of a member is ahead of ours."""
        with self.members[number].client() as client:
            return float(client.admin.command("hello")["localTime"].timestamp() - time.time())

    def answers(self) -> bool:
        """Return whether a write is confirmed within three seconds."""
        with self.members[0].client(3.0) as client, contextlib.suppress(PyMongoError):
            client[DATABASE]["answers"].insert_one({})
            return True
        return False

    def lead(self, number: int) -> None:
        """Make this member the primary."""
        assert eventually(lambda: self._steps_up(self.members[number]), 30)

    @staticmethod
    def _steps_up(member: Mongod) -> bool:
        with contextlib.suppress(Exception), member.client() as client:
            client.admin.command("replSetStepUp")
        return bool(member.hello().get("isWritablePrimary"))

    def close(self) -> None:
        self.replica_set.close()
        for dial in self.dials:
            dial.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Servers]:
    """Three members. The tests set the clock of the second."""
    with contextlib.closing(Servers(0, 0, 0)) as servers:
        yield servers


@pytest.fixture
def one(three: Servers, session_at: Callable[..., Session]) -> Session:
    """A process at the three members."""
    return session_at(three.replica_set.uri)


@pytest.fixture
def two(three: Servers, session_at: Callable[..., Session]) -> Session:
    """Another one."""
    return session_at(three.replica_set.uri)


def lock(session: Session, lease: float, *, wait: float = 0, renew: bool = False) -> MongoLock:
    terms = Terms(lease=lease, margin=0.3, waiter_lease=min(lease, 2.0))
    return make_lock(session, terms=terms, wait=wait, auto_renew=renew)


def left_by_a_killed_process(session: Session, lease: float) -> MongoLock:
    """Return a lock that its process has forgotten."""
    dead = lock(session, lease).acquire()
    session.registry.grants.clear()
    return dead


def tries(session: Session, seconds: float) -> list[float]:
    """Try to take the lock for *seconds*, and return the times of success."""
    end, had = clock.now() + seconds, []
    while clock.now() < end:
        with contextlib.suppress(Exception):
            thief = lock(session, 1)
            if thief.try_acquire():
                had.append(clock.now())
                thief.release()
        time.sleep(0.05)
    return had


@pytest.mark.parametrize("renew", [False, True])
def test_a_failover_to_a_clock_that_is_ahead_makes_no_second_holder(
    three: Servers, one: Session, two: Session, renew: bool
) -> None:
    """F21: The new primary's clock is 30 s ahead, beyond the end of a lease. No other process gets the lock, and the
    lock is renewed under the new primary with the same token."""
    three.dials[1].set(30)
    assert three.ahead(1) > 29
    three.lead(1)  # a member with a leapt clock calls an election, and this waits until it is over
    three.lead(0)
    store_of(two).collection.find_one()
    mine = lock(one, 6 if renew else 15, renew=renew).acquire()
    assert abs(mine.acquired_at.timestamp() - time.time()) < 15  # not by the clock that is ahead
    token = mine.fencing_token
    three.lead(1)
    assert tries(two, 7 if renew else 3) == []
    assert (mine.held, mine.fencing_token) == (True, token)
    assert mine.release()
    assert lock(two, 2, wait=2).acquire().fencing_token > token


@pytest.mark.parametrize("how", ["another primary", "set back"])
def test_a_dead_holder_is_gone_after_two_leases(three: Servers, one: Session, two: Session, how: str) -> None:
    """F22, F23: The lease of a dead holder was written under a clock that is far ahead. A member with the right clock
    is elected, or the clock is set back on the running primary. The lease does not live as much longer."""
    three.dials[1].set(120)
    three.lead(1)
    lease, began = 4.0, clock.now()
    dead = left_by_a_killed_process(one, lease)
    elected = three.members[1].hello()["electionId"]
    if how == "set back":
        three.dials[1].set(0)
        assert eventually(lambda: abs(three.ahead(1)) < 5)
    else:
        three.lead(0)
    with lock(two, lease, wait=25, renew=True) as mine:
        assert clock.now() - began < 2 * (lease + 0.3) + 10
        assert mine.fencing_token > dead.fencing_token
        assert not dead.held
        time.sleep(lease)
        assert mine.held
        assert (three.members[1].hello().get("electionId") == elected) == (how == "set back")


def test_a_running_primary_that_is_set_forward_tells_the_holder(three: Servers, one: Session, two: Session) -> None:
    """F24: The documented limit is that another process gets the lock at once. The holder learns of its loss at its
    next renewal, long before its lease ends. Later writes of the holder carry the older token."""
    three.dials[1].set(0)
    three.lead(1)
    mine = lock(one, 15, renew=True).acquire()
    taken = clock.now()
    three.dials[1].set(40)
    assert three.ahead(1) > 39
    theirs = lock(two, 15, wait=20, renew=True).acquire()
    assert eventually(lambda: mine.lost, 10)
    assert clock.now() - taken < 15
    assert theirs.held
    assert theirs.fencing_token > mine.fencing_token
    theirs.release()
    three.dials[1].set(0)
