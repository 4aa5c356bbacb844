"""A million keys: sizes, clearing what is stale, and counting what is held."""

import io
import time
from collections.abc import Iterator
from typing import Any, Final

from django.core.management import call_command

from bench.bench import Bench, fresh_key
from bench.contenders import OURS
from bench.measure import Piece, Spread, Table
from bench.ours import ALIAS
from bench.peers import DATABASE
from bench.workers import State, Worker, workers
from django_mongolock import mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.engine import clock
from django_mongolock.engine.store.layout import ensure_indexes
from django_mongolock.models import Lock

PREFIX: Final = "million:"
#: Parts of the keys that are held, and stale.
HELD, STALE = 0.02, 0.1


def million(bench: Bench) -> Iterator[Piece]:
    """1,000,000 keys: sizes, clear_stale_locks, how many are held."""
    count = bench.some(20_000, 1_000_000)
    with workers(1) as (worker,):
        bench.open([worker], OURS)
        try:
            yield from filled(worker, count)
            yield from counting(bench, worker, count)
            yield from clearing(worker, count)
        finally:
            with bench.world.client() as client:
                client[DATABASE].drop_collection("mongolock_locks")


def filled(worker: Worker, count: int) -> Iterator[Piece]:
    size = worker.call(fill, count, patience=240)
    made = Table(
        f"{count:,} lock documents",
        ["what", "MB", "bytes a key"],
        note=f"{HELD:.0%} of them are held, {STALE:.0%} are stale, the others are free. Sizes before compression.",
    )
    for name, bytes_ in size.items():
        made.rows.append([name, bytes_ / 1e6, bytes_ / count])
    yield made


def fill(state: State, count: int) -> dict[str, int]:
    """In the worker: make the documents out of real ones; bytes by name."""
    collection = mongo_store(ALIAS).collection
    key = fresh_key("pattern")
    lock = mongo_lock(key).acquire()
    held = collection.find_one({"_id": key}) or {}
    lock.release()
    while (free := collection.find_one({"_id": key}) or {}).get("holders"):  # a release does not wait for the majority
        time.sleep(0.01)
    number = {"$add": [0, "$n"]}
    day = 86_400_000
    until = {"$add": ["$$NOW", {"$cond": [{"$lt": [number, int(count * HELD)]}, day, -day]}]}
    holder = {**held["holders"][0], "until": until}
    taken = {"$lt": [number, int(count * (HELD + STALE))]}
    pipeline: list[dict[str, Any]] = [
        {"$match": {"_id": key}},
        {"$set": {"n": {"$range": [0, count]}}},
        {"$unwind": "$n"},
        {
            "$set": {
                "_id": {"$concat": [PREFIX, {"$toString": "$n"}]},
                "holders": {"$cond": [taken, [holder], free["holders"]]},
                "expires_at": {"$cond": [taken, until, free.get("expires_at")]},
                "acquisitions": {"$toLong": {"$floor": {"$multiply": [{"$rand": {}}, 1000]}}},
            }
        },
        {"$unset": "n"},
        {"$out": "mongolock_locks"},
    ]
    collection.aggregate(pipeline, allowDiskUse=True)
    ensure_indexes(collection)
    collection.database.client.admin.command("fsync")  # sizes are known after a checkpoint
    stats = collection.database.command("collStats", collection.name)
    sizes = {"documents": int(stats["size"]), "documents on the disk": int(stats["storageSize"])}
    sizes |= {f"index {name}": int(size) for name, size in stats["indexSizes"].items()}
    return sizes


def counting(bench: Bench, worker: Worker, count: int) -> Iterator[Piece]:
    times = Spread.of(worker.call(count_held, patience=90) for _ in range(bench.some(1, 3)))
    yield Table(f"{count:,} locks", ["what", "ms"], [["the held ones counted", times]], note="Includes the ORM's time.")


def count_held(state: State) -> float:
    """In the worker: milliseconds of `Lock.objects.held().count()`, which the admin asks."""
    before = clock.now()
    Lock.objects.held().count()
    return (clock.now() - before) * 1000


def clearing(worker: Worker, count: int) -> Iterator[Piece]:
    seconds, said = worker.call(clear, patience=180)
    stale = int(count * (HELD + STALE)) - int(count * HELD)
    made = Table("manage.py clear_stale_locks", ["stale", "of", "seconds", "stale locks/s", "it said"])
    made.rows.append([f"{stale:,}", f"{count:,}", seconds, stale / seconds, said])
    yield made


def clear(state: State) -> tuple[float, str]:
    """In the worker: seconds, and what it said."""
    said, before = io.StringIO(), clock.now()
    call_command("clear_stale_locks", interactive=False, stdout=said, stderr=io.StringIO())
    return clock.now() - before, said.getvalue().splitlines()[0]
