"""The tasks of the tests of failures. A real worker imports this module, too, with its settings in the environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject

from django_mongolock import LockError, mongo_lock, mongo_locked, once_per
from django_mongolock.contrib.celery import OnceTask, retry_current_task
from django_mongolock.engine.lock.lock import MongoLock
from tests.celery.records import DIRECTORY, Story, listen, note, work
from tests.support.looking import holders

#: Locks that `keep` leaves behind.
kept: list[MongoLock] = []
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


def directory() -> Path:
    """Return the folder of the records, either this worker's or the sending test's."""
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


def nested(keys: list[str], clean_up: float, body: Callable[[], None], lease: float = 60) -> None:
    """Hold all keys, one inside the other. A call that fails takes its time to clean up, under its lock."""

    @mongo_locked(keys[0], lease=lease, on_contention="retry")
    def call() -> None:
        try:
            nested(keys[1:], clean_up, body, lease) if len(keys) > 1 else body()
        except BaseException:
            time.sleep(clean_up)
            raise

    call()


@app.task(bind=True)
def several(self: Task[Any, Any], keys: list[str], name: str, clean_up: float) -> str:
    """A task with several locks, the last of which may be busy."""

    nested(keys, clean_up, partial(at_work, name, str(self.request.id)))
    return name


def at_work(name: str, task_id: str) -> None:
    with work(directory(), name, task_id):
        pass


@app.task(bind=True)
def by_hand(self: Task[Any, Any], keys: list[str], name: str, clean_up: float) -> str:
    """Do the same with blocks. The task retries itself, and sends its message while it holds its locks."""
    try:
        with ExitStack() as stack:
            for key in keys[:-1]:
                stack.enter_context(mongo_lock(key, wait=0, owner=self.request.id))
            stack.callback(time.sleep, clean_up)
            try:
                stack.enter_context(mongo_lock(keys[-1], wait=0, owner=self.request.id))
            except LockError as error:
                retry_current_task(error)
            stack.enter_context(work(directory(), name, str(self.request.id)))
    except LockError as error:
        retry_current_task(error)
    return name


def until_told(name: str, task_id: str) -> str:
    """Work until the test says that it is enough."""
    with work(directory(), name, task_id):
        while not (directory() / f"enough-{name}").exists():
            time.sleep(0.02)
    return name


def tell(name: str) -> None:
    (directory() / f"enough-{name}").touch()


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@mongo_locked("{key}", lease=120, wait=None)
def told(self: Task[Any, Any], key: str, name: str) -> str:
    """A task that waits for its lock, and ends when it is told to."""
    return until_told(name, str(self.request.id))


@app.task(bind=True)
@mongo_locked("{key}", lease=120, wait=None)
def told_early(self: Task[Any, Any], key: str, name: str) -> str:
    """The same, acknowledged when it begins, so that its message does not come twice."""
    return until_told(name, str(self.request.id))


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@once_per("told:{key}", hours=1)
def told_once_per(self: Task[Any, Any], key: str, name: str) -> str:
    """A task that runs once in an hour, and ends when it is told to."""
    return until_told(name, str(self.request.id))


@app.task
@mongo_locked("{key}", wait=10)
def facts(key: str) -> list[Any]:
    """Return the place and the owner of the lock's holder."""
    (found,) = holders(key)
    return [found["place"], found["owner"]]


@app.task
def keep(key: str) -> int:
    kept.append(mongo_lock(key, lease=600, auto_renew=False).acquire())
    return os.getpid()


@app.task(bind=True)
def plain(self: Task[Any, Any], name: str, seconds: float = 0) -> str:
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
        if how == "ignore":
            raise Ignore
        if how == "die":
            os._exit(1)
    return name


@app.task(bind=True)
def replaced(self: Task[Any, Any], name: str, seconds: float) -> str:
    """A task that is enqueued once, and replaced by another one."""
    with work(directory(), name, str(self.request.id)):
        pass
    return str(self.replace(plain.si(f"{name}-instead", seconds)))


@app.task(bind=True, autoretry_for=(ZeroDivisionError,), retry_backoff=True, retry_backoff_max=1, max_retries=3)
def backing_off(self: Task[Any, Any], name: str) -> str:
    """A task that is enqueued once, with a first run that fails. The countdown of its retry may be 0."""
    with work(directory(), name, str(self.request.id)):
        if not self.request.retries:
            raise ZeroDivisionError
    return name


@app.task(bind=True, base=OnceTask, once_key="index:{key}", acks_late=True, reject_on_worker_lost=True)
@mongo_locked("index:{key}:running", lease=6, on_contention="retry")
def indexed(self: Task[Any, Any], key: str, name: str, seconds: float) -> str:
    """A task that is enqueued once, and whose runs do not overlap."""
    with work(directory(), name, str(self.request.id)):
        time.sleep(seconds)
    return name


@app.task(bind=True, base=OnceTask, once_key="tail:{name}")
def tail(self: Task[Any, Any], name: str, how: str = "") -> str:
    """A task that is enqueued once, as a later part of a canvas."""
    with work(directory(), "tail", str(self.request.id)):
        if how == "again" and not self.request.retries:
            raise self.retry(countdown=0)
    return "tail"


@app.task(bind=True, base=OnceTask, once_key="start:{name}", once_release="start")
def from_start(self: Task[Any, Any], name: str) -> str:
    """A task whose key is free when it starts."""
    return until_told(name, str(self.request.id))


@app.task(bind=True, base=OnceTask, once_key="chain:{name}")
def sends_itself(self: Task[Any, Any], name: str) -> str:
    """A task that schedules its next run under its own key, three times."""
    with work(directory(), name, str(self.request.id)):
        if len(Story(directory()).of("begin", name=name)) < 3:
            self.apply_async((name,), countdown=0.1)
    return name


@app.task
def sends_all(calls: list[tuple[str, float]]) -> list[str]:
    """Send tasks from a worker, so that their keys are in its MongoDB. Returns their ids."""
    return [indexed.apply_async((key, key, 3), countdown=countdown).id for key, countdown in calls]


@app.task
def given(value: Any) -> Any:
    """The first part of a chain."""
    return value


@app.task
def fails() -> None:
    raise ValueError("meant")


@app.task(bind=True)
def through_rows(self: Task[Any, Any], keys: list[str], name: str) -> str:
    """An undecorated task whose helper comes back, and whose loop catches everything."""

    @mongo_locked("{row}", wait=0, lease=60, on_contention="retry")
    def process(row: str) -> None:
        pass

    with work(directory(), name, str(self.request.id)):
        for key in keys:
            try:
                process(key)
            except Exception as error:  # noqa: BLE001 - as in many projects
                note(directory(), "row", error=type(error).__name__)
    return name


@app.task(bind=True)
@mongo_locked("{outer}", lease=60, on_contention="retry")
@mongo_locked("{inner}", lease=60, wait=0, on_contention="retry")
def two_locks(self: Task[Any, Any], outer: str, inner: str, name: str) -> str:
    """A task with two locks, of which the inner one is busy."""
    at_work(name, str(self.request.id))
    return name


def killed(pid: int, where: Path) -> None:
    """Note that a process was killed, because its body has no end."""
    note(where, "killed", victim=pid)
