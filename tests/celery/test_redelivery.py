"""Workers that end, in every pool, with their tasks, and messages that are delivered twice, with a real Redis."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from django_mongolock import SKIPPED, mongo_lock
from tests.celery import app as tasks
from tests.celery.conftest import WITH_WORKERS, MakePlace
from tests.celery.workers import Place
from tests.support.looking import document, holders
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, *WITH_WORKERS]


def begun(here: Place, count: int) -> list[dict[str, Any]]:
    assert eventually(lambda: here.story.count("begin") == count, 90), here.logs()
    return here.story.of("begin")


def done(here: Place, result: Any) -> Any:
    try:
        return result.get(timeout=90, interval=0.02)
    except TimeoutError:
        pytest.fail(here.logs())


@pytest.mark.witness
def test_a_killed_worker(place: MakePlace, name: str) -> None:
    """F49: A worker is killed in the middle of a locked task, and Redis delivers the task once more. The task resumes
    at once, by its id, with a new fencing token, while an earlier task in the queue still waits."""
    here = place(visibility=2)
    first = here.start(concurrency=1)
    result = tasks.told.delay(name, "a")
    begun(here, 1)
    here.start(concurrency=2)
    other = tasks.told_early.delay(name, "other")
    assert eventually(lambda: document(name).get("waiters"), 90)
    (before,) = holders(name)
    first.kill()
    runs = begun(here, 2)
    (mine,) = holders(name)
    assert mine["acquired_at"] < before["until"]  # it did not wait for the end of the lease
    assert mine["token"] > before["token"]
    assert before["owner"] == mine["owner"] == result.id
    assert {run["id"] for run in runs} == {result.id}
    assert runs[0]["pid"] != runs[1]["pid"]
    assert eventually(lambda: document(name)["waiters"], 90)
    tasks.tell("a")
    tasks.tell("other")
    assert done(here, other) == "other"
    assert here.story.order() == ["a", "a", "other"]


@pytest.mark.parametrize("task", [tasks.told, tasks.told_once_per])
def test_a_killed_process_of_the_pool(place: MakePlace, name: str, task: Any) -> None:
    """F49: The task comes back at once and resumes at once. Under `once_per`, the killed run does not count."""
    here = place()
    here.start()
    result = task.delay(name, "a")
    os.kill(begun(here, 1)[0]["pid"], signal.SIGKILL)
    begun(here, 2)
    tasks.tell("a")
    assert done(here, result) == "a"
    if task is tasks.told_once_per:
        assert task(name, "a") is SKIPPED


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_pools(place: MakePlace, name: str, pool: str) -> None:
    """F30, F31: In every pool, tasks take their locks, wait and come back. A warm shutdown releases kept locks.

    A greenlet ends with its task, and a thread may do so, too. Kept locks of an ended one are released at once.
    """
    here = place()
    worker = here.start(pool=pool)
    with mongo_lock(name, wait=0):
        waits = tasks.early.delay(name, "soon")
        assert done(here, tasks.keep.delay(f"kept:{name}"))
    assert done(here, waits) == "soon"
    result = tasks.facts.delay(name)
    assert done(here, result) == [f"task tests.celery.app.facts {result.id}", result.id]
    assert eventually(lambda: holders(f"kept:{name}") == []) if pool == "gevent" else holders(f"kept:{name}")
    assert worker.stop() == 0, here.logs()
    assert holders(f"kept:{name}") == []
    assert "Traceback" not in here.logs()


def test_one_run(place: MakePlace, name: str) -> None:
    """F49, F95: A task that runs longer than the visibility timeout runs once, and no further message follows."""
    visibility, seconds = 1.5, 4.0
    here = place(visibility=visibility)
    here.start()
    result = tasks.late.delay(name, "a", seconds)
    assert eventually(lambda: here.story.count("end"), 60 + seconds), here.logs()
    assert here.story.count("delivery", id=result.id, again=True) >= 1
    assert eventually(here.is_quiet, 60), here.logs()
    assert (here.story.count("begin"), here.story.overlaps("a")) == (1, 0), here.logs()
    assert result.get(timeout=10) == "a"
    # One message at a time, each with about the half of the timeout between.
    assert here.story.count("message") <= 2 + 60 + 4 * seconds / visibility
