"""Integrations with queues, Django REST framework, Prometheus and OpenTelemetry. Each is imported when it is needed."""

from __future__ import annotations

import sys

from ..context import running_celery_task
from ..decorator import policies
from ..decorator.policies import Policy, Unlocked


def register() -> None:
    """Add the reactions of Celery and Django REST framework to a busy lock to the policies of `mongo_locked`.

    If Celery is already imported, as in a worker, connect to its signals as well.
    """
    policies.adapters[:], policies.responders[:] = [_in_queue], [_raise_api_exception]
    if "celery" in sys.modules:
        from . import celery  # noqa: F401 - connects to its signals


def _in_queue(policy: Policy) -> Policy:
    if running_celery_task() is not None:
        from .celery.retry_task import InTask

        return InTask(policy)
    return policy


def _raise_api_exception(error: Unlocked, arguments: list[object]) -> None:
    """Raise Django REST framework's exception in a view that gets a request of Django REST framework.

    Around its view classes there is no such request. Django's handler calls these classes, and would not know the
    exception.
    """
    module = sys.modules.get("rest_framework.request")
    if module is not None and any(issubclass(type(argument), module.Request) for argument in arguments):
        from .rest_framework import LockAPIException

        raise LockAPIException(error) from error
