"""F98: Tasks that cannot run now leave the pool to those that can. Locks of a killed process of the pool are free."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from django_mongolock import mongo_lock
from tests.celery import app as tasks
from tests.celery.conftest import WITH_WORKERS, MakePlace
from tests.celery.workers import Place
from tests.support.looking import holders
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, *WITH_WORKERS]


def test_a_task_that_can_run_does_not_wait(place: MakePlace, name: str) -> None:
    """Behind many tasks for a held lock, a task for a free lock starts at once. Tasks that waited in the pool would
    need minutes."""
    here, count = place(), 40
    here.start(concurrency=4)
    with mongo_lock(name):
        for _ in range(count):
            tasks.early.delay(name, "busy")
        tasks.early.delay(f"{name}-free", "free")
        assert eventually(lambda: here.story.count("begin", name="free"), 20), here.logs()
    assert eventually(lambda: here.story.count("end") == count + 1, 120), here.logs()
    assert here.story.count("state", state="FAILURE") == 0


def begun(here: Place, name: str) -> int:
    """Wait until a body runs, and return its process."""
    assert eventually(lambda: here.story.count("begin", name=name), 60), here.logs()
    return int(here.story.of("begin", name=name)[-1]["pid"])


def test_a_killed_process(place: MakePlace, name: str) -> None:
    """The lock of a killed process is free long before its lease ends, however the task took it."""
    here = place()
    here.start(concurrency=4)
    keys = []
    for kind in ("early", "inside"):
        for way in ("killed", "revoked", "terminated", "limited"):
            keys.append(f"{name}{kind}{way}")
            send(here, kind, keys[-1], way)
    assert eventually(lambda: not any(map(holders, keys)), 30), here.logs()


def send(here: Place, kind: str, key: str, way: str) -> None:
    task: Any = getattr(tasks, kind)
    options = {"time_limit": 5} if way == "limited" else {}
    result = task.apply_async((key, key, 600), **options)
    pid = begun(here, key)
    if way == "killed":
        os.kill(pid, signal.SIGKILL)
    elif way in ("revoked", "terminated"):
        result.revoke(terminate=True, signal="SIGKILL" if way == "revoked" else "SIGTERM")
