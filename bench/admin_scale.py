"""The admin and the commands with a million lock documents: how much longer than with a thousand?

    python -m bench.admin_scale [--documents 1000000] [--held 10000] [--queues 0] [--runs 15] [--json FILE]

Two databases of one server: one with 1,000 documents, of which 200 are held (full pages), one with so many. Each page
is asked for in turn in the one and in the other, and what is compared are the medians; so a busy machine slows both.
With --queues, so many of the held locks of the large database have 1,000 waiters each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient, monitoring
from pymongo.collection import Collection

from testproject.servers import mongodb

Document = dict[str, Any]
LIST: Final = "/admin/django_mongolock/lock/"
#: What is asked for, by name: the address, or what it is sent.
PAGES: Final[dict[str, str]] = {
    "list, held": "",
    "list, held, page 2": "?p=2",
    "list, waited for": "?state=waited",
    "list, stale": "?state=stale",
    "list, free": "?state=free",
    "list, all": "?state=all",
    "list, all, by lease": "?state=all&o=5",
    "list, held, by waiters": "?o=6",
    "list, held, by longest wait": "?o=7",
    "list, kept": "?state=kept",
    "list, shared": "?mode=shared",
    "search: start of a key, held": "?q=held:00000",
    "search: start of a key, all": "?q=free:00000&state=all",
    "search: nothing found, all": "?q=zzz&state=all",
    "search: pattern, all": "?q=free:0000*7&state=all",
    "search: a host": "?q=web-1",
    "search: an owner, all": "?q=job-1&state=all",
    "detail": "held:0000001/change/",
    "waiters": "held:0000001/waiters/",
    "dashboard": "dashboard/?part=live",
}
#: How much longer a page may take.
MOST: Final = 3.0


class Commands(monitoring.CommandListener):
    """Counts what the engine sends."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.count += event.command_name not in ("hello", "ismaster", "endSessions")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Nothing to do."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing to do."""


def fill(collection: Collection[Document], documents: int, held: int) -> None:
    """Make so many locks, of which *held* are held: a hundred of these shared, and a hundred waited for."""
    from django_mongolock.engine.indexes import ensure_indexes
    from tests.support.lock_documents import clock, document, entry, waiter

    now = clock(collection.database.client)
    collection.drop()
    block = 1_000
    free = max(0, documents - held)
    seeds = [document(f"free:{number:07d}", change={"clock": now}) for number in range(min(block, free))]
    if seeds:
        collection.insert_many(seeds)
    if free > block:
        times = {"$range": [0, -(-free // block)]}
        number = {"$add": [{"$multiply": ["$n", block]}, {"$toInt": {"$substrBytes": ["$_id", 5, 7]}}]}
        text = {"$concat": ["free:", {"$substrBytes": [{"$toString": {"$add": [number, 10_000_000]}}, 1, 7]}]}
        collection.aggregate(
            [
                {"$addFields": {"n": times}},
                {"$unwind": "$n"},
                {"$addFields": {"_id": text}},
                {"$unset": "n"},
                {"$out": collection.name},
            ],
            allowDiskUse=True,
        )
    ensure_indexes(collection)
    holder = entry(1, left=36_000)
    shared = entry(1, left=36_000, mode="shared", owner="job-1")
    for start in range(0, held, block):
        collection.insert_many(
            document(
                f"held:{n:07d}",
                [shared if n % (held // 100) == 0 else holder],
                [waiter(2, left=36_000)] if n % (held // 100) == 1 else [],
                {"clock": now},
            )
            for n in range(start, min(held, start + block))
        )


def fill_queues(collection: Collection[Document], queues: int) -> None:
    """Let a thousand wait for each of so many held locks."""
    from tests.support.lock_documents import waiter

    for number in range(queues):
        waiters = [waiter(n, left=36_000, host=f"web-{n % 8}", session=f"s{n % 8}") for n in range(1_000)]
        collection.update_one({"_id": f"held:{number:07d}"}, {"$set": {"waiters": waiters}})


@contextlib.contextmanager
def site(uri: str) -> Iterator[tuple[Any, Commands]]:
    """Django on the server at *uri*; a client that is logged in, and the count of commands."""
    os.environ |= {"MONGODB_URI": uri, "DJANGO_SETTINGS_MODULE": "testproject.settings", "SQLITE_PATH": ":memory:"}
    import django
    from django.test.utils import setup_test_environment

    django.setup()
    setup_test_environment()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connections
    from django.test import Client

    from django_mongolock.backends.base import close_backends

    commands = Commands()
    connections["mongo"].settings_dict["OPTIONS"] = {"event_listeners": [commands]}
    call_command("migrate", verbosity=0)
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    yield client, commands
    close_backends()


def use(database: str) -> None:
    """Look at another database from now on."""
    from django.db import connections

    connections["mongo"].settings_dict["NAME"] = database


def measure(ask: Callable[[], Any]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    ask()
    return (time.perf_counter() - began) * 1_000


def pages(client: Any, commands: Commands, databases: tuple[str, str], runs: int) -> list[Document]:
    """Every page, in the small and in the large database."""
    rows: list[Document] = []
    for name, query in PAGES.items():
        times: dict[str, list[float]] = {database: [] for database in databases}
        sent: dict[str, int] = {}
        for database in databases * 2:  # connect, and warm up
            use(database)
            assert client.get(LIST + query).status_code == 200, query
        for database in databases:
            use(database)
            client.get(LIST + query)
            commands.count = 0
            client.get(LIST + query)
            sent[database] = commands.count
            times[database] += [measure(partial(client.get, LIST + query)) for _ in range(runs)]
        small, large = (statistics.median(times[database]) for database in databases)
        rows.append(row(name, small, large, sent[databases[1]]))
    return rows


STALE: Final = 1_000


def clearing(mongo: MongoClient[Document], commands: Commands, databases: tuple[str, str], runs: int) -> Document:
    """``manage.py clear_stale_locks`` where so many are stale."""
    from django.core.management import call_command

    from tests.support.lock_documents import clock, document, entry

    times: dict[str, list[float]] = {database: [] for database in databases}
    for database in databases * (runs + 1):
        use(database)
        collection = mongo[database]["mongolock_locks"]
        stale = [entry(1, left=-60)]
        collection.insert_many(document(f"stale:{n:07d}", stale, change={"clock": clock(mongo)}) for n in range(STALE))
        commands.count = 0
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - it is no path
            took = measure(lambda: call_command("clear_stale_locks", interactive=False, stdout=nowhere))
        times[database].append(took)
        assert collection.count_documents({"_id": {"$gte": "stale:", "$lt": "stale;"}, "expires_at": None}) == STALE
        collection.delete_many({"_id": {"$gte": "stale:", "$lt": "stale;"}})
    small, large = (statistics.median(times[database][1:]) for database in databases)
    return row(f"clear_stale_locks, {STALE} of them", small, large, commands.count)


def row(name: str, small: float, large: float, sent: int) -> Document:
    """What was measured, also printed."""
    print(f"{name:34} {small:8.1f} ms {large:8.1f} ms  {large / small:5.1f} x  {sent} commands")
    return {"page": name, "small_ms": small, "large_ms": large, "ratio": large / small, "commands": sent}


def main(arguments: list[str]) -> int:
    """Measure; return 1 if a page took too much longer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--held", type=int, default=10_000)
    parser.add_argument("--queues", type=int, default=0)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with mongodb() as uri, MongoClient[Document](uri) as mongo, site(uri) as (client, commands):
        databases = ("mongolock_scale_small", "mongolock_scale_large")
        try:
            fill(mongo[databases[0]]["mongolock_locks"], 1_000, 200)
            took = measure(lambda: fill(mongo[databases[1]]["mongolock_locks"], options.documents, options.held))
            fill_queues(mongo[databases[1]]["mongolock_locks"], options.queues)
            print(f"{options.documents} documents made in {took / 1_000:.0f} s\n")
            rows = pages(client, commands, databases, options.runs)
            rows.append(clearing(mongo, commands, databases, 3))
        finally:
            for database in databases:
                mongo.drop_database(database)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    slow = [row["page"] for row in rows if row["ratio"] > MOST]
    print(f"\nMore than {MOST:g} times as long: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
