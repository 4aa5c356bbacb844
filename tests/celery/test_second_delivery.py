"""F95: a message that is delivered again while its task runs."""

from __future__ import annotations

import sys

import pytest

from tests import parts
from tests.celery import app as tasks
from tests.celery.conftest import MakePlace
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are gone"),
]


def test_one_run(place: MakePlace, name: str) -> None:
    """F49: a task that runs longer than the visibility timeout runs once, and then there is peace."""
    visibility, seconds = 1.5, 4.0
    here = place(visibility=visibility)
    here.start()
    result = tasks.late.delay(name, "a", seconds)
    assert eventually(lambda: here.story.count("end"), 60 + seconds), here.logs()
    assert here.story.count("delivery", id=result.id, again=True) >= 1
    assert eventually(here.is_quiet, 60), here.logs()
    assert (here.story.count("begin"), here.story.overlaps("a")) == (1, 0), here.logs()
    assert result.get(timeout=10) == "a"
    # One message at a time, each with about the half of the timeout between.
    assert here.story.count("message") <= 2 + 60 + 4 * seconds / visibility


def test_the_first_run_dies(place: MakePlace, name: str) -> None:
    """The second delivery is not dropped: when the first run dies, it runs."""
    here = place(visibility=1)
    here.start_all(2, concurrency=1)
    result = tasks.late.delay(name, "a", 4)
    assert eventually(lambda: here.story.count("retry", id=result.id), 60), here.logs()
    (begin,) = here.story.of("begin")
    tasks.killed(begin["pid"], here.directory)
    here.of(begin["pid"]).kill()
    assert eventually(lambda: here.story.count("end"), 60), here.logs()
    assert eventually(here.is_quiet, 60), here.logs()
    assert (here.story.count("begin"), here.story.overlaps("a")) == (2, 0)
    assert result.get(timeout=10) == "a"
