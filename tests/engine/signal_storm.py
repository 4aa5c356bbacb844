"""A storm of signals whose handler raises, over the main thread: what is left of the locks that it took?

A run is a process whose main thread takes and gives back a lock, over and over, while signals come at random moments
(*mean* seconds apart, also two in a row). It reports what it has left when the storm is over: locks held or waited for
in the collection, grants that the session still knows, whether the client works.
"""

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
from types import FrameType
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError

DATABASE = "mongolock_tests"
#: How long a run may take without saying anything, per cycle and at least, in seconds: then it hangs.
PATIENCE, LEAST_PATIENCE = 0.05, 30.0


class Struck(BaseException):
    """What the signal handler raises; like KeyboardInterrupt, not an Exception."""


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
        # An error outside of the loop could not be caught: that is the harness and nothing else.
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


def run(uri: str, cycles: int, seed: int, mean: float) -> dict[str, Any]:
    """One run in a process of its own; one that hangs is killed."""
    collection = f"signals_{uuid.uuid4().hex}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, collection, str(cycles), str(seed), str(mean)],
            env={**os.environ, "MONGODB_URI": uri},
            capture_output=True,
            text=True,
            timeout=max(LEAST_PATIENCE, PATIENCE * cycles),
            check=False,
        )
        lines = done.stdout.splitlines()
        result: dict[str, Any] = json.loads(lines[-1]) if lines else {"crashed": done.stderr[-2000:]}
    except subprocess.TimeoutExpired as late:
        result = {"hung": (late.stderr or b"")[-3000:].decode()}
    with MongoClient[dict[str, Any]](uri) as client:
        client[DATABASE][collection].drop()
    return result


if __name__ == "__main__":
    cycles_, seed_ = int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(max(LEAST_PATIENCE, PATIENCE * cycles_) - 2, file=sys.stderr)
    # Written before the interpreter's end, which may still hang in what was damaged.
    print(json.dumps(our_run(os.environ["MONGODB_URI"], sys.argv[1], cycles_, seed_, float(sys.argv[4]))), flush=True)
