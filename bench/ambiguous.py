"""Answers that say nothing, and callers that go away: is a lock left behind?

    python -m bench.ambiguous [--count 2000] [--only NAME …] [--json FILE]

Each kind of trouble strikes the commands of threads that take locks and give them back, until it has struck so often:
the connection is cut in place of the answer, the answer comes after its command was given up, the command itself
arrives that late, or the write is made and its confirmation refused. Or coroutines are cancelled at any moment, or a
signal's handler raises an error in the main thread, as Ctrl-C and Celery's soft time limit do. When it is over: does a
living entry outlive one (short) lease, does a thread hang, is any lock not to be had, does an error not arrive?
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
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
from testproject.servers import ReplicaSet

DATABASE: Final = "mongolock_benchmarks"
#: One lease, as the server counts it, is three seconds.
TERMS: Final = Terms(lease=2, margin=1, waiter_lease=1)
#: How long a command is waited for; what is late is later than that, in seconds.
TIMEOUT, LATE = 0.5, (0.6, 1.2)
WORKERS, KEYS, CHANCE = 24, 60, 0.3

Figures = dict[str, Any]


class Trouble:
    """A TCP relay that lets one kind of trouble strike the writes of its clients."""

    def __init__(self, port: int, kind: str) -> None:
        self.kind = kind
        self.struck = 0
        self.over = False
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.uri = f"mongodb://127.0.0.1:{self._server.getsockname()[1]}/?directConnection=true"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection: a request, its answer, the next request."""
        chance = random.Random()
        with client, socket.create_connection(("127.0.0.1", self._to)) as server, contextlib.suppress(OSError):
            while request := read_message(client):
                strikes = not self.over and is_write(request) and chance.random() < CHANCE
                self.struck += strikes
                if strikes and self.kind == "late command":
                    time.sleep(chance.uniform(*LATE))
                server.sendall(request)
                answer = read_message(server)
                if strikes and self.kind == "lost answer":
                    return
                if strikes and self.kind == "late answer":
                    time.sleep(chance.uniform(*LATE))
                client.sendall(answer)


def read_message(source: socket.socket) -> bytes:
    """The next message of MongoDB's wire protocol; empty at the end."""
    head = source.recv(4, socket.MSG_WAITALL)
    return head + source.recv(int.from_bytes(head, "little") - 4, socket.MSG_WAITALL) if len(head) == 4 else b""


def is_write(request: bytes) -> bool:
    return b"\x02findAndModify\x00" in request or b"\x02update\x00" in request


def session_at(uri: str, collection: str) -> Session:
    client = {"host": uri, "appname": "ambiguous", "heartbeatFrequencyMS": 500}
    return Session(MongoStore(StoreConfig(client, DATABASE, collection)), TIMEOUT)


def lock_of(session: Session, number: int) -> MongoLock:
    return MongoLock(lambda: session, (f"key:{number % KEYS}",), Options(TERMS, wait=0.3))


def with_threads(session: Session, goes_on: Callable[[], bool]) -> int:
    """Take locks and give them back. Returns how many threads hang."""

    def work(number: int) -> None:
        while goes_on():
            number = number * 7 + 1
            with contextlib.suppress(LockError), lock_of(session, number):
                pass

    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(WORKERS)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + 1_200
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
    return sum(worker.is_alive() for worker in workers)


async def cancelled(session: Session, count: int) -> None:
    """Cancel so many tasks, each somewhere between its start and its end."""

    async def cycle(number: int) -> None:
        with contextlib.suppress(LockError):
            async with lock_of(session, number):
                await asyncio.sleep(0.002)

    async def strike(number: int) -> None:
        task = asyncio.create_task(cycle(number))
        await asyncio.sleep(random.uniform(0, 0.06))
        task.cancel()
        await asyncio.wait([task])

    for start in range(0, count, WORKERS):
        await asyncio.gather(*(strike(start + n) for n in range(min(WORKERS, count - start))))


class Struck(Exception):
    """What the signal's handler raises."""


