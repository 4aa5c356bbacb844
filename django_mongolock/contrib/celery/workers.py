"""Workers: the release of their locks at their end, a check of time limits, and the task that clears stale locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from celery import current_app, shared_task
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import task_failure, task_revoked, worker_process_shutdown
from django.apps import AppConfig
from django.core import checks
from django.core.checks import CheckMessage

from ...backends import close_backends
from ...conf import error, warning
from ...context import task_place
from ...decorator import mongo_locked
from ...engine.logs import WARNING, log
from ...engine.rule.options import Seconds, check_age
from ...exceptions import LockError
from ...inspection.kinds import Choice, Swept
from ...inspection.named_locks import NamedLocks
from ...owners import release_gone
from .enqueue import OnceTask

#: The longest wait for the end of a process that was told to end, and the pause between two looks, in seconds.
LONGEST_END: Final = 10.0
LOOK_EVERY: Final = 0.1


@worker_process_shutdown.connect(weak=False, dispatch_uid="django_mongolock.close")
def _release_all(**kwargs: object) -> None:
    """Release all locks of a prefork worker's process. The process leaves by `os._exit`, and runs no exit hooks."""
    close_backends()


@task_failure.connect(weak=False, dispatch_uid="django_mongolock.lost")
def _failed(sender: Any, task_id: str, exception: object, **kwargs: object) -> None:
    """Release the locks of a task whose process was killed and that does not come back. Celery calls this in the main
    process.
    """
    if isinstance(exception, (WorkerLostError, TimeLimitExceeded)):
        _release_after(sender.name, task_id)


@task_revoked.connect(weak=False, dispatch_uid="django_mongolock.terminated")
def _terminated(sender: Any, request: Any, terminated: bool = False, **kwargs: object) -> None:
    """Release the locks of a task whose process was told to end: `revoke(terminate=True)`.

    Celery calls this in the main process.
    """
    if terminated:
        _release_after(sender.name, request.id)


def _release_after(name: str, task_id: str) -> None:
    """Release the locks of the task as soon as the process that ran it is gone.

    - name: name of the task.

    Another thread asks for a while whether the process is gone, because the calling thread reaps processes.
    """
    arguments = (task_place(name, task_id),)
    threading.Thread(target=_release, args=arguments, name="mongolock-killed-task", daemon=True).start()


def _release(place: str) -> None:
    end = time.monotonic() + LONGEST_END
    try:
        while release_gone(place) and time.monotonic() < end:
            time.sleep(LOOK_EVERY)
    except LockError as error:
        log(WARNING, "the locks of a killed task are not released: they end with their leases", task=place, error=error)


#: The brokers that deliver an unacknowledged message again, and their visibility timeouts in seconds.
BROKERS: Final = {"redis": 3_600.0, "rediss": 3_600.0, "sentinel": 3_600.0, "sqs": 1_800.0}


@checks.register()
def check_once(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the tasks with options of OnceTask are such tasks. Celery accepts any option."""
    tasks: list[Any] = list(current_app.tasks.values())
    plain = sorted(task.name for task in tasks if hasattr(task, "once_key") and not isinstance(task, OnceTask))
    hint = "Write @shared_task(base=OnceTask, once_key=…), with OnceTask from django_mongolock.contrib.celery."
    return [error("E028", f"The task {name} has a once_key, but is no OnceTask.", hint) for name in plain]


@checks.register()
def check_times(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the visibility timeout of the broker against the time limits of the tasks."""
    app: Any = current_app
    visibility = _visibility(app)
    if visibility is None:
        return []
    limits = app.conf.task_time_limit or app.conf.task_soft_time_limit
    late = [task for task in app.tasks.values() if task.acks_late]
    long = sorted(task.name for task in late if (task.time_limit or task.soft_time_limit or limits or 0) > visibility)
    if not long:
        return []
    message = (
        f"The broker delivers a task again after {visibility:g} s (visibility_timeout), but some with acks_late "
        f"may run longer: {', '.join(long[:3])}{', ...' if len(long) > 3 else ''}."
    )
    hint = "Make the visibility_timeout in broker_transport_options longer than the longest time limit."
    return [warning("W008", message, hint)]


def _visibility(app: Any) -> float | None:
    """Return the seconds after which the broker delivers a message again, or None if it never does."""
    urls = app.conf.broker_read_url or app.conf.broker_url or ""
    first = urls if isinstance(urls, str) else urls[0]  # several, for failover
    scheme = first.partition("://")[0].partition("+")[0]
    if scheme not in BROKERS:
        return None
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    return float(given) if isinstance(given, (int, float)) and given > 0 else BROKERS[scheme]


@shared_task(name="django_mongolock.clear_stale_locks")
@mongo_locked("django_mongolock.clear_stale_locks", wait=0, on_contention="skip")
def clear_stale_locks(older_than: Seconds = 0.0, using: str | None = None) -> dict[str, int]:
    """Clear the stale locks of this project as ``manage.py clear_stale_locks`` does. The task is meant for the beat
    schedule.

    - older_than: least number of seconds since the end of the lease.
    """
    done = Swept()
    for part in NamedLocks(using).clear(Choice("stale", older_than=check_age(older_than))):
        done.count_in(part)
    return {"found": done.found, "cleared": done.count}
