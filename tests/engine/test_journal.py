"""Servers that tell a majority of what is not on the disk yet (`writeConcernMajorityJournalDefault: false`), and are
killed then (F68): what was told to be held is held."""

import contextlib
import time
from collections.abc import Iterator

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.exceptions import LockError
from testproject.servers import Mongod, ReplicaSet
from tests.engine.overlap import Watch
from tests.engine.parties import Parties, Party
from tests.engine.waiters import InThread

pytestmark = pytest.mark.long

#: Long enough for a server that is started again.
TERMS = Terms(lease=30, margin=0.5, waiter_lease=30)


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ReplicaSet]:
    """One member. What it tells a majority of need not be on its disk."""
    with ReplicaSet() as replica_set:
        with replica_set.members[0].client() as client:
            config = client.admin.command("replSetGetConfig")["config"]
            config |= {"version": config["version"] + 1, "writeConcernMajorityJournalDefault": False}
            client.admin.command("replSetReconfig", config)
        yield replica_set


@pytest.fixture
def mongod(replica_set: ReplicaSet) -> Iterator[Mongod]:
    """The server. It runs, and is primary, before and after the test."""
    (mongod,) = replica_set.members
    yield mongod
    if not mongod.running:
        mongod.restart()
    replica_set.primary()


@pytest.fixture
def parties(replica_set: ReplicaSet, mongod: Mongod, in_thread: InThread, test_name: str) -> Iterator[Parties]:
    """Makes processes, over a collection of this test."""
    parties = Parties(replica_set.uri, test_name, in_thread)
    yield parties
    parties.close()


@pytest.fixture
def newcomer(parties: Parties) -> Party:
    """Who comes after the server was killed."""
    return parties.new()


def kill_and_restart(replica_set: ReplicaSet) -> None:
    """Kill the server and start it again."""
    replica_set.members[0].kill()
    replica_set.members[0].restart()
    replica_set.primary()


def keep_trying(lock: MongoLock, seconds: float) -> None:
    """Try to acquire it for so long; it is kept."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not lock.held:
        with contextlib.suppress(LockError):
            lock.try_acquire()
        time.sleep(0.05)
    time.sleep(1)


@pytest.mark.parametrize("again", range(3))
def test_a_grant_survives_the_server(replica_set: ReplicaSet, parties: Parties, newcomer: Party, again: int) -> None:
    """F68: killed the moment after a lock was acquired: nobody else gets it when the server is there again."""
    mine, theirs = parties.new().lock(TERMS, renew=False), newcomer.lock(TERMS, wait=0)
    with Watch(mine, theirs) as watch:
        mine.acquire()
        kill_and_restart(replica_set)
        keep_trying(theirs, 1)
    assert watch.overlap == 0
    assert mine.held
