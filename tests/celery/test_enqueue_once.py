"""F96: the key of `enqueue_once` is free the moment the task has ended, whatever way it went."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from django_mongolock import LockNotAcquired, mongo_lock
from django_mongolock.conf import get_settings
from django_mongolock.contrib.celery import enqueue_once
from tests import parts
from tests.celery import app as tasks
from tests.celery.conftest import MakePlace
from tests.celery.workers import Place
from tests.support.looking import document, holders
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are gone"),
]

#: Each way in which a task can end: the task, its arguments, the options of its message.
WAYS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "success": (tasks.once, {}, {}),
    "failure": (tasks.once, {"how": "fail"}, {}),
    "a retry at once": (tasks.once, {"how": "retry", "countdown": 0}, {}),
    "a retry soon": (tasks.once, {"how": "retry", "countdown": 0.05}, {}),
    "a retry with backoff": (tasks.backing_off, {}, {}),
    "expiry": (tasks.once, {}, {"expires": 0.0001}),
    "rejection": (tasks.once, {"how": "reject"}, {}),
    "ignoring": (tasks.once, {"how": "ignore"}, {}),
    "a lost process": (tasks.once, {"how": "die"}, {}),
    "revocation": (tasks.once, {}, {"countdown": 2}),
}


def stuck(here: Place, name: str, way: str, count: int) -> list[str]:
    """Enqueue *count* tasks that end in this *way*; return the keys that stay taken when all have ended."""
    task, kwargs, options = WAYS[way]
    keys = [f"once:{name}{way}{number}" for number in range(count)]
    for key in keys:
        result, sent = enqueue_once(task, (key,), kwargs, key=key, **options)
        assert sent
        assert holders(key)[0]["owner"] == result.id
        if way == "revocation":
            result.revoke()
    free: Callable[[], bool] = lambda: not any(map(holders, keys))  # noqa: E731
    eventually(lambda: here.is_quiet() and free(), 10 + count)
    assert not any(document(key)["expired"] for key in keys)  # they were given back, and did not just end
    return [key for key in keys if holders(key)]


def test_ends(place: MakePlace, name: str) -> None:
    """All keys are free when their tasks have ended."""
    here = place()
    here.start(concurrency=4)
    found = {way: len(stuck(here, name, way, 4)) for way in WAYS}
    assert set(found.values()) == {0}, found
    assert "a task runs without the lock" not in here.logs()


def test_purged(place: MakePlace, name: str) -> None:
    """A message that is gone from the queue keeps its key for `queue_lease`, counted from its eta, and no longer."""
    here = place()
    keys = [f"once:{name}{number}" for number in range(4)]
    begun = time.monotonic()
    for key in keys:
        assert enqueue_once(tasks.once, (key,), key=key, queue_lease=2, countdown=1)[1]
    sent = time.monotonic()
    assert tasks.app.control.purge() == 4
    assert here.is_quiet()
    assert holders(keys[-1])
    assert eventually(lambda: free(keys[0]), 20)
    first = time.monotonic() - begun
    assert eventually(lambda: all(map(free, keys)), 20)
    last = time.monotonic() - sent
    assert first > 2.9
    assert last < 3 + 1 + 2  # the margin of the clock, and the time of the queries


def test_a_killed_worker(place: MakePlace, name: str) -> None:
    """The key of a task that runs has the lease of a lock, and not of the queue: its worker may be killed whole."""
    here = place()
    worker = here.start(concurrency=1)
    enqueue_once(tasks.once, (name, "sleep"), key=name)
    assert eventually(lambda: here.story.count("begin"), 60), here.logs()
    worker.kill()
    (holder,) = holders(name)
    left = holder["until"] - datetime.now(UTC)
    assert left.total_seconds() < get_settings().LEASE * 1.1 + 1


def test_replaced(place: MakePlace, name: str) -> None:
    """F129: the key is taken until the task has ended that replaces it."""
    here = place()
    here.start(concurrency=2)
    result, _ = enqueue_once(tasks.replaced, (name, 2), key=name)
    assert eventually(lambda: here.story.count("begin", name=f"{name}-instead"), 60), here.logs()
    assert enqueue_once(tasks.replaced, (name, 2), key=name)[0].id == result.id
    assert eventually(lambda: not holders(name), 60), here.logs()
    assert here.story.count("end", name=f"{name}-instead") == 1


def free(key: str) -> bool:
    """Whether the key can be taken."""
    with contextlib.suppress(LockNotAcquired), mongo_lock(key, wait=0):
        return True
    return False
