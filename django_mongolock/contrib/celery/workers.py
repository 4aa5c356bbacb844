"""Worker processes that end: what they hold is released."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import task_failure, task_revoked, worker_process_shutdown

from ...backends import close_backends
from ...context import task_place
from ...engine.logs import WARNING, log
from ...exceptions import LockError
from ...owners import release_gone

#: How long to wait for the end of a process that was told to end, and how often to look, in seconds.
LONGEST_END: Final = 10.0
LOOK_EVERY: Final = 0.1


@worker_process_shutdown.connect(weak=False, dispatch_uid="django_mongolock.close")
def _release_all(**kwargs: object) -> None:
    """A prefork worker's process leaves by `os._exit`, which runs no exit hooks."""
    close_backends()


@task_failure.connect(weak=False, dispatch_uid="django_mongolock.lost")
def _failed(sender: Any, task_id: str, exception: object, **kwargs: object) -> None:
    """The process of a task was killed, and the task does not come back. Celery calls this in the main process."""
    if isinstance(exception, (WorkerLostError, TimeLimitExceeded)):
        _release_after(sender.name, task_id)


@task_revoked.connect(weak=False, dispatch_uid="django_mongolock.terminated")
def _terminated(sender: Any, request: Any, terminated: bool = False, **kwargs: object) -> None:
    """The process of a task was told to end: `revoke(terminate=True)`. Celery calls this in the main process."""
    if terminated:
        _release_after(sender.name, request.id)


def _release_after(name: str, task_id: str) -> None:
    """Release what the task held as soon as its process is gone. A thread waits for that: this one reaps processes."""
    arguments = (task_place(name, task_id),)
    threading.Thread(target=_release, args=arguments, name="mongolock-killed-task", daemon=True).start()


def _release(place: str) -> None:
    end = time.monotonic() + LONGEST_END
    try:
        while release_gone(place) and time.monotonic() < end:
            time.sleep(LOOK_EVERY)
    except LockError as error:
        log(WARNING, "the locks of a killed task are not released: they end with their leases", task=place, error=error)
