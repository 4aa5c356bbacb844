"""What other packages need: queues, Django REST framework, Prometheus, OpenTelemetry. Each is imported when needed."""

from __future__ import annotations

import sys
from typing import Any

from django.utils.module_loading import import_string

from ..conf import get_settings
from ..context import running_celery_task
from ..decorator.contention import Unlocked, register_deliveries, register_policy, register_responder
from ..exceptions import LockError


def register() -> None:
    """Add what Celery and Django REST framework do about a busy lock to the policies of `mongo_locked`.

    Where Celery is imported already, as in a worker, also connect to its signals.
    """
    register_policy("retry", _retry)
    register_deliveries(_find_deliveries)
    register_responder(_raise_api_exception)
    if "celery" in sys.modules:
        from . import celery  # noqa: F401 - connects to its signals


def _retry(error: LockError) -> Any:
    if (path := get_settings().RETRY) is not None and running_celery_task() is None:
        return import_string(path)(error)
    if "celery" not in sys.modules:
        raise error  # so this runs in no task, and Celery may not even be installed
    from .celery import retry_current_task

    return retry_current_task(error)


def _find_deliveries() -> Any:
    if running_celery_task() is None:
        return None
    from .celery import retry_task

    return retry_task


def _raise_api_exception(error: Unlocked, arguments: list[object]) -> None:
    """In a view that is given a request of Django REST framework, raise the exception that it makes a response of.

    Around its view classes there is no such request: Django's handler calls them, and would not know the exception.
    """
    module = sys.modules.get("rest_framework.request")
    if module is not None and any(issubclass(type(argument), module.Request) for argument in arguments):
        from .rest_framework import LockAPIException

        raise LockAPIException(error) from error
