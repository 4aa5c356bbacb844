"""For how long the document of a free lock is kept: a week if there was ever a queue, else about an hour."""

import time
from datetime import timedelta

from django_mongolock.engine.step import BRIEF_RETENTION, Limits
from tests.engine.conftest import Document
from tests.engine.twins import Twin

HOUR, WEEK = timedelta(hours=1), timedelta(days=7)


def kept(document: Document) -> timedelta:
    """How long the document is kept after its last write."""
    span: timedelta = document["purge_at"] - document["written_at"]
    return span


def test_a_key_without_a_queue_is_kept_for_an_hour(twin: Twin) -> None:
    """F72: a key that a stranger made up; also if it is taken again and again, by one after another."""
    for grant in ("g.1", "g.2", "g.3"):
        twin.add(grant)
        twin.release(grant)
        assert HOUR < kept(twin.read()) < 2 * HOUR + timedelta(minutes=2)
    twin.write({**twin.read(), "purge_at": twin.read()["written_at"]})
    assert twin.take_free("g.4") is not None
    assert HOUR < kept(twin.read()) < 2 * HOUR + timedelta(minutes=2)


def test_a_key_with_a_queue_is_kept_for_a_week(twin: Twin) -> None:
    """A lock that is really shared keeps its statistics."""
    for grant in ("g.1", "g.2"):
        twin.add(grant)
    time.sleep(0.01)
    for grant in ("g.1", "g.2"):
        twin.release(grant)
    twin.add("g.3")
    assert twin.read()["contended"] == 1
    assert kept(twin.read()) > WEEK


def test_a_document_outlives_its_tombstones(twin: Twin) -> None:
    """F17: what was removed stays out for as long as its tombstone says, which may be longer than an hour."""
    twin.apply(ask="g.1", remove=("g.1",), force=True, tombstone_ttl=10 * BRIEF_RETENTION)
    assert twin.read()["purge_at"] >= twin.read()["tombstones"][0]["until"]


def test_a_short_retention_stays_short() -> None:
    assert Limits(retention=1_000).brief(0) == 1_000
