"""Worker processes that end: what they hold is released."""

from __future__ import annotations

from celery.exceptions import WorkerLostError
from celery.signals import task_failure, worker_process_shutdown

from ...backends.base import close_backends
from ...engine.logs import WARNING, log
from ...engine.text_checks import tidy_fact
from ...exceptions import LockError
from ...owners import CLEANUP_TIMEOUT, release_holders


@worker_process_shutdown.connect(weak=False, dispatch_uid="django_mongolock.close")
def _release_all(**kwargs: object) -> None:
    """A prefork worker's process leaves by `os._exit`, which runs no exit hooks."""
    close_backends()


@task_failure.connect(weak=False, dispatch_uid="django_mongolock.lost")
def _release_locks_of_killed(task_id: str, exception: object, **kwargs: object) -> None:
    """Release what a task held whose process was killed and which does not come back, before its leases end.

    Celery calls this in the worker's main process, which sees that the other is gone.
    """
    if not isinstance(exception, WorkerLostError):
        return
    try:
        release_holders(tidy_fact(task_id), gone=True, timeout=CLEANUP_TIMEOUT)
    except LockError as error:
        log(
            WARNING,
            "the locks of a killed task are not released: they end with their leases",
            task=task_id,
            error=error,
        )
