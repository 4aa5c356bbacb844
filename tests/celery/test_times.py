"""The check that the time limits of tasks and the visibility timeout of the broker fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from django_mongolock.contrib.celery import workers

REDIS = "redis://127.0.0.1/0"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that checks an application with these settings and a task with these options, and returns the
    ids."""

    def check(broker: str = REDIS, visibility: Any = None, conf: Any = None, **options: Any) -> list[str | None]:
        app = Celery("times", broker=broker, set_as_current=False)
        app.conf.update(broker_transport_options={"visibility_timeout": visibility}, **(conf or {}))

        @app.task(name="tests.long", shared=False, **options)
        def long() -> None: ...

        app.finalize()
        # without those of other tests
        seen = SimpleNamespace(conf=app.conf, tasks={"tests.long": app.tasks["tests.long"]})
        monkeypatch.setattr(workers, "current_app", seen)
        return [message.id for message in workers.check_times(app_configs=None)]

    return check


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"acks_late": True, "time_limit": 601}, True),
        ({"acks_late": True, "soft_time_limit": 601}, True),
        ({"acks_late": True, "conf": {"task_time_limit": 601}}, True),
        ({"time_limit": 601, "conf": {"task_acks_late": True}}, True),
        ({"acks_late": True, "time_limit": 600}, False),
        ({"acks_late": True, "time_limit": 600, "conf": {"task_time_limit": 601}}, False),
        ({"acks_late": True}, False),  # without a limit, nothing says how long it runs
        ({"time_limit": 601}, False),
        ({"acks_late": True, "time_limit": 601, "broker": "amqp://127.0.0.1"}, False),
        ({"acks_late": True, "time_limit": 601, "broker": "sqs://"}, True),
        ({"acks_late": True, "time_limit": 601, "conf": {"broker_url": [REDIS, REDIS]}}, True),
    ],
)
def test_time_limits(found: Any, options: dict[str, Any], warns: bool) -> None:
    """W008: A task that may run longer than the visibility timeout is delivered twice."""
    assert found(visibility=600, **options) == (["mongolock.W008"] if warns else [])


def test_the_timeout_that_is_not_set(found: Any) -> None:
    assert found(acks_late=True, time_limit=3_601) == ["mongolock.W008"]
    assert found(acks_late=True, time_limit=3_600) == []
    assert found(broker="sqs://", acks_late=True, time_limit=1_801) == ["mongolock.W008"]
