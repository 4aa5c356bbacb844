"""Checks that the times of Celery and those of the locks fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from celery import current_app
from django.apps import AppConfig
from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured

from ...conf import get_settings
from ...engine.rule.document import Terms

#: The brokers that deliver a message again which is not acknowledged in time, and their visibility timeouts in seconds.
BROKERS: Final = {"redis": 3_600.0, "rediss": 3_600.0, "sentinel": 3_600.0, "sqs": 1_800.0}


@checks.register()
def check_times(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the visibility timeout of the broker against the time limits of the tasks and the lease of their locks."""
    app: Any = current_app
    visibility = _visibility(app)
    return [] if visibility is None else [*_check_limits(app, visibility), *_check_lease(visibility)]


def _visibility(app: Any) -> float | None:
    """After how many seconds the broker delivers a message again; None if it never does."""
    scheme = str(app.conf.broker_read_url or app.conf.broker_url or "").partition("://")[0].partition("+")[0]
    if scheme not in BROKERS:
        return None
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    return float(given) if isinstance(given, (int, float)) and given > 0 else BROKERS[scheme]


def _check_limits(app: Any, visibility: float) -> Iterator[CheckMessage]:
    limits = app.conf.task_time_limit or app.conf.task_soft_time_limit
    late = [task for task in app.tasks.values() if task.acks_late]
    long = sorted(task.name for task in late if (task.time_limit or task.soft_time_limit or limits or 0) > visibility)
    if long:
        yield checks.Warning(
            f"The broker delivers a task again after {visibility:g} s (visibility_timeout), but some with acks_late "
            f"may run longer: {', '.join(long[:3])}{', ...' if len(long) > 3 else ''}.",
            hint="Make the visibility_timeout in broker_transport_options longer than the longest time limit.",
            id="mongolock.W008",
        )


def _check_lease(visibility: float) -> Iterator[CheckMessage]:
    try:
        settings = get_settings()
    except ImproperlyConfigured:
        return
    lease = Terms(clock_margin=settings.CLOCK_MARGIN).server_lease_of(settings.LEASE)
    if visibility < lease:
        yield checks.Warning(
            f"The broker delivers the task of a dead worker again after {visibility:g} s (visibility_timeout), but "
            f"its lock is free after {lease:g} s (LEASE and margin): until then, the task comes in vain.",
            hint='Make the visibility_timeout in broker_transport_options longer than MONGOLOCK["LEASE"].',
            id="mongolock.W011",
        )
