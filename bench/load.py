"""An hour's worth of locking in minutes, to find what grows.

    python3 dev.py load [--quick]

Two parts: `cycles` (threads and tasks take, contend for, try, and give up locks), and `pool` (a client with a single
connection). Each prints a table. The exit code is 1 when something grew, or a lock was lost.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from bench.measure import Cell, Table, as_text
from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockError, LockLost, LockNotAcquired
from testproject.servers import mongodb

DATABASE: Final = "mongolock_load"
THREADS: Final = 4
#: The bytes by which the memory of the process may grow, in addition to a twentieth. The interpreter and the driver
#: keep some.
MEMORY: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, with a number before and after, or only after, and its limit."""

    what: str
    after: float
    most: float
    before: float | None = None

    @property
    def ok(self) -> bool:
        return self.after <= self.most


class World:
    """Several sessions with a collection of their own."""

    def __init__(self, uri: str, sessions: int, **options: Any) -> None:
        self.client = MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=30_000)
        self.locks = self.client[DATABASE][f"load_{uuid.uuid4().hex}"]
        config = StoreConfig({"host": uri, **options}, DATABASE, self.locks.name)
        self.sessions = [Session(MongoStore(config)) for _ in range(sessions)]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.locks.drop()
        self.client.close()

    def left(self) -> int:
        """Return the number of holders and waiters, without tombstones."""
        return sum(len(found["holders"]) + len(found["waiters"]) for found in self.locks.find())


def lock(session: Session, key: str, wait: float | None = 60.0, **terms: Any) -> MongoLock:
    return MongoLock(lambda: session, (key,), Terms(**terms), LockOptions(wait=wait))


# Checks for growth


def memory() -> int:
    """Return the bytes of this process that are in memory."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(world: World) -> dict[str, float]:
    """Return everything that may leak, while nothing runs."""
    gc.collect()
    status = world.client.admin.command("serverStatus")
    ours = sum(str(type(thing).__module__).startswith("django_mongolock") for thing in gc.get_objects())
    return {
        "threads": threading.active_count(),
        "connections": status["connections"]["current"],
        "cursors": status["metrics"]["cursor"]["open"]["total"],
        "memory, bytes": memory(),
        "objects of ours": ours,
        "grants, waiting, removals": sum(session.known for session in world.sessions),
        "documents": world.locks.count_documents({}),
        "bytes of the largest document": max(
            (len(str(found)) for found in world.locks.find({}, {"tombstones": 0})), default=0
        ),
        "holders and waiters": world.left(),
    }


#: The growth allowed for each measured value. The pools open connections when they happen to need them.
ROOM: Final[dict[str, float]] = {"connections": 4, "cursors": 2, "objects of ours": 20}


def grown(before: dict[str, float], after: dict[str, float]) -> list[Row]:
    """Return the rows of the values measured twice."""
    rows = []
    for what, first in before.items():
        room = {"memory, bytes": MEMORY + first / 20, "bytes of the largest document": first / 5}.get(what)
        rows.append(Row(what, after[what], first + (ROOM.get(what, 0) if room is None else room), first))
    return rows


def cycle(session: Session, number: int, chance: random.Random) -> None:
    """Use locks as a busy process does."""
    with lock(session, f"own:{threading.get_ident() % 8}"):
        pass
    with contextlib.suppress(LockNotAcquired), lock(session, "contended", wait=chance.choice([0, 0.002, 30])):
        pass
    with contextlib.suppress(LockNotAcquired), lock(session, "readers", wait=30, mode="shared", capacity=2**31 - 1):
        pass
    with contextlib.suppress(ValueError, LockError), lock(session, f"failing:{number % 4}", wait=5):
        raise ValueError(number)
    if number % 50 == 0:
        asyncio.run(given_up(session))


async def given_up(session: Session) -> None:
    """Start waiting tasks and cancel them at some moment."""

    async def take() -> None:
        async with lock(session, "contended", wait=30):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(take()) for _ in range(4)]
    await asyncio.sleep(random.uniform(0, 0.01))
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Do *work* in so many threads. Raise the error of any thread."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def settled(world: World) -> None:
    """Wait until all cancelled acquisitions are cleaned up."""
    end = clock.now() + 30
    while (world.left() or any(session.background.pending for session in world.sessions)) and clock.now() < end:
        time.sleep(0.05)


def cycles(uri: str, count: int) -> list[Row]:
    """Make *count* acquisitions after a tenth as many to warm up.

    In the end, everything must be as after the warm-up.
    """
    world = World(uri, 2)

    def some(rounds: int) -> None:
        def work(number: int) -> None:
            chance = random.Random(number)
            for round_ in range(rounds // THREADS // 4):
                cycle(world.sessions[number % 2], round_, chance)

        in_threads(THREADS, work)
        settled(world)

    try:
        some(max(400, count // 10))
        before, started = measure(world), clock.now()
        some(count)
        seconds = clock.now() - started
        return [*grown(before, measure(world)), Row("milliseconds an acquisition", seconds / count * 1000, 1_000)]
    finally:
        world.close()


# Too few connections


def pool(uri: str, seconds: float) -> list[Row]:
    """Lock with a single connection in the client's pool. Listening alone would use it up."""
    world = World(uri, 1, maxPoolSize=1)
    (session,) = world.sessions
    lost = 0

    def work(number: int) -> None:
        nonlocal lost
        end = clock.now() + seconds
        while clock.now() < end:
            try:
                with lock(session, f"k{number % 2}", lease=5, margin=1, waiter_lease=5):
                    time.sleep(0.05)
            except LockLost:
                lost += 1

    with lock(session, "kept", lease=5, margin=1) as kept:
        in_threads(THREADS, work)
        was_kept = kept.held
    turns = sum(found["acquisitions"] for found in world.locks.find())
    rows = [
        Row("locks that were lost", lost + (not was_kept), 0),
        Row("seconds for a turn", seconds * 2 / max(1, turns), 2),
        Row("holders and waiters", world.left(), 0),
    ]
    world.close()
    return rows


def table(part: str, rows: list[Row]) -> str:
    """Return the rows as text."""
    cells: list[list[Cell]]
    cells = [[row.what, row.before, row.after, row.most, "" if row.ok else "TOO MUCH"] for row in rows]
    return as_text(Table(part, ["what", "before", "after", "at most", ""], cells))


def parts(uri: str, *, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return the parts by name. An hour of ten acquisitions a second are 36,000."""
    return {"cycles": lambda: cycles(uri, 1_600 if quick else 36_000), "pool": lambda: pool(uri, 3 if quick else 30)}


def main(arguments: list[str]) -> int:
    """Run all parts. Return 1 if something grew."""
    logging.getLogger("django_mongolock").addHandler(logging.NullHandler())  # the tables have all that matters
    good = True
    with mongodb() as uri:
        for name, part in parts(uri, quick=arguments == ["--quick"]).items():
            rows = part()
            print(table(name, rows), flush=True)
            good = good and all(row.ok for row in rows)
    print("nothing grew" if good else "something grew, or went wrong: see TOO MUCH above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
