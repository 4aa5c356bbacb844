"""Real workers, and an application that sends to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from celery.signals import before_task_publish

from django_mongolock.backends import mongo_store
from tests.celery import app as tasks
from tests.celery.records import DIRECTORY, Story, note
from tests.support.waiting import eventually


class Worker:
    """A real ``celery worker`` in a session of its own, so that it can be killed whole."""

    def __init__(self, environment: Mapping[str, str], log: Path, pool: str = "prefork", concurrency: int = 2) -> None:
        command = [
            *(sys.executable, "-m", "celery", "-A", "tests.celery.app", "worker", f"--pool={pool}"),
            *(f"--concurrency={concurrency}", "--without-gossip", "--without-mingle", "--without-heartbeat"),
            *("--loglevel=INFO", "-n", f"{uuid.uuid4().hex}@%h"),
        ]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)

    def kill(self) -> None:
        """Kill the worker and its pool at once, like a machine that loses power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Warm shutdown. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def is_ready(self) -> bool:
        return b" ready." in self.log.read_bytes()


class Place:
    """A broker's queue, a directory with the records, and the workers of one test."""

    def __init__(self, directory: Path, broker: str, mongo: str = "", **config: Any) -> None:
        self.directory = directory
        self.queue = f"q{uuid.uuid4().hex[:12]}"
        self.config = {
            "broker_url": broker,
            "result_backend": f"file://{directory}",
            "task_default_queue": self.queue,
            **config,
        }
        self.environment = {
            **os.environ,
            "MONGODB_NAME": mongo_store().config.database,
            "DJANGO_SETTINGS_MODULE": "tests.celery.settings",
            **({"MONGODB_URI": mongo} if mongo else {}),
            DIRECTORY: str(directory),
            "TEST_CELERY_CONFIG": json.dumps(self.config),
        }
        self.workers: list[Worker] = []

    @property
    def story(self) -> Story:
        return Story(self.directory)

    def start(self, **options: Any) -> Worker:
        """Start a worker, and wait until it takes messages."""
        return self.start_all(1, **options)[0]

    def start_all(self, count: int, **options: Any) -> list[Worker]:
        """Start workers at once, and wait until they take messages."""
        started = [self.launch(**options) for _ in range(count)]
        assert eventually(lambda: all(worker.is_ready() for worker in started), 90), self.logs()
        return started

    def launch(self, **options: Any) -> Worker:
        """Start a worker."""
        self.workers.append(Worker(self.environment, self.directory / f"log-{len(self.workers)}", **options))
        return self.workers[-1]

    def of(self, pid: int) -> Worker:
        return next(worker for worker in self.workers if worker.process.pid == os.getpgid(pid))

    def messages_left(self) -> int:
        """Return the number of messages of this queue at the broker, including unacknowledged ones."""
        with tasks.app.connection_for_write() as connection:
            channel: Any = connection.default_channel
            if connection.transport.driver_type != "redis":
                return int(channel.queue_declare(self.queue, passive=True).message_count)
            lists = sum(channel.client.llen(channel._q_for_pri(self.queue, step)) for step in channel.priority_steps)
            return int(lists + channel.client.hlen(channel.unacked_key))

    def is_quiet(self) -> bool:
        """Return whether the broker has nothing left to deliver."""
        return self.messages_left() == 0

    def logs(self) -> str:
        return "\n".join(worker.log.read_text() for worker in self.workers)


_listening: list[Path] = []


@before_task_publish.connect(weak=False)
def _sent(headers: dict[str, Any], **kwargs: Any) -> None:
    """Record the messages that this process sends to a place."""
    for directory in _listening:
        note(directory, "message", id=headers["id"])


@contextlib.contextmanager
def placed(directory: Path, broker: str, mongo: str = "", **config: Any) -> Iterator[Place]:
    """Let the application of this process send to the queue of the place. The workers are killed at the end.

    - mongo: the MongoDB of the workers, or "" for that of the test run.
    - config: Celery's settings.
    """
    place = Place(directory, broker, mongo, **config)
    app = tasks.app
    before = {name: app.conf.get(name) for name in place.config}
    _configure(app, place.config)
    tasks.HERE = directory
    _listening[:] = [directory]
    try:
        yield place
    finally:
        _listening.clear()
        for worker in place.workers:
            worker.kill()
        _configure(app, before)


def _configure(app: Any, config: Mapping[str, Any]) -> None:
    """Apply the configuration. Celery would keep objects of an earlier one."""
    app.conf.update(config)
    app.amqp.queues = app.amqp.Queues({})
    app.amqp._producer_pool = app._pool = app._backend_cache = None
    app._local = threading.local()
