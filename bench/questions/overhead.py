"""What does the library cost around its commands: the import, the first lock of a process?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from bench.bench import Bench
from bench.measure import Piece, Spread, Table, interleaved
from django_mongolock.engine import clock

#: What is imported, in an interpreter of its own.
IMPORTS: Final = {
    "nothing": "pass",
    "django_mongolock": "import django_mongolock",
    "pymongo, django.http, asyncio": "import asyncio, pymongo, django.http",
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
    """Importing the library, and the first lock of a process."""
    yield from imports(bench)
    yield from first_lock(bench)


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
