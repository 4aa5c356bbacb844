"""The Redis application whose tasks test_redelivery sends. A real worker imports this module, too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task

from django_mongolock import MongoLock, mongo_lock, mongo_locked, once_per
from django_mongolock.contrib.celery import retry_task
from tests.support.looking import holder

DIRECTORY = Path(os.environ.get("TEST_CELERY_DIRECTORY", "/nonexistent"))

kept: list[MongoLock] = []

app = Celery("redis_tests", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("TEST_CELERY_BROKER", "memory://"),
    broker_transport_options={
        # A task that nobody has acknowledged for so many seconds is given to another worker,
        "visibility_timeout": float(os.environ.get("TEST_CELERY_VISIBILITY", "3600")),
        # which looks for such tasks every second, not every hundred; nor does a killed one keep it from that for long.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,
    },
    broker_connection_retry_on_startup=True,
    result_backend=f"file://{DIRECTORY}",
    task_default_queue=os.environ.get("TEST_CELERY_QUEUE", "celery"),
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,
)

if "TEST_CELERY_DIRECTORY" in os.environ:
    retry_task.SHORTEST, retry_task.LONGEST = 0.05, 0.1  # in a worker: come back soon


def note(name: str, text: object) -> None:
    """Write down what a task does, where the test reads it."""
    with (DIRECTORY / name).open("a") as file:
        file.write(f"{text}\n")


def notes(name: str) -> list[str]:
    """What was written down."""
    path = DIRECTORY / name
    return path.read_text().splitlines() if path.exists() else []


def work(name: str) -> None:
    """Work until the test says that it is enough."""
    while not (DIRECTORY / f"{name}-enough").exists():
        time.sleep(0.02)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@mongo_locked("job:{name}", lease=120, wait=None)
def job(self: Task[Any, Any], name: str, who: str) -> str:
    """Runs until it is told to end. Notes who runs, as which task, in which process."""
    note(name, f"{who} {self.request.id} {os.getpid()} {holder(f'job:{name}')['token']}")
    work(f"{name}-{who}")
    note(name, f"{who} done")
    return who


@app.task
@mongo_locked("job:{name}", lease=120, wait=None)
def other(name: str) -> str:
    """Wants the lock of `job`. Its message is acknowledged at once, so that it does not come twice."""
    note(name, "other")
    return "other"


@app.task(acks_late=True)
@mongo_locked("soon:{name}", wait=0, on_contention="retry")
def soon(name: str) -> int:
    return os.getpid()


@app.task
@mongo_locked("soon:{name}", wait=10)
def facts(name: str) -> dict[str, Any]:
    found = holder(f"soon:{name}")
    return {name: found.get(name) for name in ("place", "owner", "pid", "thread")}


@app.task
def keep(name: str) -> int:
    """Leaves a lock behind."""
    kept.append(mongo_lock(f"kept:{name}", lease=60, auto_renew=False).acquire())
    return os.getpid()


@app.task
@once_per("report:{name}", seconds=60)
def report(name: str, fail: bool = False) -> str:
    note(name, "ran")
    if fail:
        raise ValueError(name)
    return name


@app.task(acks_late=True, reject_on_worker_lost=True)
@once_per("nightly:{name}", hours=1)
def nightly(name: str) -> str:
    note(name, os.getpid())
    work(name)
    return name
