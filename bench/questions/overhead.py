"""What does the library cost around its commands: the decorator, the import, the first lock of a process?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from bench.bench import Bench
from bench.contenders import OURS
from bench.measure import Data, Goal, Piece, Spread, Table, interleaved, median
from bench.ours import in_thread
from bench.workers import State, workers
from django_mongolock import mongo_lock, mongo_locked
from django_mongolock.engine import clock

#: What is imported, in an interpreter of its own.
IMPORTS: Final = {
    "nothing": "pass",
    "django_mongolock": "import django_mongolock",
    "pymongo": "import pymongo",
    "pymongo, django.http, asyncio": "import asyncio, pymongo, django.http",
    "redis": "import redis",
    "kazoo.client": "import kazoo.client",
    "filelock": "import filelock",
}

#: A process that has started, and acquires two locks: how long each takes, in ms.
FIRST: Final = """
import time
import django
from django_mongolock import mongo_lock

django.setup()
for key in ("first", "second"):
    before = time.perf_counter()
    with mongo_lock(f"bench-{key}"):
        print((time.perf_counter() - before) * 1000)
"""


def overhead(bench: Bench) -> Iterator[Piece]:
    """The decorator on a view, importing the library, and the first lock of a process."""
    yield from decorator(bench)
    yield from imports(bench)
    yield from first_lock(bench)


def decorator(bench: Bench) -> Iterator[Piece]:
    with workers(1) as (worker,):
        bench.open([worker], OURS)
        count = bench.some(20, 100)
        found = interleaved(VIEWS, bench.some(2, 20), lambda name: worker.call(call_view, name, count), bench.failed)
    made = Table(
        "A view, called directly",
        ["view", "ms", "CPU, µs"],
        note="In a thread, as in most servers. CPU: of this process.",
    )
    for name, runs in found.items():
        made.rows.append([name, Spread.of(run[0] for run in runs), round(median([run[1] for run in runs]))])
    yield made
    if {"decorated", "with mongo_lock(…)"} <= set(found):
        costs = [a[1] - b[1] for a, b in zip(found["decorated"], found["with mongo_lock(…)"], strict=True)]
        yield Data("decorator, µs of CPU", median(costs))


def plain(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse(b"ok")


@mongo_locked("bench-order:{order_id}")
def decorated(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse(b"ok")


def with_block(request: HttpRequest, order_id: int) -> HttpResponse:
    with mongo_lock(f"bench-order:{order_id}"):
        return HttpResponse(b"ok")


VIEWS: Final[dict[str, Callable[..., Any]]] = {
    "plain": plain,
    "with mongo_lock(…)": with_block,
    "decorated": decorated,
}


def call_view(state: State, name: str, count: int) -> tuple[float, float]:
    """In the worker: milliseconds and microseconds of CPU of a call."""
    view, request = VIEWS[name], RequestFactory().get("/")

    def calls() -> list[float]:
        times = []
        for _ in range(count):
            before = clock.now()
            view(request, order_id=5)
            times.append(clock.now() - before)
        return times

    cpu = time.process_time()
    times = in_thread(calls)
    return median(times) * 1000, (time.process_time() - cpu) / count * 1e6


def imports(bench: Bench) -> Iterator[Piece]:
    def measure(name: str) -> float:
        before = clock.now()
        subprocess.run([sys.executable, "-c", IMPORTS[name]], check=True, capture_output=True)
        return (clock.now() - before) * 1000

    found = interleaved(IMPORTS, bench.some(1, 7), measure, bench.failed)
    made = Table("Importing it", ["module", "ms", "ms more than nothing"], note="In a separate interpreter.")
    for name, times in found.items():
        more = [a - b for a, b in zip(times, found["nothing"], strict=True)]
        made.rows.append([name, Spread.of(times), Spread.of(more)])
    yield made


def first_lock(bench: Bench) -> Iterator[Piece]:
    settings = {"DJANGO_SETTINGS_MODULE": "testproject.settings", "MONGODB_URI": bench.world.uri("mongo")}

    def measure() -> list[float]:
        command = [sys.executable, "-c", FIRST]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **settings})
        return [float(line) for line in done.stdout.splitlines()]

    measure()  # makes the collection, and both documents
    first, second = zip(*(measure() for _ in range(bench.some(2, 9))), strict=True)
    yield Table(
        "The first lock of a process",
        ["lock", "acquired after, ms"],
        [["the first", Spread.of(first)], ["the second", Spread.of(second)]],
        note="In the main thread, when Django has been set up. The first one connects.",
    )
    yield Goal("the first lock of a process, ms", median(first), 50.0)
