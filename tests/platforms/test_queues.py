"""Task queues lose no counts under a lock, whatever their workers are made of."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from testproject.servers import Redis
from tests.platforms.programs import PLATFORMS, ROOT, counted, environment, held, key, program
from tests.support.waiting import eventually

pytestmark = PLATFORMS

TASKS = 20
SEND = "import sys; from tests.platforms import queues; [queues.send(sys.argv[1]) for _ in range(int(sys.argv[2]))]"
CELERY = ("celery", "--app", "tests.platforms.queues:app", "worker", "--loglevel=WARNING", "--concurrency=8")
WORKERS = {
    "celery prefork": (*CELERY, "--pool=prefork"),
    "celery threads": (*CELERY, "--pool=threads"),
    "celery gevent": (*CELERY, "--pool=gevent"),
    "rq": ("rq", "worker-pool", "--num-workers=3", "--burst", "--url={redis}"),
    "dramatiq": ("dramatiq", "tests.platforms.queues", "--processes=2", "--threads=4"),
    "dramatiq gevent": ("dramatiq-gevent", "tests.platforms.queues", "--processes=2", "--threads=4"),
    "huey threads": ("huey_consumer", "tests.platforms.queues.huey", "--workers=4", "--worker-type=thread"),
    "huey processes": ("huey_consumer", "tests.platforms.queues.huey", "--workers=4", "--worker-type=process"),
    "huey greenlets": ("huey_consumer", "tests.platforms.queues.huey", "--workers=4", "--worker-type=greenlet"),
}


def send(name: str, **more: str) -> None:
    """Send the tasks, from a process of their own, as a web server does."""
    command = [sys.executable, "-c", SEND, name, str(TASKS)]
    subprocess.run(command, cwd=ROOT, env=environment(**more), check=True)


@pytest.mark.parametrize("worker", WORKERS)
def test_queue(redis: Redis, worker: str) -> None:
    """All tasks want one lock at once, and each gets it."""
    name, queue = key(), worker.partition(" ")[0]
    more = {"PLATFORM_QUEUE": queue, "PLATFORM_REDIS": redis.uri}
    send(name, **more)
    with program(*(part.format(redis=redis.uri) for part in WORKERS[worker]), **more):
        assert eventually(lambda: counted(name) == TASKS, 200), counted(name)
    assert held(name) == []


@pytest.mark.parametrize("worker", ["rq", "dramatiq", "huey threads"])
def test_coming_back(redis: Redis, worker: str) -> None:
    """F126: A task whose lock is held leaves its worker, and comes back, with the defaults of its queue."""
    name, queue = key(), worker.partition(" ")[0]
    more = {"PLATFORM_QUEUE": queue, "PLATFORM_REDIS": redis.uri, "PLATFORM_LATER": "yes"}
    send(name, **more)
    command = ("rq", "worker", "--with-scheduler", "--url={redis}") if queue == "rq" else WORKERS[worker]
    with ExitStack() as programs:
        for _ in range(2):
            programs.enter_context(program(*(part.format(redis=redis.uri) for part in command), **more))
        assert eventually(lambda: counted(name) == TASKS, 200), counted(name)
    assert held(name) == []


@pytest.mark.parametrize("later", [False, True])
def test_django_tasks(tmp_path: Path, later: bool) -> None:
    """Two workers of the database backend count under a lock.

    - later: whether a task that meets a held lock is retried.
    """
    name = key()
    more = {
        "PLATFORM_QUEUE": "django-tasks",
        "PLATFORM_SQLITE": str(tmp_path / "tasks.sqlite3"),
        "PLATFORM_TASKS": "django_tasks_db.DatabaseBackend",
        "PLATFORM_APPS": "django_tasks,django_tasks_db",
        **({"PLATFORM_LATER": "yes"} if later else {}),
    }
    subprocess.run([sys.executable, "-m", "django", "migrate", "--verbosity=0"], env=environment(**more), check=True)
    send(name, **more)
    counts = f"{name}-inside" if later else name
    with ExitStack() as programs:
        for _ in range(2):
            programs.enter_context(program("django-admin", "db_worker", "--no-startup-delay", **more))
        assert eventually(lambda: counted(counts) == TASKS, 200), counted(counts)
    assert held(name) == []
