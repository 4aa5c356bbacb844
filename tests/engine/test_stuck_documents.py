"""One document cannot be written for a while: a transaction has written the fence of `lock.atomic()` to it, and its
process vanished before the commit (F66). Only that key suffers."""

import contextlib
import time
from collections.abc import Iterator

import pytest
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from tests.engine.conftest import Document
from tests.engine.parties import Parties, Party
from tests.engine.stuck import running, stuck
from tests.engine.waiters import InThread
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

SHORT = Terms(lease=5, margin=0.5, waiter_lease=5)
#: Nobody renews it meanwhile.
CALM = Terms(lease=60, margin=1)
#: How many other locks the process has. Its keys are renewed in their order: `k` comes in between.
OTHERS = [f"{letter}{number}" for letter in "az" for number in range(20)]


@pytest.fixture
def parties(mongo_uri: str, collection: Collection[Document], in_thread: InThread) -> Iterator[Parties]:
    """Makes processes."""
    parties = Parties(mongo_uri, collection.name, in_thread)
    yield parties
    parties.close()


@pytest.fixture
def process(parties: Parties) -> Party:
    """A process."""
    return parties.new()


@pytest.fixture
def others(process: Party) -> list[MongoLock]:
    """Its other locks."""
    return [process.lock(SHORT, key).acquire() for key in OTHERS]


def lost(others: list[MongoLock], seconds: float) -> dict[str, float]:
    """Which of them are lost within so many seconds, and after how many."""
    began, gone = clock.now(), dict[str, float]()
    while clock.now() < began + seconds:
        gone |= {lock.key: round(clock.now() - began, 1) for lock in others if not lock.held and lock.key not in gone}
        time.sleep(0.02)
    return gone


def test_who_waits_for_a_stuck_key_keeps_all_others(
    process: Party, others: list[MongoLock], parties: Parties, collection: Collection[Document]
) -> None:
    """F66: a process waits for a key whose document is stuck: for three leases none of its other locks is lost."""
    holder = parties.new().lock(CALM).acquire()
    waiter = parties.waiter(process.lock(SHORT))
    assert eventually(lambda: collection.find_one({"_id": "k", "waiters.0": {"$exists": True}}))
    with stuck(collection, "k"):
        assert lost(others, 3 * SHORT.lease) == {}
        assert not waiter.done
    assert holder.release()
    assert waiter.end().has_it
    assert all(lock.release() for lock in others)


def test_who_holds_a_stuck_key_keeps_all_others(
    process: Party, others: list[MongoLock], collection: Collection[Document]
) -> None:
    """F66: a process holds the key itself: it loses that lock, which nobody can renew, and no other."""
    mine = process.lock(SHORT).acquire()
    with stuck(collection, "k"):
        assert lost(others, 3 * SHORT.lease) == {}
        assert not mine.held
    assert all(lock.release() for lock in others)


def test_several_stuck_keys(process: Party, others: list[MongoLock], collection: Collection[Document]) -> None:
    """F66: three of the locks of a process are stuck, here and there among them: it keeps the others."""
    free = [lock for lock in others if lock.key not in ("a3", "a17", "z11")]
    with contextlib.ExitStack() as transactions:
        for key in ("a3", "a17", "z11"):
            transactions.enter_context(stuck(collection, key))
        assert lost(free, 3 * SHORT.lease) == {}
    assert all(lock.release() for lock in free)


def test_a_stuck_key_delays_nothing_else(
    process: Party, others: list[MongoLock], parties: Parties, collection: Collection[Document]
) -> None:
    """F66: a process that waits for a stuck key takes other locks and gives them back as ever."""
    holder = parties.new().lock(CALM).acquire()
    parties.waiter(process.lock(SHORT))
    assert eventually(lambda: collection.find_one({"_id": "k", "waiters.0": {"$exists": True}}))
    took: list[float] = []
    with stuck(collection, "k"):
        assert eventually(lambda: running(collection, appName=process.appname, writeConflicts={"$gt": 1}))
        while len(took) < 60:
            began = clock.now()
            with process.lock(SHORT, f"new{len(took)}"):
                pass
            took.append(clock.now() - began)
            time.sleep(0.05)
    assert sorted(took)[30] < 0.5
    assert max(took) < 4
    assert holder.release()
