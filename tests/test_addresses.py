"""F220: For an address that leads to the wrong place, errors and checks say what the server is, and name the cure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_mongolock import LockBackendFailed
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.inspection.server import inspect_server, server_rules
from testproject.servers import Mongod, ReplicaSet
from tests.support.waiting import eventually

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def pair() -> Iterator[ReplicaSet]:
    with ReplicaSet(2) as found:
        yield found


def refused(uri: str) -> str:
    """Return the problem reported for an acquisition at *uri*."""
    store = MongoStore(StoreConfig({"host": uri}, "d"))
    try:
        with pytest.raises(LockBackendFailed) as refusal:
            store.apply("k", Step(), 2.0)
        return refusal.value.problem
    finally:
        store.close()


def checked(uri: str) -> list[str]:
    """Return the messages of `check --database` for *uri*."""
    store = MongoStore(StoreConfig({"host": uri}, "d"))
    try:
        return [f"{each.id} {each.msg} {each.hint}" for each in server_rules(inspect_server(store, 2.0), "locks")]
    finally:
        store.close()


def test_a_secondary(pair: ReplicaSet) -> None:
    """A secondary answers, but takes no write."""
    assert eventually(pair.secondaries)
    uri = pair.secondaries()[0].uri
    cure = "name all members, without directConnection=true: mongodb://host1,host2/?replicaSet=rs0"
    said = refused(uri)
    assert "did not answer" not in said
    assert ("is not the primary" in said, cure in said) == (True, True)
    (found,) = checked(uri)
    assert ("E101" in found, "(secondary)" in found, cure in found) == (True, True, True)


def test_one_member_of_a_set(pair: ReplicaSet) -> None:
    """An address of today's primary alone is reported, because no lock can be acquired after the next election."""
    found = [each for each in checked(pair.primary().uri) if "E106" in each]
    assert len(found) == 1
    assert "directConnection=true" in found[0]
    assert "replicaSet=rs0" in found[0]
    assert not [each for each in checked(pair.uri) if "E106" in each]
    pair.primary().client().admin.command("replSetStepDown", 60, secondaryCatchUpPeriodSecs=10)


def test_a_member_that_was_never_initiated() -> None:
    with Mongod(replica_set="rs0") as server:
        for said in (refused(server.uri), *checked(server.uri)):
            assert "was never initiated: run rs.initiate() in mongosh once" in said
            assert "did not answer" not in said


def test_a_standalone_that_shall_be_a_set() -> None:
    with Mongod() as server:
        for uri in (server.uri + "&replicaSet=rs0", f"mongodb://127.0.0.1:{server.port}/?replicaSet=rs0"):
            for said in (refused(uri), *checked(uri)):
                assert "no server of this address belongs to the replica set 'rs0'" in said
                assert "start mongod with --replSet rs0" in said
                assert "did not answer" not in said
