"""Kill participants at random: holders, heads of the queue, waiters. How long does the key stand still?

    python -m bench.kills [--kills 200] [--processes 6] [--json FILE]

Processes contend for one key under short leases. One of them is killed (SIGKILL) every now and then, chosen by its
part in the document, and another is started. A key must not stand still for longer than a lease and a waiter's lease
in a row, and must be free within a lease when all are dead.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import time
import uuid
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError
from testproject.servers import mongodb

DATABASE: Final = "mongolock_benchmarks"
TERMS: Final = Terms(lease=0.6, margin=0.2, waiter_lease=0.6)
PARTS: Final = ("holder", "head", "waiter")


def compete(uri: str, collection: str) -> None:
    """Take the lock and give it back, until killed."""
    session = Session(MongoStore(StoreConfig({"host": uri}, DATABASE, collection)))
    while True:
        lock = MongoLock(lambda: session, ("k",), Options(TERMS, wait=None), lambda: {"pid": os.getpid()})
        with contextlib.suppress(LockError), lock:
            time.sleep(0.02)


def part_of(document: dict[str, Any], part: str) -> int | None:
    """The pid of who plays this part just now."""
    waiters = document["waiters"]
    entries = {"holder": document["holders"], "head": waiters[:1], "waiter": waiters[1:]}[part]
    return entries[-1]["pid"] if entries else None


def run(uri: str, kills: int, count: int, seed: int = 1) -> dict[str, Any]:
    chance, context = random.Random(seed), multiprocessing.get_context("spawn")
    client = MongoClient[dict[str, Any]](uri)
    locks = client[DATABASE][f"kills_{uuid.uuid4().hex}"]

    def start() -> BaseProcess:
        process = context.Process(target=compete, args=(uri, locks.name), daemon=True)
        process.start()
        return process

    def document() -> dict[str, Any]:
        while (found := locks.find_one({"_id": "k"})) is None or not found["acquisitions"]:
            time.sleep(0.01)
        return found

    alive = [start() for _ in range(count)]
    killed, gaps = dict.fromkeys(PARTS, 0), []
    while sum(killed.values()) < kills:
        time.sleep(chance.uniform(0.0, 0.4))
        part = chance.choice(PARTS)
        victim = next((process for process in alive if process.pid == part_of(document(), part)), None)
        if victim is None:
            continue
        victim.kill()
        before, since = document()["acquisitions"], clock.now()
        victim.join()
        alive.remove(victim)
        alive.append(start())
        killed[part] += 1
        while document()["acquisitions"] == before and clock.now() - since < 30:
            time.sleep(0.005)
        gaps.append(clock.now() - since)
    for process in alive:
        process.kill()
        process.join()
    since = clock.now()
    living = {"$filter": {"input": {"$concatArrays": ["$holders", "$waiters"]}, "as": "e",
                          "cond": {"$gt": ["$$e.until", "$$NOW"]}}}  # fmt: skip
    while next(iter(locks.aggregate([{"$project": {"n": {"$size": living}}}])))["n"]:
        time.sleep(0.005)
    free = clock.now() - since
    locks.drop()
    return {
        "killed": killed,
        "stood still at most": round(max(gaps), 2),
        "a lease and a waiter's lease": round(TERMS.server_lease + TERMS.waiter_lease + TERMS.margin, 2),
        "stuck": sum(gap >= 30 for gap in gaps),
        "free after the last was killed": round(free, 2),
        "a lease": round(TERMS.server_lease, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with mongodb() as uri:
        figures = run(uri, options.kills, options.processes)
    for what, figure in figures.items():
        print(f"{what}: {figure}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
