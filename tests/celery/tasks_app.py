"""The tasks of test_tasks, in an application of their own. A real worker imports this module, too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.signals import task_retry, worker_init

from django_mongolock import MongoLock, mongo_lock, mongo_locked
from django_mongolock.contrib.celery import retry_task

DIRECTORY = Path(os.environ.get("TEST_CELERY_DIRECTORY", "/nonexistent"))

kept: list[MongoLock] = []

app = Celery("tests", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("TEST_CELERY_BROKER", "memory://"),
    broker_transport_options={"polling_interval": 0.02},
    broker_connection_retry_on_startup=True,
    result_backend=f"file://{DIRECTORY}",
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,
)

if "TEST_CELERY_DIRECTORY" in os.environ:
    # In a worker: come back soon, and count how often.
    retry_task.SHORTEST, retry_task.LONGEST = 0.05, 0.1

    @worker_init.connect
    def hold_in_parent(**kwargs: Any) -> None:
        """The worker itself holds a lock before it forks its pool."""
        kept.append(mongo_lock(f"parent:{DIRECTORY.name}", lease=60).acquire())

    @task_retry.connect
    def note_retry(request: Any, **kwargs: Any) -> None:
        with (DIRECTORY / f"retries-{request.id}").open("a") as file:
            file.write("x")


def look(key: str) -> dict[str, Any]:
    """Who holds *key* while this runs."""
    from tests.support.looking import holder

    found = holder(key)
    return {name: found.get(name) for name in ("place", "session", "pid", "label", "user", "thread")}


@app.task
@mongo_locked("facts:{name}")
def facts(name: str, seconds: float = 0) -> dict[str, Any]:
    time.sleep(seconds)
    return look(f"facts:{name}")


@app.task
@mongo_locked("busy:{name}", wait=0, on_contention="skip")
def skipping(name: str) -> bool:
    return True


@app.task(bind=True, max_retries=0)
@mongo_locked("busy:{name}", wait=0, on_contention="retry")
def returning(self: Task[Any, Any], name: str, fail: int = 0) -> list[Any]:
    """Fails as often as it is told to, and uses its own retries for that."""
    if self.request.retries < fail:
        raise self.retry(countdown=0.01, max_retries=fail)
    return [self.request.id, self.request.retries, look(f"busy:{name}")["place"]]


@app.task
def interrupted(name: str) -> None:
    """Acquires and releases until its soft time limit strikes."""
    while True:
        with mongo_lock(f"soft:{name}", wait=0, lease=60):
            pass


@app.task
@mongo_locked("soft:{name}", lease=60)
def interrupted_inside(name: str) -> None:
    time.sleep(10)


@app.task
def keep(name: str) -> int:
    """Leaves a lock behind in its process."""
    kept.append(mongo_lock(f"kept:{name}", lease=60).acquire())
    return os.getpid()
