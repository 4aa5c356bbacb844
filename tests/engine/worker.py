"""What the tests run in processes of their own: `python -m tests.engine.worker NAME COLLECTION ARGUMENTS…`.

A worker says what it does in lines of JSON on its standard output, and goes on when it is sent a line.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from django_mongolock.engine.document import Terms
from django_mongolock.engine.locks import MongoLock, Options
from django_mongolock.engine.session import Session, Sessions
from django_mongolock.engine.store import MongoStore, StoreConfig
from django_mongolock.exceptions import LockLostError

DATABASE = "mongolock_tests"


class Worker:
    """One process with its session."""

    kept: MongoLock

    def __init__(self, collection: str) -> None:
        config = StoreConfig({"host": os.environ["MONGODB_URI"]}, DATABASE, collection)
        self.sessions = Sessions(lambda: Session(MongoStore(config)))

    def lock(self, key: str = "k", lease: float = 1.0, wait: float | None = 110, margin: float = 0.2) -> MongoLock:
        return MongoLock(self.sessions.current, (key,), Options(Terms(lease=lease, margin=margin), wait))

    def say(self, **facts: Any) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    def hear(self) -> str:
        return sys.stdin.readline()

    # What there is to do

    def hold(self, lease: str = "1") -> None:
        """Hold the lock until told to go on; end without giving it back."""
        lock = self.lock(lease=float(lease))
        lock.acquire()
        self.say(token=lock.fencing_token, at=time.monotonic())
        self.hear()
        self.kept = lock  # not collected before the interpreter ends

    def wait_for(self) -> None:
        """Take the lock once it is to be had."""
        self.say(ready=True)
        with self.lock(lease=10) as lock:
            self.say(token=lock.fencing_token, at=time.monotonic())

    def paused(self) -> None:
        """Be stopped in the middle of the block, and say what it then looks like."""
        lock, held = self.lock(lease=0.5), True
        try:
            with lock:
                self.say(token=lock.fencing_token)
                self.hear()
                held = lock.held
        except LockLostError as error:
            self.say(held=held, lost=str(error))

    def count(self, path: str, times: str) -> None:
        """Increment the number in a file by reading, pausing and writing it, under the lock."""
        file = Path(path)
        self.say(ready=True)
        self.hear()
        done = []
        for _ in range(int(times)):
            with self.lock(lease=30, margin=3) as lock:
                entered = time.monotonic()
                number = int(file.read_text())
                time.sleep(0)
                file.write_text(str(number + 1))
                done.append((number, lock.fencing_token, entered, time.monotonic()))
        self.say(done=done)

    def count_async(self, path: str, times: str, tasks: str) -> None:
        """The same by many coroutines."""
        file = Path(path)
        done = []

        async def increment() -> None:
            for _ in range(int(times)):
                async with self.lock(lease=30, margin=3) as lock:
                    entered = time.monotonic()
                    number = int(file.read_text())  # noqa: ASYNC240 - a few bytes
                    await asyncio.sleep(0)
                    file.write_text(str(number + 1))  # noqa: ASYNC240
                    done.append((number, lock.fencing_token, entered, time.monotonic()))

        async def main() -> None:
            await asyncio.gather(*(increment() for _ in range(int(tasks))))

        asyncio.run(main())
        self.say(done=done)

    def interrupted(self, cycles: str, seed: str) -> None:
        """Be interrupted (KeyboardInterrupt) at random moments of acquire and release."""
        chance = random.Random(int(seed))
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        session = self.sessions.current()
        with self.lock():
            pass
        hits = 0
        for number in range(int(cycles)):
            lock = self.lock(f"k{number % 7}", lease=30)
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.000_05, 0.012))
                    with lock:
                        pass
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        end = time.monotonic() + 10
        while session._unsettled and time.monotonic() < end:
            time.sleep(0.02)
        left = [repr(grant) for grant in session._grants.values()]
        with self.lock("usable"):
            self.say(hits=hits, left=left, unsettled=len(session._unsettled))


if __name__ == "__main__":
    name, collection, *arguments = sys.argv[1:]
    worker = Worker(collection)
    getattr(worker, name)(*arguments)
