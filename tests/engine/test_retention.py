"""For how long the document of a free lock is kept: a week if there was ever a queue, else about an hour."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from django_mongolock.engine.document import Terms, entry
from django_mongolock.engine.memory_server import MemoryServer, MemoryStore
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.step import BRIEF_RETENTION, Limits, Step
from django_mongolock.engine.store import Store
from tests.engine.conftest import Document

Stored = Callable[..., Document]
TERMS = Terms(lease=30, margin=1, waiter_lease=30)
TIMEOUT = 20.0
HOUR, WEEK = timedelta(hours=1), timedelta(days=7)


@pytest.fixture(params=["mongodb", "memory"])
def twin(request: pytest.FixtureRequest, store: MongoStore, stored: Stored) -> tuple[Store, Stored]:
    """Both that carry the rule out: a store, and what reads the document of a key."""
    if request.param == "mongodb":
        return store, stored
    server = MemoryServer()
    return MemoryStore(server, Limits()), lambda key="k": server.documents[key]


def add(store: Store, grant: str) -> None:
    store.apply("k", Step(ask=grant, add=entry(grant, "s", TERMS, {})), TIMEOUT)


def kept(document: Document) -> timedelta:
    """How long the document is kept after its last write."""
    span: timedelta = document["purge_at"] - document["written_at"]
    return span


def test_a_key_without_a_queue_is_kept_for_an_hour(twin: tuple[Store, Stored]) -> None:
    """F72: a key that a stranger made up; also if it is taken again and again, by one after another."""
    store, read = twin
    for grant in ("g.1", "g.2", "g.3"):
        add(store, grant)
        store.apply("k", Step(remove=(grant,), given=grant), TIMEOUT)
        assert HOUR < kept(read()) < 2 * HOUR + timedelta(minutes=2)


def test_a_short_acquisition_keeps_it_no_longer(store: MongoStore, stored: Stored) -> None:
    """The short form of the rule says the same."""
    add(store, "g.1")
    store.apply("k", Step(remove=("g.1",), given="g.1"), TIMEOUT)
    store.collection.update_one({"_id": "k"}, [{"$set": {"purge_at": "$$NOW"}}])
    assert store.take_free("k", Step(ask="g.2", add=entry("g.2", "s", TERMS, {})), TIMEOUT) is not None
    assert HOUR < kept(stored()) < 2 * HOUR + timedelta(minutes=2)


def test_a_key_with_a_queue_is_kept_for_a_week(twin: tuple[Store, Stored]) -> None:
    """A lock that is really shared keeps its statistics."""
    store, read = twin
    for grant in ("g.1", "g.2"):
        add(store, grant)
    time.sleep(0.01)
    for grant in ("g.1", "g.2"):
        store.apply("k", Step(remove=(grant,), given=grant, force=True), TIMEOUT)
    add(store, "g.3")
    assert read()["contended"] == 1
    assert kept(read()) > WEEK


def test_a_document_outlives_its_tombstones(twin: tuple[Store, Stored]) -> None:
    """F17: what was removed stays out for as long as its tombstone says, which may be longer than an hour."""
    store, read = twin
    store.apply("k", Step(ask="g.1", remove=("g.1",), force=True, tombstone_ttl=10 * BRIEF_RETENTION), TIMEOUT)
    assert read()["purge_at"] >= read()["tombstones"][0]["until"]


def test_a_short_retention_stays_short() -> None:
    """It is never longer than what the project says."""
    assert Limits(retention=1_000).brief(0) == 1_000


def test_tokens_go_on_growing(store: MongoStore, stored: Stored) -> None:
    """P2: also in a new document of the key, as each token is at least the server's time."""
    add(store, "g.1")
    before = stored()
    store.collection.delete_one({"_id": "k"})
    add(store, "g.2")
    assert stored()["token"] > before["token"]
