"""`on_contention="retry"`: a task that finds its lock busy comes back later, without using up its retries."""

from __future__ import annotations

import random
from typing import Any, NoReturn

from celery import current_task
from celery.exceptions import Reject, Retry

from ...exceptions import LockNotAcquired

#: Bounds of the time until a task comes back, in seconds.
SHORTEST, LONGEST = 1.0, 5.0


def retry_current_task(error: LockNotAcquired) -> NoReturn:
    """Send the running task again, with a countdown of about the rest of the holder's lease, and end this run.

    The number of its retries does not change, since a busy lock is not a failure of the task. Raises Retry for Celery.
    A task that is called directly or runs eagerly cannot come back: it raises *error*.
    """
    task: Any = current_task
    if not task or task.request.called_directly or task.request.is_eager:
        raise error
    countdown = _jittered(error.retry_after)
    again = task.signature_from_request(task.request, countdown=countdown, retries=task.request.retries)
    try:
        again.apply_async()
    except Exception as failure:
        # The broker does not answer: have it deliver this message again, so that the task is not lost.
        raise Reject(failure, requeue=True) from failure
    outcome: Exception = Retry(str(error), error, countdown, sig=again)  # type: ignore[arg-type]
    raise outcome


def _jittered(seconds: float) -> float:
    """A time between half of *seconds* and *seconds*, so that tasks that wait for one lock do not all come at once."""
    return random.uniform(0.5, 1.0) * min(LONGEST, max(SHORTEST, seconds))  # noqa: S311 - spreads load
