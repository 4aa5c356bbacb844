"""The tasks of the tests of failures. A real worker imports this module, too; its environment has the settings."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject
from celery.signals import task_postrun

from django_mongolock import idempotent, mongo_lock, mongo_locked, once_per
from django_mongolock.engine import mongo_store
from django_mongolock.engine.session import listener
from tests.celery.records import DIRECTORY, Story, listen, note, work

HERE = Path(os.environ.get(DIRECTORY, "/nonexistent"))

app = Celery("failures", set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
)
app.conf.update(json.loads(os.environ.get("TEST_CELERY_CONFIG", "{}")))
if DIRECTORY in os.environ:
    listen(HERE)
if "TEST_IDLE_SECONDS" in os.environ:  # not a minute
    mongo_store.MAX_IDLE_MS = 1_000 * int(os.environ["TEST_IDLE_SECONDS"])
    listener.LINGER = float(os.environ["TEST_IDLE_SECONDS"])  # type: ignore[misc]


def directory() -> Path:
    """Where the records are: of this worker, or of the test that sends."""
    return HERE


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@mongo_locked("{key}", lease=6, on_contention="retry")
def late(self: Task[Any, Any], key: str, name: str, seconds: float) -> str:
    """A task whose message is acknowledged when it has ended."""
    with work(directory(), name, str(self.request.id)):
        time.sleep(seconds)
    return name


@app.task(bind=True, max_retries=0)
@mongo_locked("{key}", lease=60, on_contention="retry")
def early(self: Task[Any, Any], key: str, name: str, seconds: float = 0) -> str:
    """A task whose message is acknowledged when it begins."""
    with work(directory(), name, str(self.request.id)):
        time.sleep(seconds)
    return name


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@idempotent(key="{key}", lease=6)
def charged(self: Task[Any, Any], key: str, seconds: float, dies: bool = False) -> int:
    """A task that is done once; its process may die when it is done, before its message is acknowledged."""
    with work(directory(), key, str(self.request.id)):
        time.sleep(seconds)
    return os.getpid()


@task_postrun.connect(sender=charged)
def die(args: Any, **facts: Any) -> None:
    """The first process dies."""
    if args[2:] == [True] and not Story(directory()).count("died"):
        note(directory(), "died")
        os._exit(1)


@app.task(bind=True)
def plain(self: Task[Any, Any], name: str, seconds: float = 0) -> str:
    """A task without a lock."""
    with work(directory(), name, str(self.request.id)):
        time.sleep(seconds)
    return name


@app.task(bind=True)
def inside(self: Task[Any, Any], key: str, name: str, seconds: float = 0) -> str:
    """A task that takes its lock by itself."""
    with mongo_lock(key, lease=60), work(directory(), name, str(self.request.id)):
        time.sleep(seconds)
    return name


@app.task(bind=True, max_retries=1)
def once(self: Task[Any, Any], name: str, how: str = "", countdown: float | None = None) -> str:
    """A task that is enqueued once, and ends in all ways."""
    with work(directory(), name, str(self.request.id)):
        if how == "retry" and not self.request.retries:
            raise self.retry(countdown=countdown)
        if how == "fail":
            raise ValueError(name)
        if how == "reject":
            raise Reject("no", requeue=False)
        if how == "die":
            os._exit(1)
        if how == "sleep":
            time.sleep(600)
    return name


@app.task(bind=True, autoretry_for=(ZeroDivisionError,), retry_backoff=True, retry_backoff_max=1, max_retries=3)
def backing_off(self: Task[Any, Any], name: str) -> str:
    """A task that is enqueued once, and whose first run fails; the countdown of its retry may be 0."""
    with work(directory(), name, str(self.request.id)):
        if not self.request.retries:
            raise ZeroDivisionError
    return name


@app.task(bind=True, autoretry_for=(ZeroDivisionError,), retry_kwargs={"countdown": 0.1, "max_retries": 3})
@once_per("report:{name}", seconds=60)
def report(self: Task[Any, Any], name: str, fails: int = 0) -> str:
    """A task that two schedulers send, and that fails at first."""
    with work(directory(), name, str(self.request.id)):
        if self.request.retries < fails:
            raise ZeroDivisionError
    return name


@app.task(bind=True)
@once_per("tick:{name}", seconds=2)
def tick(self: Task[Any, Any], name: str) -> str:
    """A task that schedulers send more often than it shall run. Every third run fails."""
    with work(directory(), name, str(self.request.id)):
        if Story(directory()).count("begin", name=name) % 3 == 0:
            raise ZeroDivisionError
    note(directory(), "done", id=str(self.request.id))
    return name


@app.task(bind=True)
def again(self: Task[Any, Any]) -> None:
    """A task without a lock, which Celery sends again once."""
    if not self.request.retries:
        raise self.retry(countdown=0.25)


def killed(pid: int, where: Path) -> None:
    """Write down that a process was killed, whose body has no end."""
    note(where, "killed", victim=pid)
