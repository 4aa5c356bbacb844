"""What is known of the servers: their roles, and how far their clocks are apart. Real members, one of them skewed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.inspection import servers
from testproject.servers import Mongod, ReplicaSet
from tests import parts
from tests.engine.clusters import cluster_with_a_dial
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, parts.needs("a C compiler")]


@pytest.fixture
def replica_set() -> Iterator[ReplicaSet]:
    """Three members; the clock of the second is half a minute ahead."""
    with cluster_with_a_dial() as cluster:
        cluster.dial.set(30)
        yield cluster.replica_set


def test_members(replica_set: ReplicaSet) -> None:
    """Who is who, whose clock is ahead, and who is away."""
    store = MongoStore(StoreConfig({"host": replica_set.uri}, "test"))
    seen: list[servers.Servers] = []

    def are_there() -> bool:
        """A clock that jumps, and a busy machine, may cost a member an election."""
        seen[:] = [servers.look(store)]
        roles = sorted(member.role for member in seen[0].members)
        is_settled = seen[0].primary.endswith(f":{replica_set.primary().port}")
        return is_settled and roles == ["primary", "secondary", "secondary"]

    assert eventually(are_there, 60), seen
    (found,) = seen
    assert found.name
    assert found.apart == pytest.approx(30, abs=2)
    assert found.watching
    lost = next(member for member in replica_set.members if member is not replica_set.primary())
    lost.kill()
    assert eventually(lambda: servers.look(store).away)
    found = servers.look(store)
    (away,) = found.away
    assert away.address.endswith(f":{lost.port}")
    assert len(found.members) == 3
    store.close()


def test_standalone() -> None:
    """A server of its own has no members, and nobody can be told of a turn."""
    with Mongod() as server:
        store = MongoStore(StoreConfig({"host": server.uri}, "test"))
        found = servers.look(store)
        assert ([member.role for member in found.members], found.apart, found.watching) == (["standalone"], None, False)
        store.close()
