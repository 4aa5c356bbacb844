"""What other packages need: queues, Django REST framework, Prometheus, OpenTelemetry. Each is imported when needed."""

from __future__ import annotations

import sys

from ..context import running_celery_task
from ..decorator import policies
from ..decorator.policies import Policy, Unlocked


def register() -> None:
    """Add what Celery and Django REST framework do about a busy lock to the policies of `mongo_locked`.

    Where Celery is imported already, as in a worker, also connect to its signals.
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
    """In a view that is given a request of Django REST framework, raise the exception that it makes a response of.

    Around its view classes there is no such request: Django's handler calls them, and would not know the exception.
    """
    module = sys.modules.get("rest_framework.request")
    if module is not None and any(issubclass(type(argument), module.Request) for argument in arguments):
        from .rest_framework import LockAPIException

        raise LockAPIException(error) from error
