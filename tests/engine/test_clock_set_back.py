"""The clock of the primary is set back, or a member is elected whose clock is behind, while one holds a lock and others
wait (F62): an end that was written by the one clock, less the time of the other, is no length of anything."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from testproject.servers import Mongod, ReplicaSet
from tests import parts
from tests.engine.conftest import Commands, Document
from tests.engine.overlap import Watch
from tests.engine.parties import Parties
from tests.engine.stuck import WRITES, cut_off
from tests.engine.waiters import InThread
from tests.support import DATABASE
from tests.support.waiting import eventually
from verify.faults.clocks import Dial

#: Up to twice: on a busy machine, elections and bells take longer than the tests wait.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300), parts.needs("a C compiler"), pytest.mark.flaky(reruns=1)]

#: A waiter that is handed the lock lives for six seconds without renewal, a holder for five times as long.
TERMS = Terms(lease=30, margin=0.5, waiter_lease=6)
#: By how many seconds the clock is set back.
BACK = [10, 40, 60, 600]


class Servers:
    """A replica set whose members' clocks differ from ours by *offsets*, in seconds."""

    def __init__(self, *offsets: float) -> None:
        self.replica_set = ReplicaSet(len(offsets), parameters={"enableTestCommands": 1})
        self.members = self.replica_set.members
        self.dials = [Dial() for _ in offsets]
        for member, dial, offset in zip(self.members, self.dials, offsets, strict=True):
            dial.set(offset)
            member.environment |= dial.environment

    def answers(self) -> bool:
        """Whether a write is confirmed within three seconds."""
        with self.members[0].client(3.0) as client, contextlib.suppress(PyMongoError):
            client[DATABASE]["answers"].insert_one({})
            return True
        return False

    def lead(self, number: int) -> None:
        """Make this member the primary."""
        with self.members[number].client() as client:
            assert eventually(lambda: _steps_up(client), 30)

    def close(self) -> None:
        self.replica_set.close()
        for dial in self.dials:
            dial.close()


def _steps_up(client: MongoClient[Document]) -> bool:
    with contextlib.suppress(PyMongoError):
        client.admin.command("replSetStepUp")
    return bool(client.admin.command("hello").get("isWritablePrimary"))


@pytest.fixture(scope="module")
def alone() -> Iterator[Servers]:
    """One member, whose clock can be set back; no test sets it forward."""
    with contextlib.closing(Servers(0)) as servers:
        servers.replica_set.start()
        yield servers


@pytest.fixture(scope="module")
def three() -> Iterator[Servers]:
    """A member with a true clock, and two that are behind."""
    with contextlib.closing(Servers(0, -40, -600)) as servers:
        servers.replica_set.start()
        yield servers


class HandOver:
    """Somebody holds the lock, somebody waits for it, and somebody else comes later."""

    def __init__(self, servers: Servers, collection: str, in_thread: InThread) -> None:
        self.collection = collection
        self.parties = Parties(servers.replica_set.uri, collection, in_thread)
        self.commands = Commands()
        self.giver, self.newcomer = self.parties.new(), self.parties.new()
        self.next_waiter = self.parties.new(event_listeners=[self.commands])
        self.mine, self.theirs = self.giver.lock(TERMS), self.next_waiter.lock(TERMS)

    def begin(self) -> None:
        """Have the lock be held, and waited for."""
        self.mine.acquire()
        self.parties.waiter(self.theirs)
        assert eventually(lambda: "findAndModify" in self.commands.names)

    def sends(self, name: str) -> None:
        """Wait until the next waiter has sent such a command, if it has not done so already. After an election it may
        take half a minute until it listens again."""
        assert eventually(lambda: name in self.commands.names, 90)

    @contextlib.contextmanager
    def cut_off(self, member: Mongod) -> Iterator[None]:
        """The next waiter can read, and hears the news, but cannot write."""
        with member.client() as client, cut_off(client[DATABASE][self.collection], self.next_waiter.appname, WRITES):
            yield

    def end(self, seconds: float) -> float:
        """Give the lock back, and have the newcomer try for it, until it has it and the next waiter has lost it, but no
        longer than so. Returns for how long two of them held it."""
        taken: list[MongoLock] = []
        with Watch(self.mine, self.theirs) as watch:
            assert self.mine.release()
            end = time.monotonic() + seconds
            while time.monotonic() < end and not (taken and not self.theirs.held):
                lock = self.newcomer.lock(TERMS, wait=0)
                if not taken and watch.add(lock).try_acquire():
                    taken.append(lock)
                time.sleep(0.01)
        return watch.overlap


@pytest.fixture
def hand_over(in_thread: InThread, request: pytest.FixtureRequest) -> Iterator[Callable[[Servers], HandOver]]:
    """Makes the processes of a test, over a collection of their own."""
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:60]
    numbers = itertools.count(1)
    with contextlib.ExitStack() as made:

        def make(servers: Servers) -> HandOver:
            hand_over = HandOver(servers, f"{name}_{next(numbers)}", in_thread)
            made.callback(hand_over.parties.close)
            return hand_over

        yield make


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


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("cut", [False, True], ids=["all well", "cut off"])
def test_a_clock_that_is_set_back(
    alone: Servers, hand_over: Callable[[Servers], HandOver], back: int, cut: bool
) -> None:
    """F62: a waiter that has read its place after that, and is handed the lock then, believes in it no longer than the
    server does, whether it can renew it or not."""
    they = set_back(alone, hand_over, back)
    they.sends("getMore")  # it hears the news now
    they.commands.clear()
    they.sends("find")
    with they.cut_off(alone.members[0]) if cut else contextlib.nullcontext():
        assert they.end(seconds=15 if cut else 12) == 0
        assert they.theirs.held != cut


@pytest.mark.parametrize("number", [1, 2], ids=["40 s", "600 s"])
@pytest.mark.parametrize("cut", [False, True], ids=["all well", "cut off"])
def test_an_election_to_a_clock_that_is_behind(
    three: Servers, hand_over: Callable[[Servers], HandOver], number: int, cut: bool
) -> None:
    """F62: the same where another member was elected meanwhile."""
    three.lead(0)
    they = hand_over(three)
    with they.cut_off(three.members[number]) if cut else contextlib.nullcontext():
        they.begin()
        three.lead(number)
        they.commands.clear()
        they.sends("getMore")
        they.sends("find")
        assert they.end(seconds=15 if cut else 12) == 0
        assert they.theirs.held != cut
