"""F96: The key of `enqueue_once` is free the moment the task has ended, in any way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock.contrib.celery import enqueue_once
from tests.celery import app as tasks
from tests.celery.conftest import WITH_WORKERS, MakePlace
from tests.celery.workers import Place
from tests.support.looking import document, holders
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, *WITH_WORKERS]

#: The ways in which a task can end, each with its task, its arguments, and the options of its message.
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
    """Enqueue *count* tasks that end in this *way*, and return the keys that stay taken when all have ended."""
    task, kwargs, options = WAYS[way]
    keys = [f"once:{name}{way}{number}" for number in range(count)]
    for key in keys:
        result, sent = enqueue_once(task, (key,), kwargs, key=key, **options)
        assert sent
        assert {holder["owner"] for holder in holders(key)} <= {result.id}  # its task may have ended
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


def test_replaced(place: MakePlace, name: str) -> None:
    """F129: The key is taken until the replacing task has ended."""
    here = place()
    here.start(concurrency=2)
    result, _ = enqueue_once(tasks.replaced, (name, 2), key=name)
    assert eventually(lambda: here.story.count("begin", name=f"{name}-instead"), 60), here.logs()
    assert enqueue_once(tasks.replaced, (name, 2), key=name)[0].id == result.id
    assert eventually(lambda: not holders(name), 60), here.logs()
    assert here.story.count("end", name=f"{name}-instead") == 1
