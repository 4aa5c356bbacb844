"""A lock over a real election, as the witness of the short tier. Further tests of elections are in test_failover.py."""

from collections.abc import Callable

import pytest

from django_mongolock.engine.session.session import Session
from testproject.servers import ReplicaSet
from tests.engine.conftest import make_lock
from tests.engine.twins import CALM


@pytest.mark.witness
def test_a_killed_primary_takes_no_lock_with_it(session_at: Callable[..., Session]) -> None:
    """P2, P3: After a failover a lock is still held at the next primary, keeps others out, and the next token is
    larger."""
    with ReplicaSet(members=3, election_timeout=2) as servers:
        mine, other = (make_lock(session_at(servers.uri), terms=CALM, wait=30) for _ in range(2))
        with mine:
            servers.primary().kill()
            servers.primary()
            mine.extend()
            assert not other.try_acquire()
            token = mine.fencing_token
        with other:
            assert other.fencing_token > token
