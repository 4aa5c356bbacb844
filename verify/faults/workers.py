"""The processes of a run.

Each locks and releases in all manners, and records its beliefs (`records`). On SIGTERM it ends when its waits have been
served. On SIGUSR1 it writes down the stacks of its threads.
"""

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import os
import random
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import django

from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.exceptions import LockLost
from django_mongolock.inspection.operations import clear_stale, force_release
from verify.faults.documents import OurDocument, at_once
from verify.faults.peers import ERRORS, TIMEOUT, OurLock, Ours, Plan
from verify.faults.plans import KEYS, choose, line
from verify.faults.records import Journal, now

Lock = OurLock | OurDocument

#: The number of threads or tasks of a process with several.
MANY: Final = 4
#: The number of attempts until a thread dies or a child ends.
LIFE: Final = 15
#: The probability that all queue at the one key with a visible order, besides the chosen plans.
QUEUEING: Final = 0.15
#: The probability that an attempt ends in a manner that a habit allows.
OFTEN: Final = 0.08
#: The probability of a fork while a document is held. Few processes use documents, and a block takes long.
OFTEN_FORKED: Final = 0.3
#: The probability that work on a document fails.
OFTEN_FAILED: Final = 0.15
#: Seconds in which a child must have left the block of its parent.
LEAVING: Final = 30


class Death(BaseException):
    """The end of a thread."""


