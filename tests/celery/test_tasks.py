"""`mongo_locked` on Celery tasks, with a real prefork worker and the real MongoDB transport."""

from __future__ import annotations

import os
import random
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from django.core.exceptions import ImproperlyConfigured
from pymongo import MongoClient
from pytest_django import Settings

from django_mongolock import SKIPPED, LockNotAcquired
from django_mongolock.backends.base import mongo_store
from django_mongolock.contrib.celery import retry_task
from django_mongolock.decorator import contention
from testproject.broker import broker_url
from tests.celery import tasks_app
from tests.celery.running import in_task
from tests.celery.workers import Worker
from tests.support.looking import held_elsewhere, holders
from tests.support.waiting import eventually


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worker keeps its log, and every process the results."""
    directory = tmp_path_factory.mktemp("celery")
    tasks_app.app.conf.update(result_backend=f"file://{directory}")
    return directory


@pytest.fixture(scope="module")
def worker(mongo: MongoClient[dict[str, Any]], mongo_uri: str, directory: Path) -> Iterator[Worker]:
    """A worker with two processes that uses the locks of this test run and a queue of its own."""
    database = f"mongolock_broker_{uuid.uuid4().hex[:8]}"
    broker = broker_url(mongo_uri, database)
    environment = {
        **os.environ,
        "MONGODB_NAME": mongo_store().config.database,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "TEST_CELERY_BROKER": broker,
        "TEST_CELERY_DIRECTORY": str(directory),
    }
    tasks_app.app.conf.update(broker_url=broker)
    worker = Worker(environment, directory / "log", app="tests.celery.tasks_app")
    try:
        assert done(tasks_app.facts.delay(uuid.uuid4().hex), 60), worker.log.read_text()
        yield worker
    finally:
        worker.kill()
        mongo.drop_database(database)


@pytest.fixture
def parents_key(directory: Path) -> str:
    """What the worker has locked before it forked its processes."""
    return f"parent:{directory.name}"


def done(result: Any, seconds: float = 20) -> Any:
    """The outcome of a task."""
    return result.get(timeout=seconds, interval=0.02)


@pytest.mark.usefixtures("worker")
class TestWorker:
    """Tasks in a real worker."""

    @pytest.mark.long
    def test_processes_have_sessions_of_their_own(self, name: str, worker: Worker, parents_key: str) -> None:
        """F30, F31: each process of the pool has its own session, for all its tasks; the parent keeps its lock."""
        (parent,) = holders(parents_key)
        assert parent["pid"] == worker.process.pid
        results = [tasks_app.facts.delay(f"{name}{number}", seconds=0.3) for number in range(4)]
        pairs = {(found["pid"], found["session"]) for found in map(done, results)}
        assert len({pid for pid, _ in pairs}) == len({session for _, session in pairs}) == len(pairs) == 2
        assert parent["session"] not in {session for _, session in pairs}
        assert holders(parents_key)[0]["token"] == parent["token"]

    @pytest.mark.long
    @pytest.mark.parametrize("max_retries", [0, 2])
    def test_retry(self, name: str, max_retries: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A task waits for its lock for longer than its retries would allow, and then still has all of them."""
        with held_elsewhere(f"busy:{name}"):
            result = tasks_app.returning.delay(name, fail=max_retries)
            retries = directory / f"retries-{result.id}"
            assert eventually(lambda: retries.exists() and len(retries.read_text()) > max_retries + 2)
        assert done(result) == [result.id, max_retries, f"task tests.celery.tasks_app.returning {result.id}"]

    @pytest.mark.long
    def test_soft_time_limit(self, name: str) -> None:
        """F29: soft time limits that strike anywhere in acquire, body and release leave no lock behind."""
        tasks = [tasks_app.interrupted] * 14 + [tasks_app.interrupted_inside] * 6
        results = [
            task.apply_async((f"{name}{number}",), soft_time_limit=random.uniform(0.05, 0.2))  # type: ignore[arg-type]
            for number, task in enumerate(tasks)
        ]
        for result in results:
            with pytest.raises(SoftTimeLimitExceeded):
                done(result)
        assert eventually(lambda: not any(holders(f"soft:{name}{number}") for number in range(len(tasks))), 5)
        assert done(tasks_app.facts.delay(name))

    @pytest.mark.long
    def test_shutdown(self, worker: Worker, name: str, parents_key: str) -> None:
        """F31: SIGTERM lets the running task finish, and gives back what its processes still hold.

        The last test of the worker.
        """
        done(tasks_app.keep.delay(name))
        assert holders(f"kept:{name}")
        running = tasks_app.facts.delay(name, seconds=1)
        assert eventually(lambda: holders(f"facts:{name}"))
        worker.process.send_signal(signal.SIGTERM)
        assert done(running)
        assert eventually(lambda: holders(f"kept:{name}") == [], 10)
        assert worker.process.wait(20) == 0
        assert holders(parents_key) == []


class TestWithoutWorker:
    """Where there is no worker to come back in."""

    def test_direct_call(self, name: str) -> None:
        """A task that is called as a function is locked as well, and raises if it cannot come back later."""
        assert tasks_app.skipping(name) is True
        with held_elsewhere(f"busy:{name}"):
            assert tasks_app.skipping(name) is SKIPPED
            with pytest.raises(LockNotAcquired):
                tasks_app.returning(name)

    def test_eager(self, name: str) -> None:
        """An eager task has no later: it fails with LockNotAcquired instead of trying again at once, for ever."""
        assert tasks_app.skipping.apply((name,)).get() is True
        with held_elsewhere(f"busy:{name}"):
            result = tasks_app.returning.apply((name,))
        assert isinstance(result.result, LockNotAcquired)

    def test_without_the_app(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the app is not in INSTALLED_APPS, nothing has registered "retry": the error names the cure."""
        monkeypatch.setattr(contention, "_policies", {})
        with held_elsewhere(f"busy:{name}"), pytest.raises(ImproperlyConfigured, match="INSTALLED_APPS"):
            tasks_app.returning(name)

    @pytest.mark.parametrize("late", [True, False])
    def test_broker_away(self, monkeypatch: pytest.MonkeyPatch, settings: Settings, late: bool) -> None:
        """F106, F127: a task that cannot be sent again is handed back to the broker; acknowledged, it fails. It is
        never lost without a word."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": 0}
        monkeypatch.setattr(retry_task, "GIVE_BACK", 0)

        def fail(self: Any, *args: Any, **kwargs: Any) -> None:
            raise ConnectionError

        monkeypatch.setattr("celery.canvas.Signature.apply_async", fail)
        monkeypatch.setattr(tasks_app.returning, "acks_late", late)
        with in_task(tasks_app.returning), pytest.raises(Reject if late else ConnectionError) as caught:
            retry_task.retry_current_task(LockNotAcquired("key"))
        assert getattr(caught.value, "requeue", False) is late
        assert isinstance(caught.value, Ignore) is late  # F127: `autoretry_for=(Exception,)` leaves an Ignore alone
