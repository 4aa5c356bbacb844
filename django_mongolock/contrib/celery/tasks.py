"""The task that clears stale locks."""

from __future__ import annotations

from celery import shared_task

from ...decorator.mongo_locked import mongo_locked
from ...engine.rule.options import Seconds, as_seconds
from ...inspection.kinds import Choice, Swept
from ...inspection.named_locks import NamedLocks


@shared_task(name="django_mongolock.clear_stale_locks")
@mongo_locked("django_mongolock.clear_stale_locks", wait=0, on_contention="skip")
def clear_stale_locks(older_than: Seconds = 0.0, using: str | None = None) -> dict[str, int]:
    """Clear the stale locks of this project as ``manage.py clear_stale_locks`` does. Meant for the beat schedule.

    older_than: only those whose lease ended at least this many seconds ago.
    """
    done = Swept()
    for part in NamedLocks(using).clear(Choice("stale", older_than=as_seconds(older_than))):
        done.count_in(part)
    return {"found": done.found, "cleared": done.count}
