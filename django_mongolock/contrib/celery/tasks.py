"""The task that clears stale locks."""

from __future__ import annotations

from celery import shared_task

from ...backends.base import mongo_store
from ...conf import get_settings
from ...decorator.mongo_locked import mongo_locked
from ...engine.rule.options import Seconds, as_seconds
from ...inspection import operations
from ...inspection.patterns import starting
from ...signals import send, stale_locks_cleared


@shared_task(name="django_mongolock.clear_stale_locks")
@mongo_locked("django_mongolock.clear_stale_locks", wait=0, on_contention="skip")
def clear_stale_locks(older_than: Seconds = 0.0, using: str | None = None) -> dict[str, int]:
    """Clear the stale locks of this project as ``manage.py clear_stale_locks`` does. Meant for the beat schedule.

    older_than: only those whose lease ended at least this many seconds ago.
    """
    store = mongo_store(using)
    which = operations.Which(starting(get_settings().KEY_PREFIX), older_than=as_seconds(older_than))
    done = sum((each for _stale, each in operations.clear_all_stale(store, which)), operations.Cleared())
    if done.cleared:
        send(stale_locks_cleared, count=done.cleared, using=using or get_settings().DATABASE)
    return {"found": done.found, "cleared": done.cleared}
