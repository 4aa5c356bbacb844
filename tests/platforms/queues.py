"""The tasks, for the library of PLATFORM_QUEUE. The workers and the senders of the tasks import this module."""

from __future__ import annotations

import os
from typing import Any

from django_mongolock import mongo_locked
from django_mongolock.contrib.queues import retry_in_django
from tests.platforms import site

REDIS = os.environ.get("PLATFORM_REDIS", "redis://127.0.0.1:1/0")
QUEUE = os.environ.get("PLATFORM_QUEUE", "")
COUNT = site.count_or_come_back if "PLATFORM_LATER" in os.environ else site.count

if QUEUE == "celery":
    from celery import Celery

    app = Celery("platforms", broker=REDIS, set_as_current=True)
    app.conf.update(worker_prefetch_multiplier=1, worker_enable_remote_control=False, task_ignore_result=True)
    send: Any = app.task(name="count")(site.count).delay
elif QUEUE == "rq":
    from redis import Redis
    from rq import Queue

    queue = Queue(connection=Redis.from_url(REDIS))

    def send(key: str) -> None:
        queue.enqueue(COUNT, key)
elif QUEUE == "dramatiq":
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=REDIS))
    send = dramatiq.actor(COUNT, max_retries=None).send
elif QUEUE == "huey":
    from huey import RedisHuey

    huey = RedisHuey("platforms", url=REDIS)
    send = huey.task()(COUNT)
elif QUEUE == "django-tasks":
    from django_tasks import task

    @task()  # type: ignore[untyped-decorator]
    def count(key: str) -> None:
        """Count in a task. Workers find it by its name in this module."""
        site.count(key)

    @task(takes_context=True)  # type: ignore[untyped-decorator]
    @mongo_locked("{key}", wait=0, on_contention=retry_in_django)
    def count_later(context: object, key: str) -> None:
        """Count in a task that is retried as a new task."""
        site.count(f"{key}-inside")

    send = count_later.enqueue if "PLATFORM_LATER" in os.environ else count.enqueue
