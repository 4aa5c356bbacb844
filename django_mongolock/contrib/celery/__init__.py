"""Celery tasks that come back when their lock is free, tasks that are queued once, and workers that release their
locks.
"""

from .enqueue import OnceTask, enqueue_once
from .retry_task import retry_current_task
from .workers import clear_stale_locks

__all__ = ["OnceTask", "clear_stale_locks", "enqueue_once", "retry_current_task"]
