"""F97: MongoDB or the broker is away while tasks begin, run and end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from testproject.servers import RabbitMQ, ReplicaSet
from tests.celery import app as tasks
from tests.celery.conftest import WITH_WORKERS, MakePlace
from tests.celery.records import Story
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, *WITH_WORKERS]


@pytest.fixture
def mongod() -> Iterator[ReplicaSet]:
    """Start a MongoDB for the workers that a test can kill."""
    with ReplicaSet() as server:
        yield server


def assert_each_ran_once(story: Story, count: int) -> None:
    """Assert that each task ran, none twice at once, and none failed."""
    assert story.count("state", state="FAILURE") == 0
    assert len({each["name"] for each in story.of("end")}) == count
    assert [story.overlaps(f"{number}") for number in range(count)] == [0] * count


def test_mongodb_stops(place: MakePlace, mongod: ReplicaSet, name: str) -> None:
    """Tasks that begin while MongoDB is away come back when it is there. Running tasks go on."""
    here, count, seconds = place(mongo=mongod.uri), 8, 3
    here.start(concurrency=4)
    tasks.early.delay(f"{name}-0", "0", seconds + 1)
    assert eventually(lambda: here.story.count("begin"), 60), here.logs()
    mongod.members[0].kill()
    for number in range(1, count):
        tasks.early.delay(f"{name}-{number % 10}", f"{number}")
    time.sleep(seconds)
    mongod.members[0].restart()
    assert eventually(lambda: here.story.count("end") >= count, 100 + 4 * seconds), here.logs()
    assert here.story.count("retry") > 0
    assert here.story.count("retry", retries=1) == 0  # none of their own retries is used up
    assert_each_ran_once(here.story, count)


def test_rabbitmq(place: MakePlace, rabbitmq: RabbitMQ, name: str) -> None:
    """With RabbitMQ, tasks for a busy lock come back. The tasks of a killed worker are delivered again at once."""
    here = place(broker=rabbitmq.uri)
    here.start_all(2, concurrency=2)
    for number in range(6):
        tasks.late.delay(f"{name}-{number % 2}", f"{number}", 0.2)
    assert eventually(lambda: here.story.count("end") == 6, 60), here.logs()
    assert_each_ran_once(here.story, 6)
    tasks.late.delay(name, "long", 3)
    assert eventually(lambda: here.story.count("begin", name="long"), 60), here.logs()
    (begin,) = here.story.of("begin", name="long")
    tasks.killed(begin["pid"], here.directory)
    here.of(begin["pid"]).kill()
    assert eventually(lambda: here.story.count("end", name="long"), 60), here.logs()
    assert here.story.overlaps("long") == 0
    assert eventually(here.is_quiet, 30)
