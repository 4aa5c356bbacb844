"""Celery's side: a locked task that finds its lock busy comes back later, without using up its retries; a worker
process that ends gives back what it holds; and what a project wants for its tasks beside `mongo_locked`.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import Any, NoReturn

from celery import current_task, shared_task
from celery.exceptions import Reject, Retry, WorkerLostError
from celery.signals import task_failure, worker_process_shutdown

from ...backends.base import close_backends, mongo_store
from ...conf import get_settings
from ...decorator.mongo_locked import mongo_locked
from ...decorator.once_per import once_per
from ...engine.document import tidy_fact
from ...engine.logs import WARNING, log
from ...exceptions import LockError, LockNotAcquired
from ...inspect import operations
from ...inspect.patterns import starting
from ...inspect.snapshot import State
from ...owners import take_from
from ...signals import send, stale_locks_cleared
from .once import PROMPT, enqueue_once

__all__ = ["clear_stale_locks", "enqueue_once", "once_per", "retry_current_task"]

#: Bounds of the time until a task comes back, in seconds.
SHORTEST, LONGEST = 1.0, 5.0


def retry_current_task(error: LockNotAcquired) -> NoReturn:
    """Send the running task again, to run after about the time that the holder's lease has left, and end this run.

    The number of its retries stays what it is: waiting for a lock is no failure of the task. Raises Retry, which
    Celery understands. Where there is no later, in a function called directly and in an eager task, raises *error*.
    """
    task: Any = current_task
    if not task or task.request.called_directly or task.request.is_eager:
        raise error
    countdown = _jittered(error.retry_after)
    again = task.signature_from_request(task.request, countdown=countdown, retries=task.request.retries)
    try:
        again.apply_async()
    except Exception as failure:
        # The broker is away: have it deliver this message again rather than lose the task.
        raise Reject(failure, requeue=True) from failure
    outcome: Exception = Retry(str(error), error, countdown, sig=again)  # type: ignore[arg-type]
    raise outcome


def _jittered(seconds: float) -> float:
    """A time between half of *seconds* and *seconds*, so that those who wait for one lock do not come together."""
    return random.uniform(0.5, 1.0) * min(LONGEST, max(SHORTEST, seconds))  # noqa: S311 - spreads load


@worker_process_shutdown.connect(weak=False, dispatch_uid="django_mongolock.close")
def _give_back(**kwargs: object) -> None:
    """A prefork worker's process leaves by `os._exit`, which runs no exit hooks."""
    close_backends()


@task_failure.connect(weak=False, dispatch_uid="django_mongolock.lost")
def _worker_lost(task_id: str, exception: object, **kwargs: object) -> None:
    """The process of a task was killed, and the task does not come back: free what it held, without waiting for the
    lease. Called in the worker's own process, which sees that the other is gone."""
    if not isinstance(exception, WorkerLostError):
        return
    try:
        take_from(tidy_fact(task_id), gone=True, timeout=PROMPT)
    except LockError as error:
        log(WARNING, "locks of a killed task are not released: they end with their leases", task=task_id, error=error)


@shared_task(name="django_mongolock.clear_stale_locks")
@mongo_locked("django_mongolock.clear_stale_locks", wait=0, on_contention="skip")
def clear_stale_locks(older_than: float = 0.0, using: str | None = None) -> dict[str, int]:
    """Clear the stale locks of this project as ``manage.py clear_stale_locks`` does; for the beat schedule.

    older_than: only those whose lease has been over for so many seconds.
    """
    store = mongo_store(using)
    which = operations.Which(starting(get_settings().KEY_PREFIX), older_than=older_than)
    found = cleared = 0
    stale = (seen.key for seen in operations.find_stale(store, which) if seen.state is not State.DAMAGED)
    while keys := list(islice(stale, 1_000)):
        found += len(keys)
        cleared += operations.clear_stale(store, keys, which).cleared
    if cleared:
        send(stale_locks_cleared, count=cleared, using=using or get_settings().DATABASE)
    return {"found": found, "cleared": cleared}
