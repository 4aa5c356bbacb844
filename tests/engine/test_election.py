"""A lock over a real election: the witness of the short tier. What else an election does is in test_failover.py."""

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import Options
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from testproject.servers import ReplicaSet


@pytest.mark.witness
def test_a_killed_primary_takes_no_lock_with_it() -> None:
    """P2, P3: what was acquired is held at the next primary, keeps others out, and the next token is larger."""
    terms = Terms(lease=60, margin=1, waiter_lease=10)
    with ReplicaSet(members=3, election_timeout=2) as servers:
        sessions = [Session(MongoStore(StoreConfig({"host": servers.uri}, "d", "locks"))) for _ in range(2)]
        mine, other = (MongoLock(lambda s=s: s, ("k",), Options(terms, wait=30)) for s in sessions)  # type: ignore[misc]
        with mine:
            servers.primary().kill()
            servers.primary()
            mine.extend()
            assert not other.try_acquire()
            token = mine.fencing_token
        with other:
            assert other.fencing_token > token
        for session in sessions:
            session.close()
