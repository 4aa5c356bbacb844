"""The work under locks. A number is read, and written a moment later. Without a lock, some counts get lost."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import django
from django.http import HttpRequest, HttpResponse
from django.urls import path

if not django.apps.apps.ready:  # each server imports this module first
    django.setup(set_prefix=False)

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db import connections

from django_mongolock import mongo_lock, mongo_locked
from django_mongolock.contrib import queues

MOMENT = 0.01


def _numbers() -> Any:
    locks: Any = connections["locks"]
    return locks.get_collection("numbers")


def number(key: str) -> int:
    """Return how far *key* was counted."""
    found: int = (_numbers().find_one({"_id": key}) or {"n": 0})["n"]
    return found


def write(key: str, value: int) -> None:
    _numbers().replace_one({"_id": key}, {"n": value}, upsert=True)


def add_one(key: str) -> None:
    before = number(key)
    time.sleep(MOMENT)
    write(key, before + 1)


def count(key: str) -> None:
    with mongo_lock(key):
        add_one(key)


later: Any = getattr(queues, f"retry_in_{os.environ.get('PLATFORM_QUEUE')}", "raise")


@mongo_locked("{key}", wait=0, on_contention=later)
def count_or_come_back(key: str) -> None:
    """Count in a task that does not wait in its worker."""
    add_one(key)


def count_view(request: HttpRequest, key: str) -> HttpResponse:
    count(key)
    return HttpResponse(str(os.getpid()))


async def acount(key: str) -> None:
    async with mongo_lock(key):
        before = await asyncio.to_thread(number, key)
        await asyncio.sleep(MOMENT)
        await asyncio.to_thread(write, key, before + 1)


async def acount_view(request: HttpRequest, key: str) -> HttpResponse:
    await acount(key)
    return HttpResponse(str(os.getpid()))


def metrics_view(request: HttpRequest) -> HttpResponse:
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return HttpResponse(generate_latest(registry), content_type="text/plain")


urlpatterns = [
    path("count/<path:key>", count_view),
    path("acount/<path:key>", acount_view),
    path("metrics", metrics_view),
]
wsgi = get_wsgi_application()
asgi = get_asgi_application()
