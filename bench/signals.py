"""A storm of signals whose handler raises, over the main thread: what is left of the locks that it took?

    python -m bench.signals [--runs 6] [--cycles 2000] [--mean 4] [--plain 3] [--json FILE]

Each run is a process whose main thread takes and gives back a lock, over and over, while signals come at random
moments (*mean* milliseconds apart, also two in a row). It reports what it has left when the storm is over: locks
held or waited for in the collection, grants that the session still knows, whether the client works. The same storm
through a plain PyMongo lock (an insert, a delete, in the interrupted thread) shows what the damage looks like.
"""

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, PyMongoError

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError
from testproject.servers import mongodb

DATABASE = "mongolock_benchmarks"
#: How long a run may take without saying anything, per cycle and at least, in seconds: then it hangs.
PATIENCE, LEAST_PATIENCE = 0.05, 30.0


class Struck(BaseException):
    """What the signal handler raises; like KeyboardInterrupt, nobody's Exception."""


class Storm:
    """Raises Struck in the main thread at random moments, from `begin` on, while it `blows`."""

    def __init__(self, seed: int, mean: float) -> None:
        self.strikes = 0
        self._chance = random.Random(seed)
        self._mean = mean
        self.blows = False

    def begin(self) -> None:
        self.blows = True
        signal.signal(signal.SIGALRM, self._strike)
        self._rest()

    def _rest(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(0.000_05, self._chance.expovariate(1 / self._mean)))

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if not self.blows:
            return
        self._rest()
        # Struck outside of everything, nobody could catch it: that is the harness and nothing else.
        harness = (through.__code__, Storm.begin.__code__, Storm._rest.__code__)
        if frame is not None and frame.f_code not in harness:
            self.strikes += 1
            raise Struck


def through(storm: Storm, cycles: int, cycle: Callable[[int], object]) -> dict[str, int]:
    """Run *cycle* so many times in the storm; the errors that came out of it, by name."""
    errors: dict[str, int] = {}
    done = 0
    storm.begin()
    while done < cycles:
        try:
            while done < cycles:
                done += 1
                try:
                    cycle(done)
                except (LockError, PyMongoError, RuntimeError, ValueError) as error:
                    name = type(error).__name__
                    errors[name] = errors[name] + 1 if name in errors else 1
        except Struck:
            pass
    storm.blows = False
    return errors


def our_run(uri: str, collection: str, cycles: int, seed: int, mean: float) -> dict[str, Any]:
    """One run through our lock. Every seventh cycle waits for a lock that another session holds."""
    config = StoreConfig({"host": uri}, DATABASE, collection)
    store = MongoStore(config)
    session, other = Session(store), Session(MongoStore(config))
    terms = Terms(lease=30, margin=3)
    taken = MongoLock(lambda: other, ("taken",), Options(terms)).acquire()

    def cycle(number: int) -> None:
        if number % 7:
            with MongoLock(lambda: session, (f"k{number % 5}",), Options(terms, wait=20)):
                pass
        else:
            MongoLock(lambda: session, ("taken",), Options(terms, wait=0.003)).acquire()

    with MongoLock(lambda: session, ("first",), Options(terms)):
        pass
    storm = Storm(seed, mean)
    errors = through(storm, cycles, cycle)
    errors.pop("LockNotAcquired", None)
    taken.release()
    end = time.monotonic() + 15
    while (session.cleanup.pending or session.registry.grants) and time.monotonic() < end:
        time.sleep(0.02)
    with MongoLock(lambda: session, ("usable",), Options(terms, wait=0)) as last:
        usable = last.held
    known = session.known
    documents = list(store.latest.find())
    left = sum(len(document["holders"]) + len(document["waiters"]) for document in documents)
    return {"strikes": storm.strikes, "left": left, "known": known, "errors": errors, "usable": usable}


def plain_run(uri: str, collection: str, cycles: int, seed: int, mean: float) -> dict[str, Any]:
    """The same through a lock as it is usually written: insert, work, delete."""
    client = MongoClient[dict[str, Any]](uri, timeoutMS=5_000)
    locks: Collection[dict[str, Any]] = client[DATABASE].get_collection(
        collection, write_concern=WriteConcern(w="majority")
    )

    def cycle(number: int) -> None:
        try:
            locks.insert_one({"_id": f"k{number}"})
        except DuplicateKeyError:
            return
        try:
            pass
        finally:
            locks.delete_one({"_id": f"k{number}"})

    locks.delete_one({"_id": "first"})
    storm = Storm(seed, mean)
    errors = through(storm, cycles, cycle)
    left = locks.count_documents({})
    return {"strikes": storm.strikes, "left": left, "known": 0, "errors": errors, "usable": True}


RUNS = {"ours": our_run, "plain": plain_run}


def run(kind: str, uri: str, cycles: int, seed: int, mean: float) -> dict[str, Any]:
    """One run in a process of its own; one that hangs is killed."""
    command = [sys.executable, "-m", "bench.signals", "--child", kind]
    command += ["--cycles", str(cycles), "--seed", str(seed), "--mean", str(mean * 1000)]
    collection = f"signals_{uuid.uuid4().hex}"
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--collection", collection],
            env={**os.environ, "MONGODB_URI": uri},
            capture_output=True,
            text=True,
            timeout=max(LEAST_PATIENCE, PATIENCE * cycles),
            check=False,
        )
        lines = done.stdout.splitlines()
        result = json.loads(lines[-1]) if lines else {"crashed": done.stderr[-2000:]}
    except subprocess.TimeoutExpired as late:
        result = {"hung": True, "where": (late.stderr or b"")[-3000:].decode()}
    with MongoClient[dict[str, Any]](uri) as client:
        if "left" not in result:
            result["left"] = client[DATABASE][collection].count_documents({})
        client[DATABASE][collection].drop()
    return {"kind": kind, "seed": seed, **result, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.signals")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--plain", type=int, default=3, help="runs through a plain PyMongo lock")
    parser.add_argument("--cycles", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean", type=float, default=4.0, help="milliseconds between two signals")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--collection", help=argparse.SUPPRESS)
    options = parser.parse_args()
    mean = options.mean / 1000
    if options.child:
        faulthandler.dump_traceback_later(max(LEAST_PATIENCE, PATIENCE * options.cycles) - 2, file=sys.stderr)
        # Written before the interpreter's end, which may still hang in what was damaged.
        result = RUNS[options.child](os.environ["MONGODB_URI"], options.collection, options.cycles, options.seed, mean)
        print(json.dumps(result), flush=True)
        return
    results = []
    with mongodb() as uri:
        for kind, count in (("ours", options.runs), ("plain", options.plain)):
            for number in range(count):
                results.append(run(kind, uri, options.cycles, options.seed + number, mean))
                print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