class Worker:
    """One process."""

    def __init__(self, site: Ours, journal: Journal, seed: int, habits: Collection[str]) -> None:
        self.site = site
        self.journal = journal
        self.chance = random.Random(seed)
        self.habits = habits
        self.stopping = False
        #: Whether the process uses coroutines.
        self.awaits = False
        #: Lock objects with an outstanding report of a loss, or with a dead thread.
        self.kept: deque[Any] = deque(maxlen=500)
        self.children: set[int] = set()

    # One attempt, with the same records for each kind of caller

    def plan(self, *manners: str) -> Plan:
        plan = choose(self.chance)
        if self.chance.random() < QUEUEING:
            plan = line(self.chance)
        allowed = [manner for manner in manners if manner in self.habits]
        manner = "extend" if self.chance.random() < 0.1 else "release"
        if plan.document and self.chance.random() < OFTEN_FAILED:
            manner = "fail"
        if allowed and self.chance.random() < OFTEN:
            manner = self.chance.choice(allowed)
        if plan.document and "fork" in allowed and self.chance.random() < OFTEN_FORKED:
            manner = "fork"
        if manner == "fork":
            plan = dataclasses.replace(plan, work=max(plan.work, 0.5))
        return dataclasses.replace(plan, manner=manner)

    def ask(self, plan: Plan, inner: str | None = None) -> tuple[str, Lock]:
        """Record the beginning of an attempt. Return its name and its lock."""
        name = self.journal.new_id()
        lock = self.site.lock(plan, lambda: self.journal.write("told", id=name), name)
        self.journal.write("ask", id=name, inner=inner, **plan.facts())
        return name, lock

    def look(self, name: str, lock: Lock) -> bool:
        """Record the state that the lock reports."""
        since = now()
        held, left = lock.look()
        self.journal.write("see", since, u=now(), id=name, held=held, left=left)
        return held

    def happened(self, fault: str, since: float) -> None:
        """Record a fault that this process inflicted on itself."""
        self.journal.write("fault", since, u=now(), name=fault, order=False)

    def pause(self) -> float:
        return self.chance.uniform(0.003, 0.025)

    async def cycle(self, plan: Plan, inner: str | None = None) -> None:
        """Make one attempt. A thread runs this by `at_once`, since nothing in it really waits then."""
        name, lock = self.ask(plan, inner)
        canceller = self._cancel_soon(lock) if plan.manner == "cancel" else None
        try:
            await self._call(lock, "acquire")
            at = now()
        except BaseException as error:
            self.journal.write("refused", id=name, error=type(error).__name__)
            if not isinstance(error, ERRORS):
                raise
            return
        finally:
            if canceller is not None:
                canceller.join()
        found = {"seen": lock.seen} if isinstance(lock, OurDocument) else {}
        self.journal.write("got", at, id=name, tokens=dict(lock.tokens), **found)
        if plan.manner in ("die", "forget"):
            await self._work(name, lock, plan)
            since = now()
            self.journal.write("dropped", id=name)
            if plan.manner == "die":
                self.kept.append(lock)
                self.happened("die", since)
                raise Death
            del lock
            self.happened("forget", since)
            return
        try:
            held = await self._work(name, lock, plan)
            if inner is None and plan.reentrant and held and not self.awaits:
                await self.cycle(dataclasses.replace(plan, wait=0.0, work=0.0, manner="release"), inner=name)
        finally:
            await self._give_back(name, lock, fail=plan.manner == "fail")

    async def _call(self, lock: Lock, name: str) -> Any:
        """Call a method of a lock, or await its twin."""
        if isinstance(lock, OurDocument):
            return await getattr(lock, name)(self.awaits)
        return await getattr(lock, f"a{name}")() if self.awaits else getattr(lock, name)()

    def _cancel_soon(self, lock: Lock) -> threading.Thread | None:
        """Cancel the wait, or the task, at some moment."""
        seconds = self.chance.uniform(0, 0.5)
        if self.awaits:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(seconds, self._cancel_task, task)
            return None
        if isinstance(lock, OurDocument):
            return None

        def cancel() -> None:
            since = now()
            time.sleep(seconds)
            lock.cancel()
            self.happened("cancel", since)

        thread = threading.Thread(target=cancel, daemon=True)
        thread.start()
        return thread

    def _cancel_task(self, task: asyncio.Task[Any]) -> None:
        if not task.done():
            since = now()
            task.cancel()
            self.happened("cancel", since)

    async def _work(self, name: str, lock: Lock, plan: Plan) -> bool:
        end, middle, manner = now() + plan.work, now() + plan.work / 2, plan.manner
        while held := self.look(name, lock):
            if manner == "extend" and now() >= middle:
                manner = ""
                with contextlib.suppress(*ERRORS):
                    await self._call(lock, "extend")
            elif manner == "fork" and now() >= middle:
                manner = ""
                self._fork(name, lock)
            if now() >= end:
                break
            if self.awaits:
                await asyncio.sleep(self.pause())
            else:
                time.sleep(self.pause())  # noqa: ASYNC251 - there is no event loop
        return held

    async def _give_back(self, name: str, lock: Lock, *, fail: bool = False) -> None:
        self.journal.write("leave", id=name)
        was = "unknown"
        try:
            if fail and isinstance(lock, OurDocument) and not self.awaits:
                lock.leave(ArithmeticError())  # this does not tell whether the lock was still held
            elif isinstance(lock, OurLock) and not self.awaits and self.chance.random() < 0.5:
                lock.leave()
                was = "released"
            else:
                was = "released" if await self._call(lock, "release") else "lost"
        except LockLost:
            was = "lost"
        except ERRORS:
            was = "unknown"
        finally:
            wrote = {"wrote": lock.wrote} if isinstance(lock, OurDocument) else {}
            self.journal.write("left", id=name, was=was, **wrote)
            if was != "released":
                self.kept.append(lock)

    # A child in the middle of everything

    def _fork(self, name: str, lock: Lock) -> None:
        """Fork while the lock is held. The child holds nothing, releases nothing, and can lock by itself."""
        since, seed = now(), self.chance.randrange(2**32)
        self.journal.write("forked", id=name)
        pid = os.fork()
        if pid == 0:
            self._live_as_child(seed, lambda: self._leave_inherited(name, lock))
        self.children.add(pid)
        self.happened("fork", since)

    def _leave_inherited(self, name: str, lock: Lock) -> None:
        """Leave the block of the parent in a child."""
        self.look(name, lock)
        signal.alarm(LEAVING)  # ends a child that hangs here, and the parent reports that
        with contextlib.suppress(*ERRORS):
            match self.chance.choice(["release", "leave", "fail", "exit"]):
                case "leave":
                    lock.leave()
                case "fail":
                    lock.leave(ArithmeticError())
                case "exit":
                    lock.leave(SystemExit())
                case _:
                    at_once(self._call(lock, "release"))
        signal.alarm(0)
        self.look(name, lock)

    def _live_as_child(self, seed: int, first: Callable[[], None] = lambda: None) -> None:
        """Run as a forked child until its end by os._exit, as in Celery."""
        code = 1
        try:
            self.journal = Journal(self.journal.folder, "child")
            self.journal.watch()
            self.chance, self.children = random.Random(seed), set()
            first()
            # Some end at once, while their parent still holds the inherited locks.
            for _ in range(self.chance.choice([0, 1, LIFE])):
                if not self.stopping:
                    at_once(self.cycle(self.plan("forget")))
                    time.sleep(self.pause())
            if self.chance.random() < 0.5:
                self.site.close()
            self.journal.write("end")
            code = 0
        except BaseException:  # noqa: BLE001 - the end of the process
            traceback.print_exc()
        finally:
            os._exit(code)

    def reap(self) -> None:
        """Record the children that have ended."""
        for pid in list(self.children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.children.discard(pid)
                if status:
                    self.journal.write("hung", group=os.getpgrp(), text=f"its child {pid} ended with {status}")

    # The kinds

    def sync(self) -> None:
        """Run one thread, the main one."""
        while not self.stopping:
            plan = self.plan("fork", "cancel", "forget")
            if self.chance.random() < 0.5:
                plan = line(self.chance)
            at_once(self.cycle(plan))
            self.reap()
            time.sleep(self.pause())

    def threads(self) -> None:
        """Run several threads. A dead one is replaced."""

        def live() -> None:
            with contextlib.suppress(Death):
                for _ in range(LIFE):
                    if not self.stopping:
                        at_once(self.cycle(self.plan("fork", "cancel", "forget", "die")))
                        time.sleep(self.pause())

        threads: list[threading.Thread] = []
        while not self.stopping or threads:
            threads = [thread for thread in threads if thread.is_alive()]
            while len(threads) < MANY and not self.stopping:
                threads.append(threading.Thread(target=live, daemon=True))
                threads[-1].start()
            self.reap()
            time.sleep(0.1)

    def prefork(self) -> None:
        """Run a parent that locks a little, and children that do the rest, each for a while."""
        while not self.stopping:
            if len(self.children) < 2:
                seed = self.chance.randrange(2**32)
                if (pid := os.fork()) == 0:
                    self._live_as_child(seed)
                self.children.add(pid)
            at_once(self.cycle(self.plan("cancel")))
            self.reap()
            time.sleep(0.2)

    def run_async(self) -> None:
        """Run coroutines. Some are cancelled, wherever they are."""
        asyncio.run(self._tasks())

    async def _tasks(self) -> None:
        self.awaits = True

        async def live() -> None:
            while not self.stopping:
                task = asyncio.create_task(self.cycle(self.plan("cancel", "forget")))
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result()
                await asyncio.sleep(self.pause())

        await asyncio.gather(*(live() for _ in range(MANY)))

    def janitor(self) -> None:
        """Clear stale documents all the while, take locks from their holders, and clear stale locks."""
        store = MongoStore(self.site.config)
        while not self.stopping:
            with contextlib.suppress(Exception):
                self.site.documents.sweep()
            with contextlib.suppress(Exception):
                if "force-release" in self.habits:
                    self._take_one(store)
                if "clear-stale" in self.habits:
                    since = now()
                    clear_stale(store, KEYS, timeout=TIMEOUT)
                    self.happened("clear-stale", since)
            time.sleep(self.chance.uniform(0.1, 1.0))

    def _take_one(self, store: MongoStore) -> None:
        since, key = now(), self.chance.choice(KEYS)
        document = store.collection.find_one({"_id": key}) or {}
        if holders := document.get("holders"):
            holder = self.chance.choice(holders)
            self.journal.write("force", key=key, tokens=[holder["token"]], ids=[holder["label"]])
            force_release(store, key, [holder["grant"]], timeout=TIMEOUT)
            self.happened("force-release", since)


def _jump(worker: Worker) -> None:
    """Set the wall clock of this process again and again."""
    real, chance = time.time, random.Random(worker.chance.random())
    while True:
        time.sleep(chance.uniform(0.3, 1.5))
        hour = 3600.0 if chance.random() < 0.1 else 5.0
        since, ahead = now(), chance.uniform(-hour, hour)
        time.time = lambda ahead=ahead: real() + ahead  # type: ignore[misc]
        worker.happened("client-clocks", since)


def _follow(harness: int) -> None:
    """End with the harness, however that ends."""
    while True:
        try:
            os.kill(harness, 0)
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.5)


def work(  # noqa: PLR0917 - passed on by multiprocessing
    kind: str, folder: Path, uri: str, seed: int, habits: Sequence[str], harness: int
) -> None:
    """Be a worker until SIGTERM. The process becomes the leader of a group of its own."""
    os.setpgid(0, 0)
    with (folder / "workers.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.ERROR)
    faulthandler.register(signal.SIGUSR1, file=2)
    django.setup()  # otherwise the first document lock does it, and blocks an event loop
    journal = Journal(folder, kind)
    journal.watch()
    worker = Worker(Ours(uri), journal, seed, habits)

    def stop(number: int, frame: FrameType | None) -> None:
        worker.stopping = True

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=_follow, args=(harness,), daemon=True).start()
    if "client-clocks" in habits:
        threading.Thread(target=_jump, args=(worker,), daemon=True).start()
    getattr(worker, "run_async" if kind == "async" else kind)()
    end = now() + 60
    while worker.children and now() < end:
        worker.reap()
        time.sleep(0.05)
    worker.site.close()
    journal.write("end")
