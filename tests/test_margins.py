"""One rule for the margin, whatever made a lease as long as it is: max(1 s, a tenth of the lease it has now) (F80)."""

from __future__ import annotations

import pytest
from celery import Celery
from pytest_django import Settings

from django_mongolock import MongoLock, mongo_lock
from django_mongolock.backends.base import mongo_store
from django_mongolock.contrib.celery import enqueue_once
from tests.support.looking import holder, new_key

app = Celery("margin_tests", broker="memory://", backend="cache+memory://", set_as_current=False)


@app.task(name="tests.margins.export")
def export() -> None:
    """Is never run here."""


def stored_margin(key: str) -> float:
    """How much longer than its lease the server lets the holder of *key* live, in seconds."""
    found = holder(key)
    return float(found["server_lease"] - found["lease"]) / 1000


def left_on_server(key: str) -> float:
    """How many seconds the holder of *key* has left, by the server's clock."""
    now = {"$subtract": [{"$max": "$holders.until"}, "$$NOW"]}
    (found,) = mongo_store().latest.aggregate([{"$match": {"_id": {"$eq": key}}}, {"$project": {"left": now}}])
    return float(found["left"]) / 1000


def margins(lock: MongoLock) -> tuple[float, float]:
    """Bounds of the time by which the server's lease is longer than its holder believes.

    Lower than the margin is never right; higher it is by what the last command took. The server's clock shows whole
    milliseconds.
    """
    before = lock.remaining
    left = left_on_server(lock.key)
    return left - before, left + 0.001 - lock.remaining


#: What a lease is made longer to, and the margin that belongs to that length.
LONGER = [(8, 1.0), (20, 2.0), (60, 6.0), (3_600, 360.0)]


@pytest.mark.parametrize(("longer", "margin"), LONGER)
def test_an_extended_lock(longer: float, margin: float) -> None:
    """F80: a lease of 5 s that is made one of 60 has the margin of one of 60, in the document and in fact."""
    key = new_key()
    with mongo_lock(key, lease=5, auto_renew=False) as lock:
        assert stored_margin(key) == 1.0
        lock.extend(longer)
        assert stored_margin(key) == margin
        low, high = margins(lock)
        assert high >= margin
        assert low < margin + 3


@pytest.mark.parametrize(("queue_lease", "countdown"), [(3_600, 0), (30, 0), (50, 550)])
def test_a_parked_lock(queue_lease: float, countdown: float) -> None:
    """F80: it lasts as long as it says: no process believes to hold it, so that it needs no margin."""
    key = new_key()
    enqueue_once(export, key=key, queue_lease=queue_lease, countdown=countdown)
    assert stored_margin(key) == 0
    assert left_on_server(key) == pytest.approx(queue_lease + countdown, abs=10)


@pytest.mark.parametrize(
    ("part", "lease", "longer", "margin"), [(0.2, 10, 60, 12.0), (0.05, 5, 60, 3.0), (0.0, 5, 60, 1.0)]
)
def test_by_the_setting(settings: Settings, part: float, lease: float, longer: float, margin: float) -> None:
    """F80: MONGOLOCK["CLOCK_MARGIN"] of the lease that it has, and at least a second."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "CLOCK_MARGIN": part}
    key = new_key()
    with mongo_lock(key, lease=lease) as lock:
        lock.extend(longer)
        assert stored_margin(key) == margin
