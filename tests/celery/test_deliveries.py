"""F122: A task whose inner lock is busy comes back, also if its next run arrives before it has left the outer one."""

from __future__ import annotations

from typing import Any

import pytest

from django_mongolock import mongo_lock
from tests.celery import app as tasks
from tests.celery.conftest import WITH_WORKERS, MakePlace
from tests.celery.workers import Place
from tests.support.waiting import eventually

pytestmark = WITH_WORKERS


def all_run_once(here: Place, name: str, kind: str, rows: list[tuple[float, int]], **options: Any) -> None:
    """Send a task for each row, with an innermost lock that is held for a while. Each task does its work once, and has
    a result."""
    task, results = getattr(tasks, kind), {}
    with mongo_lock(f"{name}-inner"):
        for clean_up, depth in rows:
            own = f"{name}-{kind}-{clean_up}-{depth}"
            keys = [f"{own}-{number}" for number in range(depth - 1)]
            results[own] = task.apply_async(([*keys, f"{name}-inner"], own, clean_up), **options)
        assert eventually(lambda: here.story.count("retry") >= 2 * len(rows), 120), here.logs()
    assert eventually(lambda: all(here.story.count("end", name=own) for own in results), 120), here.logs()
    assert eventually(here.is_quiet, 30)
    assert {own: here.story.count("begin", name=own) for own in results} == dict.fromkeys(results, 1)
    # No task stays in STARTED. The state is stored after the run has ended.
    assert eventually(lambda: {result.state for result in results.values()} == {"SUCCESS"}, 30), here.logs()


@pytest.mark.witness
def test_an_idle_pool(place: MakePlace, name: str) -> None:
    """A task with two or three locks runs in an idle pool of threads."""
    here = place(task_track_started=True)
    here.start(pool="threads", concurrency=8)
    all_run_once(here, name, "several", [(1, 2), (0.3, 3)])
    all_run_once(here, f"{name}-by-hand", "by_hand", [(1, 2)])
