"""Clocks: of primaries that do not agree, that are set back or forward, and of clients. On real members."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.store.election import ClockEncoder
from testproject.servers import Mongod, ReplicaSet
from tests import parts
from tests.engine.conftest import Document, store_of
from tests.engine.overlap import Watch
from tests.engine.parties import Parties, Party
from tests.engine.processes import processes
from tests.engine.stuck import WRITES, cut_off
from tests.engine.waiters import InThread
from tests.support import DATABASE
from tests.support.lock_fixtures import Commands
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
        """By how much the clock of a member is ahead of ours, in seconds."""
        with self.members[number].client() as client:
            return float(client.admin.command("hello")["localTime"].timestamp() - time.time())

    def answers(self) -> bool:
        """Whether a write is confirmed within three seconds."""
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
def parties(three: Servers, in_thread: InThread, test_name: str) -> Iterator[Parties]:
    """Makes processes at the three members, over a collection of this test."""
    with contextlib.closing(Parties(three.replica_set.uri, test_name, in_thread)) as parties:
        yield parties


def lock(party: Party, lease: float, *, wait: float = 0, renew: bool = False) -> MongoLock:
    return party.lock(Terms(lease=lease, margin=0.3, waiter_lease=min(lease, 2.0)), wait=wait, renew=renew)


def left_by_a_killed_process(party: Party, lease: float) -> MongoLock:
    """A lock that its process has forgotten."""
    dead = lock(party, lease).acquire()
    party.session.registry.grants.clear()
    return dead


def tries(party: Party, seconds: float) -> list[float]:
    """Try to take the lock for so long; when it was had."""
    end, had = clock.now() + seconds, []
    while clock.now() < end:
        with contextlib.suppress(Exception):
            thief = lock(party, 1)
            if thief.try_acquire():
                had.append(clock.now())
                thief.release()
        time.sleep(0.05)
    return had


def twice(three: Servers, parties: Parties) -> bool:
    """Fail over to a member that is 30 s ahead while a lock is held: does another get it meanwhile?"""
    three.dials[1].set(30)
    assert three.ahead(1) > 29
    three.lead(1)  # a member whose clock has leapt calls an election: that is over then
    three.lead(0)
    one, two = parties.new(), parties.new()
    store_of(two.session).collection.find_one()
    mine = lock(one, 15).acquire()
    assert abs(mine.acquired_at.timestamp() - time.time()) < 15  # not by the clock that is ahead
    three.lead(1)
    had = tries(two, 3)
    assert mine.held
    mine.release()
    return bool(had)


def test_a_failover_to_a_clock_that_is_ahead_makes_no_second_holder(three: Servers, parties: Parties) -> None:
    """F21: a lease of 15 s, and the new primary's clock 30 s ahead: nobody else gets the lock."""
    assert not twice(three, parties)


