"""Celery with a real Redis and real workers of every pool: killed, redelivered, shut down, enqueued once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import WorkerLostError

from django_mongolock import mongo_lock
from django_mongolock.backends.base import mongo_store
from django_mongolock.contrib.celery import enqueue_once
from testproject.servers import Redis
from tests import parts
from tests.celery import redelivery_app
from tests.celery.redelivery_app import notes
from tests.celery.workers import Worker
from tests.support.looking import document, holders
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are gone"),
]


Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers keep results, notes and logs."""
    return tmp_path_factory.mktemp("redelivery")


@contextlib.contextmanager
def starting(redis: Redis, directory: Path, visibility: float) -> Iterator[Start]:
    """Starts workers with a queue of their own; they are killed at the end."""
    queue = f"q{uuid.uuid4().hex}"
    environment = {
        **os.environ,
        "MONGODB_NAME": mongo_store().config.database,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "TEST_CELERY_BROKER": redis.uri,
        "TEST_CELERY_DIRECTORY": str(directory),
        "TEST_CELERY_QUEUE": queue,
        "TEST_CELERY_VISIBILITY": str(visibility),
    }
    redelivery_app.DIRECTORY = directory
    app = redelivery_app.app
    before = app.conf.task_default_queue
    app.conf.update(broker_url=redis.uri, result_backend=f"file://{directory}", task_default_queue=queue)
    app.amqp.queues = app.amqp.Queues({})  # type: ignore[misc]
    workers: list[Worker] = []

    def start(**options: Any) -> Worker:
        log = directory / f"log-{uuid.uuid4().hex}"
        workers.append(Worker(environment, log, app="tests.celery.redelivery_app", **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
    app.conf.update(task_default_queue=before)
    app.amqp.queues = app.amqp.Queues({})  # type: ignore[misc]


@pytest.fixture
def start(redis: Redis, directory: Path) -> Iterator[Start]:
    """Starts workers for this test. What nobody acknowledges is delivered again after two seconds."""
    with starting(redis, directory, visibility=2) as start:
        yield start


def enough(name: str) -> None:
    """Let `redelivery_app.work` end."""
    (redelivery_app.DIRECTORY / f"{name}-enough").touch()


def done(result: Any, seconds: float = 90) -> Any:
    """The outcome of a task."""
    return result.get(timeout=seconds, interval=0.02)


def test_a_killed_worker(start: Start, name: str) -> None:
    """F49: a worker is killed in the middle of a locked task, and Redis delivers that once more: it resumes at once, by
    its id, with a new fencing token, while another task that queued for the key before still waits."""
    first = start(concurrency=1)
    result = redelivery_app.job.delay(name, "a")
    assert eventually(lambda: notes(name), 90)
    second = start(concurrency=2)
    other = redelivery_app.other.delay(name)
    assert eventually(lambda: document(f"job:{name}").get("waiters"), 90)
    lease = holders(f"job:{name}")[0]["until"]
    first.kill()
    assert eventually(lambda: len(notes(name)) == 2, 90), second.log.read_text()
    (mine,) = holders(f"job:{name}")
    assert mine["acquired_at"] < lease  # it did not wait for the end of the lease
    assert mine["owner"] == result.id
    before, after = (line.split() for line in notes(name))
    assert before[:2] == after[:2] == ["a", result.id]
    assert before[2] != after[2]
    assert int(before[3]) < int(after[3])
    assert eventually(lambda: document(f"job:{name}")["waiters"], 90)
    enough(f"{name}-a")
    assert done(other) == "other"
    assert [line.split()[0] for line in notes(name)][:4] == ["a", "a", "a", "other"]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_pools(start: Start, name: str, pool: str) -> None:
    """F30, F31: in every pool tasks take their locks, wait, come back, and a warm shutdown gives back what was kept."""
    worker = start(pool=pool)
    with mongo_lock(f"soon:{name}", wait=0):
        waits = redelivery_app.soon.delay(name)
        kept = redelivery_app.keep.delay(name)
        assert done(kept), worker.log.read_text()
    assert done(waits)
    result = redelivery_app.facts.delay(name)
    found = done(result)
    assert found["place"] == f"task tests.celery.redelivery_app.facts {result.id}"
    assert found["owner"] == result.id
    assert holders(f"kept:{name}")
    assert worker.stop() == 0, worker.log.read_text()
    assert holders(f"kept:{name}") == []
    assert "Traceback" not in worker.log.read_text()


@pytest.fixture(scope="module")
def worker(redis: Redis, directory: Path) -> Iterator[Worker]:
    """One worker for the tests below."""
    with starting(redis, directory, visibility=3600) as start:
        yield start()


def test_a_killed_process_of_the_pool(worker: Worker, name: str) -> None:
    """F49: one process of the pool is killed; its task comes back at once and resumes at once."""
    result = redelivery_app.job.delay(name, "a")
    assert eventually(lambda: notes(name), 90)
    os.kill(int(notes(name)[0].split()[2]), signal.SIGKILL)
    assert eventually(lambda: len(notes(name)) == 2, 90)
    enough(f"{name}-a")
    assert done(result) == "a"


@pytest.mark.usefixtures("worker")
class TestOncePer:
    """`once_per` in workers; the rest of it is in test_once_per."""

    def test_period(self, name: str) -> None:
        """Of those that come in one period, one runs; the others succeed and say false. A run that fails does not
        count."""
        failing = redelivery_app.report.delay(name, fail=True)
        with pytest.raises(ValueError, match=name):
            done(failing)
        results = [redelivery_app.report.delay(name) for _ in range(4)]
        assert sorted(map(str, map(done, results))) == sorted([name, *["False"] * 3])
        assert notes(name) == ["ran", "ran"]

    def test_killed(self, name: str) -> None:
        """A run that is killed does not count: its message comes back, and resumes."""
        result = redelivery_app.nightly.delay(name)
        assert eventually(lambda: notes(name), 90)
        os.kill(int(notes(name)[0]), signal.SIGKILL)
        assert eventually(lambda: len(notes(name)) == 2, 90)
        enough(name)
        assert done(result) == name
        assert done(redelivery_app.nightly.delay(name)) is False


class TestEnqueueOnce:
    """`enqueue_once` with real workers."""

    @pytest.mark.parametrize("how", ["", "fail", "ignore", "reject", "retry", "die"])
    def test_ends(self, worker: Worker, name: str, how: str) -> None:
        """However the task ends, it may be enqueued again then, and not before; a retry is no end."""
        key = f"once:{name}"
        result, sent = enqueue_once(redelivery_app.tidy, (name,), {"how": how}, key=key)
        assert sent
        assert holders(key)[0]["owner"] == result.id
        assert eventually(lambda: notes(name), 90), worker.log.read_text()
        again, sent = enqueue_once(redelivery_app.tidy, (name,), key=key)
        assert (again.id, sent) == (result.id, False)
        enough(name)
        if how == "retry":
            assert eventually(lambda: holders(key) and "queue" in holders(key)[0]["place"], 90)
            assert not enqueue_once(redelivery_app.tidy, (name,), key=key)[1]
        if how == "die":
            with pytest.raises(WorkerLostError):
                done(result)
        assert eventually(lambda: not holders(key), 90), worker.log.read_text()
        assert document(key)["expired"] == 0  # it was given back, and did not just end
        assert len(notes(name)) == (2 if how == "retry" else 1)
        assert enqueue_once(redelivery_app.tidy, (name,), key=key)[1]

    def test_expired(self, worker: Worker, name: str) -> None:
        """A task that the worker refuses, because it is revoked or has expired, gives its key back."""
        key = f"once:{name}"
        enqueue_once(redelivery_app.tidy, (name,), key=key, expires=0.001)
        assert eventually(lambda: not holders(key), 90)
        assert notes(name) == []
