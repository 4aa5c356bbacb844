"""`idempotent` on tasks, with a real Redis and real workers: sent twice, delivered twice, killed between."""

from __future__ import annotations

import os
import sys

import pytest

from tests import parts
from tests.celery import app as tasks
from tests.celery.conftest import MakePlace

pytestmark = [
    pytest.mark.long,
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are gone"),
]


def test_sent_twice(place: MakePlace, name: str) -> None:
    """Two messages with one key: while the first runs, the second comes back; both have the result of the first."""
    here = place()
    here.start(concurrency=2)
    first, second = (tasks.charged.delay(name, 2) for _ in "12")
    assert first.get(timeout=60) == second.get(timeout=60) != os.getpid(), here.logs()
    assert tasks.charged.delay(name, 2).get(timeout=60) == first.get(timeout=1)
    assert here.story.count("begin") == 1, here.logs()


def test_killed_when_it_was_done(place: MakePlace, name: str) -> None:
    """F49: its process dies before the message is acknowledged: the next delivery reports the result of the first."""
    here = place()
    here.start(concurrency=1)
    result = tasks.charged.delay(name, 0, True)
    (pid,) = {result.get(timeout=60)}
    assert here.story.count("died") == 1, here.logs()
    (begin,) = here.story.of("begin")
    assert begin["pid"] == pid