def test_without_the_name_of_the_clock_there_are_two_holders(
    three: Servers, parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F21: the test above sees what it is about: with the defence taken out, another does get it."""
    monkeypatch.setattr(ClockEncoder, "transform_python", lambda self, value: "")
    assert twice(three, parties)


def test_a_living_holder_survives_the_failover(three: Servers, parties: Parties) -> None:
    """F21: it is renewed under the new primary, with the same token, and is not told anything."""
    three.dials[1].set(30)
    three.lead(0)
    one, two = parties.new(), parties.new()
    mine = lock(one, 6, renew=True).acquire()
    token = mine.fencing_token
    three.lead(1)
    assert tries(two, 7) == []
    assert (mine.held, mine.fencing_token) == (True, token)
    assert mine.release()
    assert lock(two, 2, wait=2).acquire().fencing_token > token


@pytest.mark.parametrize("how", ["another primary", "set back"])
def test_a_dead_holder_is_gone_after_two_leases(three: Servers, parties: Parties, how: str) -> None:
    """F22, F23: its lease was written under a clock that is far ahead; then a member whose clock is right is elected,
    or that clock is set back on the running primary. It does not live as much longer."""
    three.dials[1].set(120)
    three.lead(1)
    one, two, lease, began = parties.new(), parties.new(), 4.0, clock.now()
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


def test_a_client_s_wall_clock_means_nothing(collection: Collection[Document]) -> None:
    """F25: it jumps by hours in both directions; the lock is held on, with its token."""
    with processes(1, "tell_time", collection.name) as (holder,):
        holder.hear()
        told = [holder.say(str(offset)).hear() for offset in (0, 3 * 3600, -5 * 3600)]
    assert [(answer["held"], answer["danger"]) for answer in told] == [(True, False)] * 3
    assert len({answer["token"] for answer in told}) == 1
    assert told[1]["wall"] - told[0]["wall"] > 3600
    assert told[2]["wall"] - told[0]["wall"] < -3600
    document = collection.find_one({"_id": "k"}) or {}
    assert [held["token"] for held in document["holders"]] == [told[0]["token"]]


def test_a_running_primary_that_is_set_forward_tells_the_holder(three: Servers, parties: Parties) -> None:
    """F24: the documented limit: another gets the lock at once. The holder learns of it at its next renewal, long
    before its lease would end, and what it writes then has the older token."""
    three.dials[1].set(0)
    three.lead(1)
    mine = lock(parties.new(), 15, renew=True).acquire()
    taken = clock.now()
    three.dials[1].set(40)
    assert three.ahead(1) > 39
    theirs = lock(parties.new(), 15, wait=20, renew=True).acquire()
    assert eventually(lambda: mine.lost, 10)
    assert clock.now() - taken < 15
    assert theirs.held
    assert theirs.fencing_token > mine.fencing_token
    theirs.release()
    three.dials[1].set(0)


# An end that was written by one clock, less the time of another, is no length of anything


#: A waiter that is handed the lock lives for six seconds without renewal, a holder for five times as long.
TERMS = Terms(lease=30, margin=0.5, waiter_lease=6)


class HandOver:
    """Somebody holds the lock, somebody waits for it, and somebody else comes later."""

    def __init__(self, parties: Parties) -> None:
        self.parties, self.commands = parties, Commands()
        self.newcomer, self.next_waiter = parties.new(), parties.new(event_listeners=[self.commands])
        self.mine, self.theirs = parties.new().lock(TERMS), self.next_waiter.lock(TERMS)

    def begin(self) -> None:
        """Have the lock be held, and waited for."""
        self.mine.acquire()
        self.parties.waiter(self.theirs)
        assert eventually(lambda: "findAndModify" in self.commands.names())

    def listens_and_looks(self) -> None:
        """Wait until the next waiter hears the news, and has read its place. After an election this may take long."""
        for name in ("getMore", "find"):
            self.commands.clear()
            assert eventually(lambda name=name: name in self.commands.names(), 90)  # type: ignore[misc]

    @contextlib.contextmanager
    def cut_off(self, member: Mongod) -> Iterator[None]:
        """The next waiter can read, and hears the news, but cannot write."""
        collection = self.parties.collection
        with member.client() as client, cut_off(client[DATABASE][collection], self.next_waiter.appname, WRITES):
            yield

    def end(self, seconds: float) -> float:
        """Give the lock back, and have the newcomer try for it, until it has it and the next waiter has lost it, but no
        longer than so. Returns for how long two of them held it."""
        taken: list[MongoLock] = []
        with Watch(self.mine, self.theirs) as watch:
            assert self.mine.release()
            end = time.monotonic() + seconds
            while time.monotonic() < end and not (taken and not self.theirs.held):
                new = self.newcomer.lock(TERMS, wait=0)
                if not taken and watch.add(new).try_acquire():
                    taken.append(new)
                time.sleep(0.01)
        return watch.overlap


@pytest.fixture
def hand_over(in_thread: InThread, test_name: str) -> Iterator[Callable[[Servers], HandOver]]:
    """Makes the processes of a test, over a collection of their own."""
    with contextlib.ExitStack() as made:
        numbers = iter(range(9))

        def make(servers: Servers) -> HandOver:
            parties = Parties(servers.replica_set.uri, f"{test_name}_{next(numbers)}", in_thread)
            return HandOver(made.enter_context(contextlib.closing(parties)))

        yield make


@pytest.fixture(scope="module")
def alone() -> Iterator[Servers]:
    """One member, whose clock can be set back; no test sets it forward."""
    with contextlib.closing(Servers(0)) as servers:
        yield servers


@pytest.fixture(scope="module")
def behind() -> Iterator[Servers]:
    """A member with a true clock, and two that are behind."""
    with contextlib.closing(Servers(0, -40, -600)) as servers:
        yield servers


def set_back(alone: Servers, hand_over: Callable[[Servers], HandOver], back: int) -> HandOver:
    """Have the clock set back while a lock is held and waited for.

    A mongod may stand still then, until its clock shows the time that it was waiting for (seen: for a minute). Then
    it is started again, and so is all of this.
    """
    (dial,), (member,) = alone.dials, alone.members
    for _ in range(3):
        they = hand_over(alone)
        they.begin()
        dial.set(dial.offset - back)
        if alone.answers():
            return they
        member.restart()
        alone.replica_set.primary()
    raise AssertionError("the server stood still three times")


#: Up to twice: on a busy machine, elections and bells take longer than the tests wait.
AGAIN = pytest.mark.flaky(reruns=1)
CUT = pytest.mark.parametrize("cut", [False, True], ids=["all well", "cut off"])


@AGAIN
@CUT
@pytest.mark.parametrize("back", [10, 40, 60, 600])
def test_a_clock_that_is_set_back(
    alone: Servers, hand_over: Callable[[Servers], HandOver], back: int, cut: bool
) -> None:
    """F62: a waiter that has read its place after that, and is handed the lock then, believes in it no longer than the
    server does, whether it can renew it or not."""
    they = set_back(alone, hand_over, back)
    they.listens_and_looks()
    with they.cut_off(alone.members[0]) if cut else contextlib.nullcontext():
        assert they.end(seconds=15 if cut else 12) == 0
        assert they.theirs.held != cut


@AGAIN
@CUT
@pytest.mark.parametrize("number", [1, 2], ids=["40 s", "600 s"])
def test_an_election_to_a_clock_that_is_behind(
    behind: Servers, hand_over: Callable[[Servers], HandOver], number: int, cut: bool
) -> None:
    """F62: the same where another member was elected meanwhile."""
    behind.lead(0)
    they = hand_over(behind)
    with they.cut_off(behind.members[number]) if cut else contextlib.nullcontext():
        they.begin()
        behind.lead(number)
        they.listens_and_looks()
        assert they.end(seconds=15 if cut else 12) == 0
        assert they.theirs.held != cut
