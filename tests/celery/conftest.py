"""The shared brokers, and places with workers."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testproject.servers import RabbitMQ, Redis
from tests import parts
from tests.celery.workers import Place, placed

#: Options of the Redis broker. The broker looks for unacknowledged messages every second, not every hundred.
SOON = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1, "unacked_mutex_expire": 2}

MakePlace = Callable[..., Place]
#: Marks of tests with real workers.
WITH_WORKERS = [
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes are gone"),
]


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    parts.require("RabbitMQ")
    with RabbitMQ() as server:
        yield server


@pytest.fixture
def place(redis: Redis, tmp_path: Path) -> Iterator[MakePlace]:
    with ExitStack() as stack:

        def make(visibility: float = 3600, broker: str = "", **config: Any) -> Place:
            options = {"visibility_timeout": visibility, **SOON, "global_keyprefix": f"{uuid.uuid4().hex}-"}
            if not broker:
                config = {"broker_transport_options": options, **config}
            return stack.enter_context(placed(tmp_path, broker or redis.uri, **config))

        yield make
