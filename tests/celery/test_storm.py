"""Many tasks while everything fails around them: each is done, never two of a key at a time, and no key stays taken."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from pymongo import MongoClient

from testproject.servers import Redis, ReplicaSet
from tests import parts
from tests.celery import app as tasks
from tests.celery.workers import Place, Worker, placed
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.program,
    pytest.mark.timeout(1_800),
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are gone"),
]

KEYS = 8


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Redis, ReplicaSet, Place]]:
    """A Redis that keeps its data, a MongoDB, and the workers between them."""
    with Redis(durable=True) as redis, ReplicaSet() as mongod:
        options = {"visibility_timeout": 60, "unacked_restore_interval": 1, "unacked_mutex_expire": 2}
        with placed(
            tmp_path, redis.uri, mongod.uri, result_backend=redis.uri, broker_transport_options=options
        ) as here:
            yield redis, mongod, here


def send(name: str, count: int) -> list[str]:
    """Send tasks alone, in chains and in chords; return the ids of all."""

    def one(number: int) -> Any:
        key = f"{name}-{number % KEYS}"
        return tasks.late.si(key, key, 0.1) if number % 3 else tasks.inner_late.si([f"{key}-outer", key], key, 0.2)

    ids: list[str] = []
    for number in range(0, count, 10):
        ids += [one(number + each).delay().id for each in range(4)]
        last: Any = chain(one(number + 4), one(number + 5)).apply_async()
        ids += [last.parent.id, last.id]
        body: Any = chord([one(number + 6 + each) for each in range(3)], one(number + 9)).apply_async()
        ids += [body.id, *(each.id for each in body.parent)]
    return ids


def children(worker: Worker) -> list[int]:
    """The processes of its pool."""
    pid = worker.process.pid
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill_one(here: Place) -> None:
    """Kill a process of a pool."""
    if alive := [pid for worker in here.workers if worker.process.poll() is None for pid in children(worker)]:
        victim = random.choice(alive)
        tasks.killed(victim, here.directory)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def replace(here: Place, how: str) -> None:
    """End a worker, warm or cold, and start another one."""
    worker = next(each for each in here.workers if each.process.poll() is None)
    if how == "warm":
        worker.stop()
    else:
        for pid in children(worker):
            tasks.killed(pid, here.directory)
        worker.kill()
    here.start(concurrency=3)


@pytest.mark.parametrize(("count", "away"), [(40, 3), (200, 20)])
def test_storm(servers: tuple[Redis, ReplicaSet, Place], name: str, count: int, away: float) -> None:
    """Children are killed, workers end warm and cold, MongoDB and Redis are away: with acks_late, each task is done at
    least once, and at most once at a time; none is lost, and all keys are free."""
    redis, mongod, here = servers
    here.start_all(2, concurrency=3)
    ids = send(name, count)

    def done() -> int:
        return len({each["id"] for each in here.story.of("end")} & {*ids})

    for number, fault in enumerate(("kill", "mongod", "kill", "warm", "redis", "kill", "cold", "kill"), 1):
        assert eventually(lambda least=count * number // 10: done() >= least, 300), here.logs()  # type: ignore[misc]
        if fault == "kill":
            kill_one(here)
        elif fault == "mongod":
            mongod.members[0].kill()
            time.sleep(away)
            mongod.members[0].restart()
        elif fault == "redis":
            redis.kill()
            time.sleep(away)
            redis.restart()
        else:
            replace(here, fault)
        if not any(worker.process.poll() is None for worker in here.workers):  # as plain Celery, without its broker
            here.start(concurrency=3)
    assert eventually(lambda: done() == len(ids), 600), (done(), len(ids), here.logs())
    assert eventually(here.is_quiet, 120)
    story = here.story
    print(f"\n{count} tasks: {story.count('begin')} runs, {story.summary()}")  # noqa: T201 - figures
    assert [story.overlaps(f"{name}-{number}") for number in range(KEYS)] == [0] * KEYS
    keys = [f"{name}-{number}{more}" for number in range(KEYS) for more in ("", "-outer")]
    assert eventually(lambda: not any(held(mongod, here, key) for key in keys), 30)


def held(mongod: ReplicaSet, here: Place, key: str) -> list[Any]:
    """Who holds a key in the MongoDB of the workers."""
    with MongoClient[dict[str, Any]](mongod.uri) as client:
        document = client[here.environment["MONGODB_NAME"]]["mongolock_locks"].find_one({"_id": key}) or {}
    return list(document.get("holders", []))