def interrupted(session: Session, count: int) -> int:
    """Have so many signals strike while locks are taken and given back. Returns how many errors did not arrive."""
    fired, arrived = 0, 0

    def strike(*_: object) -> None:
        nonlocal fired
        fired += 1
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for number in range(count):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.02))
                while fired == number:
                    with contextlib.suppress(LockError), lock_of(session, number):
                        pass
            except Struck:
                arrived += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    return fired - arrived


class Bench:
    """The kinds of trouble, each on a collection of its own."""

    def __init__(self, replica_set: ReplicaSet, count: int) -> None:
        self.port = replica_set.members[0].port
        self.count = count
        self.client: MongoClient[Figures] = MongoClient(replica_set.uri)

    def lost_answers(self) -> Figures:
        return self._relayed("lost answer")

    def late_answers(self) -> Figures:
        return self._relayed("late answer")

    def late_commands(self) -> Figures:
        return self._relayed("late command")

    def refused_confirmations(self) -> Figures:
        """The write is made, and then comes a write concern error: by the server's own failpoint."""
        failing: Figures = {
            "failCommands": ["findAndModify"],
            "appName": "ambiguous",
            "writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"},
        }
        fail = {"configureFailPoint": "failCommand", "data": failing}
        trouble = Trouble(self.port, "none")

        def struck() -> int:
            answer = self.client.admin.command({**fail, "mode": {"activationProbability": CHANCE}})
            return int(answer["count"])

        started = struck()
        try:
            return self._judged(trouble, lambda: struck() - started)
        finally:
            self.client.admin.command({**fail, "mode": "off"})

    def cancellations(self) -> Figures:
        trouble = Trouble(self.port, "none")
        name = f"ambiguous_{uuid.uuid4().hex}"
        session = session_at(trouble.uri, name)
        asyncio.run(cancelled(session, self.count))
        return self._report(session, name, self.count, 0)

    def signals(self) -> Figures:
        trouble = Trouble(self.port, "none")
        name = f"ambiguous_{uuid.uuid4().hex}"
        session = session_at(trouble.uri, name)
        lost = interrupted(session, self.count)
        return {**self._report(session, name, self.count, 0), "errors that did not arrive": lost}

    def _relayed(self, kind: str) -> Figures:
        trouble = Trouble(self.port, kind)
        return self._judged(trouble, lambda: trouble.struck)

    def _judged(self, trouble: Trouble, struck: Callable[[], int]) -> Figures:
        name = f"ambiguous_{uuid.uuid4().hex}"
        session = session_at(trouble.uri, name)
        times, guard = 0, threading.Lock()

        def goes_on() -> bool:
            nonlocal times
            with guard:
                times = struck()
            return times < self.count

        hangs = with_threads(session, goes_on)
        trouble.over = True
        if trouble.kind == "none":
            self.client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
        return self._report(session, name, times, hangs)

    def _report(self, session: Session, name: str, times: int, hangs: int) -> Figures:
        """How long entries outlive the trouble, and whether everything can be locked then."""
        locks, over = self.client[DATABASE][name], clock.now()
        alive = {"$max": {"$concatArrays": ["$holders.until", "$waiters.until"]}}
        entries = {"$expr": {"$gt": [alive, "$$NOW"]}}
        while locks.count_documents(entries) and clock.now() - over < 60:
            time.sleep(0.02)
        clean = clock.now() - over
        usable = 0
        for number in range(KEYS):
            with contextlib.suppress(LockError), lock_of(session, number) as lock:
                usable += lock.held
        known = session.known
        session.close()
        locks.drop()
        return {
            "struck": times,
            "threads that hang": hangs,
            "seconds until no entry lived": round(clean, 2),
            "keys that can be locked": f"{usable} of {KEYS}",
            "grants the session still knows": known,
        }


def main() -> None:
    names = ("lost_answers", "late_answers", "late_commands", "refused_confirmations", "cancellations", "signals")
    parser = argparse.ArgumentParser(prog="python -m bench.ambiguous")
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: Figures = {}
    with ReplicaSet(1, parameters={"enableTestCommands": 1}) as replica_set:
        bench = Bench(replica_set, options.count)
        for name in options.only:
            started = time.monotonic()
            figures[name] = getattr(bench, name)()
            figures[name]["seconds in all"] = round(time.monotonic() - started)
            print(f"{name}: {figures[name]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
