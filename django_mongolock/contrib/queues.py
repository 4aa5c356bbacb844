"""Functions for ``on_contention=`` by which a task of another queue than Celery comes back while its lock is held.

Each gets the error and the arguments of the call. The function for RQ raises the error outside a job.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from django.utils import timezone

from ..exceptions import LockNotAcquired

__all__ = ["aretry_in_django", "retry_in_django", "retry_in_dramatiq", "retry_in_huey", "retry_in_rq"]

#: Bounds of the time until a task comes back, in seconds.
SHORTEST, LONGEST = 0.5, 5.0


def retry_in_dramatiq(error: LockNotAcquired, /, *args: Any, **kwargs: Any) -> Any:
    """Have Dramatiq send the message again, by its middleware Retries (one of its defaults).

    This uses up one of its retries. Give the actor ``max_retries=None``.
    """
    from dramatiq.errors import Retry

    raise Retry(str(error), delay=round(1000 * _delay(error))) from error


def retry_in_huey(error: LockNotAcquired, /, *args: Any, **kwargs: Any) -> Any:
    """Have Huey run the task again, without using up one of its retries."""
    from huey.exceptions import RetryTask

    raise RetryTask(str(error), delay=_delay(error)) from error


def retry_in_rq(error: LockNotAcquired, /, *args: Any, **kwargs: Any) -> Any:
    """Have RQ run the job again, under its own id, without using up one of its retries. A scheduler has to run."""
    from rq import Retry, get_current_job

    if get_current_job() is None:
        raise error
    return Retry(max=2**31, interval=max(1, round(_delay(error))))


def retry_in_django(error: LockNotAcquired, context: Any, /, *args: Any, **kwargs: Any) -> str:
    """Enqueue a task of Django or django-tasks again, as a new one. Return the id of the new task.

    For ``@task(takes_context=True)``. Raises InvalidTask if its backend cannot run a task later.
    """
    return str(_later(error, context).enqueue(*args, **kwargs).id)


async def aretry_in_django(error: LockNotAcquired, context: Any, /, *args: Any, **kwargs: Any) -> str:
    """See retry_in_django()."""
    return str((await _later(error, context).aenqueue(*args, **kwargs)).id)


def _later(error: LockNotAcquired, context: Any) -> Any:
    """Return the task of this context, to be run in a while."""
    if not hasattr(context, "task_result"):
        raise TypeError("retry_in_django() needs the context of the task: @task(takes_context=True)") from error
    return context.task_result.task.using(run_after=timezone.now() + timedelta(seconds=_delay(error)))


def _delay(error: LockNotAcquired) -> float:
    """Return the seconds until the task comes back. A random part keeps tasks apart."""
    return random.uniform(0.5, 1.0) * min(LONGEST, max(SHORTEST, error.retry_after))  # noqa: S311 - spreads load
