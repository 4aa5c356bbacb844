"""Commands that the server has parsed, and then holds up for seconds before they write: their `$$NOW` is old (F61).

A document that somebody's transaction has written to holds up the one update that renews all keys of a process, on its
way through the documents before it comes to ours. A failpoint holds up all updates.
"""

import contextlib
import time
from collections.abc import Iterator

import pytest
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.rule.document import Terms
from tests.engine.conftest import Document
from tests.engine.overlap import Watch
from tests.engine.parties import Parties
from tests.engine.stuck import cut_off, running, stuck
from tests.engine.waiters import InThread, Waiter
from tests.support.failpoints import failpoint
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

#: For how long a command is held up, in seconds.
HELD_UP = 5.0
#: The terms of whoever is held up: its renewals may take longer than that, and come every five and a half seconds.
PATIENT = Terms(lease=20, margin=0.6, waiter_lease=16.5)
#: The terms of a holder who need not be renewed for as long.
HELD = Terms(lease=9, margin=0.6)


@pytest.fixture
def parties(mongo_uri: str, collection: Collection[Document], in_thread: InThread) -> Iterator[Parties]:
    """Makes processes whose commands may take longer than they are held up."""
    parties = Parties(mongo_uri, collection.name, in_thread, HELD_UP + 3)
    yield parties
    parties.close()


def queue(collection: Collection[Document], key: str = "k") -> int:
    """How many wait for it, as the server has them."""
    found = collection.find_one({"_id": key})
    return len(found["waiters"]) if found else 0


class Slow:
    """A process that waits for `k`, and whose next renewal is held up before it writes."""

    def __init__(self, parties: Parties, collection: Collection[Document]) -> None:
        self.collection = collection
        self.party = parties.new()
        self.parties = parties
        self._blocker = parties.new().lock(Terms(lease=60, margin=1), "a", renew=False)
        self._since = 0.0

    def waits(self) -> Waiter:
        """Have it wait, for `a` as well, which comes first in its renewals."""
        self._blocker.acquire()
        before = queue(self.collection)
        waiter, _ = (self.parties.waiter(self.party.lock(PATIENT, key)) for key in ("k", "a"))
        assert eventually(lambda: queue(self.collection) > before and queue(self.collection, "a"))
        return waiter

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Its next renewal is held up for `HELD_UP`: a transaction has written to the document of `a`."""
        with stuck(self.collection, "a"), self._caught(writeConflicts={"$gt": 1}):
            yield

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """All updates are held up, until its next renewal has been for `HELD_UP`. findAndModify goes on."""
        client, name = self.collection.database.client, "hangDuringBatchUpdate"
        time.sleep(PATIENT.waiter_lease / 3 - 1)  # not yet: the holder must be renewed meanwhile
        with failpoint(client, name, {"nss": self.collection.full_name}), self._caught(failpointMsg=name):
            yield

    @contextlib.contextmanager
    def _caught(self, **found: object) -> Iterator[None]:
        assert eventually(lambda: running(self.collection, appName=self.party.appname, **found), 20)
        self._since = clock.now()
        yield
        self.sleep_until(HELD_UP)

    def sleep_until(self, seconds: float) -> None:
        """Sleep until it has been held up for so long."""
        time.sleep(max(0.0, self._since + seconds - clock.now()))


@pytest.fixture
def slow(parties: Parties, collection: Collection[Document]) -> Slow:
    """A process whose commands are held up."""
    return Slow(parties, collection)


@pytest.mark.parametrize("how", ["a stuck document", "a stopped update"])
def test_a_late_renewal_does_not_cut_the_holder_s_lease(slow: Slow, parties: Parties, how: str) -> None:
    """F61: somebody else's renewal, parsed five seconds ago, is written after the holder's, who is then cut off: the
    lock is not given away before the holder knows that it has lost it."""
    holder = parties.new()
    mine = holder.lock(HELD).acquire()
    theirs = slow.waits()
    with contextlib.ExitStack() as cut, Watch(mine, theirs.lock) as watch:
        with slow.held_up() if how == "a stuck document" else slow.stopped():
            slow.sleep_until(HELD_UP - 0.4)
            mine.extend()
            cut.enter_context(cut_off(slow.collection, holder.appname))
        theirs.end(20)
        assert eventually(lambda: not mine.held)
    assert watch.overlap == 0


def test_late_attempts_do_not_cut_the_holder_s_lease(
    slow: Slow, parties: Parties, in_thread: InThread, collection: Collection[Document]
) -> None:
    """F61: the same of those who merely try for the lock: the document was stuck for five seconds, then all are let in
    at once, who renews and who tried long before."""
    holder, newcomer = parties.new(), parties.new()
    mine = holder.lock(HELD).acquire()
    theirs = slow.waits()
    with contextlib.ExitStack() as cut, Watch(mine, theirs.lock) as watch:
        with stuck(collection, "k"):
            for _ in range(16):
                in_thread(newcomer.lock(PATIENT, wait=0).try_acquire)
            time.sleep(HELD_UP - 0.3)
            renewal = in_thread(mine.extend)
            time.sleep(0.2)
        renewal.join()
        cut.enter_context(cut_off(collection, holder.appname))
        theirs.end(20)
        assert eventually(lambda: not mine.held)
    assert watch.overlap == 0


def test_a_late_renewal_does_not_cut_a_minimum_hold(
    slow: Slow, parties: Parties, collection: Collection[Document]
) -> None:
    """F61: a lock that was taken and given back while somebody else's renewal was held up stays away from that for as
    long as it was to be held at least."""
    giver = parties.new().lock(Terms(lease=60, margin=0.6)).acquire()
    job = parties.waiter(parties.new().lock(Terms(lease=6, margin=0.6, min_hold=6)))
    assert eventually(lambda: queue(collection) == 1)
    theirs = slow.waits()
    with slow.held_up():
        slow.sleep_until(HELD_UP - 1)
        assert giver.release()
        began = job.end().lock.acquired_at
        job.let_go()
        assert eventually(lambda: not job.lock.held)
    held_for = theirs.end(20).lock.acquired_at - began
    assert held_for.total_seconds() >= 6
