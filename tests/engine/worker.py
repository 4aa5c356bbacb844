"""The programs that tests run in processes of their own: `python -m tests.engine.worker NAME COLLECTION ARGUMENTS…`.

A worker reports its actions in lines of JSON on its standard output, and goes on when it is sent a line.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.session.session import Session, Sessions
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockDeadlock, LockError, LockLost
from tests.support import DATABASE


class Worker:
    """One process with its session."""

    kept: MongoLock

    def __init__(self, collection: str) -> None:
        config = StoreConfig({"host": os.environ["MONGODB_URI"]}, DATABASE, collection)
        self.sessions = Sessions(lambda: Session(MongoStore(config)))

    def lock(self, key: str = "k", lease: float = 3.0, wait: float | None = 110, margin: float = 0.2) -> MongoLock:
        return MongoLock(self.sessions.current, (key,), Terms(lease=lease, margin=margin), LockOptions(wait=wait))

    def say(self, **facts: Any) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    def hear(self) -> str:
        return sys.stdin.readline()

    # The programs

    def hold(self, lease: str = "1", owner: str | None = None) -> None:
        """Hold the lock, for an owner if there is one, until told to go on. End without releasing it."""
        terms = Terms(lease=float(lease), margin=0.2, owner=owner)
        lock = MongoLock(self.sessions.current, ("k",), terms, LockOptions(wait=110)).acquire()
        self.say(token=lock.fencing_token, at=time.monotonic())
        self.hear()
        self.kept = lock  # not collected before the interpreter ends

    def loop_in_a_daemon_thread(self) -> None:
        """Take and release the lock all the time in a daemon thread, until the process ends."""

        def loop() -> None:
            while True:
                with self.lock(lease=30):
                    time.sleep(0.005)

        threading.excepthook = lambda _: None
        threading.Thread(target=loop, daemon=True).start()
        time.sleep(0.3)

    def fork_by_multiprocessing(self) -> None:
        """End a forked child with a lock that it has not released."""

        def child() -> None:
            self.kept = self.lock(lease=30).acquire()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        self.say(code=process.exitcode)

    def nested(self, first: str, second: str) -> None:
        """Hold one lock, and when told wait for another."""
        error = None
        with self.lock(first):
            self.say(ready=True)
            self.hear()
            try:
                with self.lock(second):
                    pass
            except LockDeadlock as deadlock:
                error = type(deadlock).__name__
        self.say(error=error)

    def exit_with_everything(self, key: str) -> None:
        """End while a lock is held, one is waited for, and objects are only collected at the very end."""
        kept = [self.lock(key, lease=60).acquire(), self.lock("also", lease=60).acquire()]
        sys.modules["kept"] = kept  # type: ignore[assignment]

        def wait() -> None:
            with contextlib.suppress(LockError):
                self.lock("k", wait=None).acquire()

        threading.Thread(target=wait, daemon=True).start()
        self.say(ready=True)
        self.hear()

    def paused(self) -> None:
        """Be stopped in the middle of the block, and report the state afterwards."""
        lock, held = self.lock(lease=2), True
        try:
            with lock:
                self.say(token=lock.fencing_token)
                self.hear()
                held = lock.held
        except LockLost as error:
            self.say(held=held, lost=str(error))


if __name__ == "__main__":
    name, collection, *arguments = sys.argv[1:]
    worker = Worker(collection)
    getattr(worker, name)(*arguments)
