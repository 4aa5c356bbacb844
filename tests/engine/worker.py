"""What the tests run in processes of their own: `python -m tests.engine.worker NAME COLLECTION ARGUMENTS…`.

A worker says what it does in lines of JSON on its standard output, and goes on when it is sent a line.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import Options
from django_mongolock.engine.session.per_process import Sessions
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockDeadlock, LockError, LockLost
from tests.support import DATABASE
from tests.support.waiting import eventually

#: The terms of `pause_waiting`, and of `compete`.
PAUSE_WAITING = Terms(lease=60, margin=0.1, waiter_lease=2)
COMPETE = Terms(lease=1, margin=0.2, waiter_lease=1)


class Worker:
    """One process with its session."""

    kept: MongoLock

    def __init__(self, collection: str) -> None:
        config = StoreConfig({"host": os.environ["MONGODB_URI"]}, DATABASE, collection)
        self.sessions = Sessions(lambda: Session(MongoStore(config)))

    def lock(self, key: str = "k", lease: float = 3.0, wait: float | None = 110, margin: float = 0.2) -> MongoLock:
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

    def own(self, owner: str, lease: str = "60") -> None:
        """Hold the lock for an owner until told to go on."""
        terms = Terms(lease=float(lease), margin=0.2, owner=owner)
        with MongoLock(self.sessions.current, ("k",), Options(terms, wait=0)) as lock:
            self.say(token=lock.fencing_token)
            self.hear()

    def wait_for(self, lease: str = "10") -> None:
        """Take the lock once it is to be had."""
        self.say(ready=True)
        with self.lock(lease=float(lease)) as lock:
            self.say(token=lock.fencing_token, at=time.monotonic())

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

    def pause_waiting(self) -> None:
        """Wait for the lock; be stopped meanwhile; say how it then stood at the first look, and take it again."""
        lock = MongoLock(self.sessions.current, ("k",), Options(PAUSE_WAITING, wait=60))
        self.say(ready=True)
        with lock:
            self.say(held=lock.held, token=lock.fencing_token, left=lock.remaining, at=time.monotonic())
            self.hear()

    def fork(self) -> None:
        """Fork while a lock is held, one is waited for and bells are heard; the child ends like Celery's, by
        os._exit, once with its own lock held and once after giving it back."""
        mine = self.lock("mine", lease=4).acquire()
        waiting = self.lock("k", lease=4)
        taken, stays = threading.Event(), threading.Event()

        def wait() -> None:
            waiting.acquire()
            taken.set()
            stays.wait()  # the lock of a thread that has ended is given back

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while not self.sessions.current().waits.listener.listening:
            time.sleep(0.01)
        self.say(ready=True)
        self.hear()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            own = self.lock("own", lease=2)
            try:
                with self.lock("child"):
                    assert not mine.held
                    assert not waiting.held
                    assert self.sessions.current().pid == os.getpid()
                assert not self.lock("k", wait=0.3).try_acquire()
                own.acquire()
            except BaseException:  # noqa: BLE001
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.say(status=status, held=mine.held, waits=not taken.is_set())
        self.hear()
        taken.wait(10)
        self.say(held=waiting.held, mine=mine.held)
        os._exit(0)

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

    def tell_time(self) -> None:
        """Hold the lock; each time, set the wall clock, and say a lease later how the lock stands."""
        real = time.time
        with self.lock(lease=3) as lock:
            self.say(ready=True)
            while offset := self.hear().strip():
                ahead = float(offset)
                time.time = lambda ahead=ahead: real() + ahead  # type: ignore[misc]
                time.sleep(3.5)
                eventually(lambda: not lock.in_danger, 5)
                self.say(held=lock.held, token=lock.fencing_token, danger=lock.in_danger, wall=time.time())

    def starve(self) -> None:
        """Hold the lock while one thread keeps the interpreter to itself, and never let the heartbeat have it."""
        lock = self.lock(lease=2)
        lock.acquire()
        self.say(token=lock.fencing_token)
        self.hear()
        sys.setswitchinterval(20)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
        held = lock.held
        sys.setswitchinterval(0.005)
        time.sleep(0.3)
        eventually(lambda: lock.lost)
        self.say(held=held, lost=lock.lost, heartbeat=bool(self.sessions.current().heartbeat))
        self.hear()

    def compete(self) -> None:
        """Take the lock and give it back for as long as it lives; leases are short."""
        self.say(ready=True)
        while True:
            with contextlib.suppress(LockError), MongoLock(self.sessions.current, ("k",), Options(COMPETE, wait=None)):
                time.sleep(0.01)

    def paused(self) -> None:
        """Be stopped in the middle of the block, and say what it then looks like."""
        lock, held = self.lock(lease=2), True
        try:
            with lock:
                self.say(token=lock.fencing_token)
                self.hear()
                held = lock.held
        except LockLost as error:
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

    def clone(self) -> None:
        """Be copied twice while this runs, as a machine that goes on twice. The copies take twenty locks each, and say
        the ids of their grants. There is one session and one thread by then."""
        session, pid = self.sessions.current(), os.getpid()
        for name in ("one", "two"):
            # os.fork() tells everybody who wants to know, as a machine that is paused and copied does not.
            child = ctypes.PyDLL(None).fork()
            if child == 0:
                os.getpid = lambda: pid
                grants = []
                for number in range(20):
                    with MongoLock(lambda: session, (f"{name}{number}",), Options(PAUSE_WAITING)) as lock:
                        grants += [grant.id for grant in lock._own.grants]
                self.say(grants=grants, random=random.random().hex())
                os._exit(0)
            os.waitpid(child, 0)

    def drop(self, cycles: str, seed: str) -> None:
        """Drop locks while signals strike. Each is acquired in peace. Then a timer is set that goes off within the few
        microseconds which it takes for the lock object to die, and its owner token with it: if Python runs there, it
        swallows what the signal's handler raises. Say how often that was, and what the session still knows of."""
        chance, swallowed, blows = random.Random(int(seed)), [0], [False]

        def strike(*_: object) -> None:
            if blows[0]:
                raise KeyboardInterrupt

        def count(_: object) -> None:
            swallowed[0] += 1

        def storm(things: list[MongoLock]) -> None:
            end = time.perf_counter() + 0.000_3
            blows[0] = True
            try:
                between = chance.uniform(0.000_004, 0.000_03)
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.000_001, 0.000_04), between)
                things.clear()
                while time.perf_counter() < end:
                    pass
            finally:
                blows[0] = False

        sys.unraisablehook = count
        signal.signal(signal.SIGALRM, strike)
        for number in range(int(cycles)):
            mine = [self.lock(f"k{number}", lease=600).acquire()]
            calm = False
            while not calm:  # struck again at any of these lines
                with contextlib.suppress(KeyboardInterrupt):
                    if mine:
                        storm(mine)
                    blows[0] = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    calm = True
        session = self.sessions.current()
        eventually(lambda: not session.known, 30)
        self.say(swallowed=swallowed[0], known=session.known)
        os._exit(0)  # what is left would be given back now

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
        while session.cleanup.pending and time.monotonic() < end:
            time.sleep(0.02)
        left = [repr(grant) for grant in session.registry.grants.values()]
        with self.lock("usable"):
            self.say(hits=hits, left=left, pending=len(session.cleanup.pending))


if __name__ == "__main__":
    name, collection, *arguments = sys.argv[1:]
    worker = Worker(collection)
    getattr(worker, name)(*arguments)
