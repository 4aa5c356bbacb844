"""Thousands of locks in one process: `python -m verify.scale NAME`. The figures of "bulk stays bulk" (DESIGN, rule 7).

    failover   three members, 10,000 locks at the default lease; the primary is killed just before a renewal
    short      the same, with 3,000 locks of a lease of 20 seconds
    waiters    3,000 waiting coroutines, a key each, whose collection is dropped
    stopped    the same in a process that is stopped for 15 seconds
    exit       the end of a process with 5,000 minimum holds, 3,000 waited-for and 3,000 shared locks
    threads    300 program threads with slow writes, beside ten locks with a lease of 6 seconds

Prints the locks that were lost or left, and the commands that were sent.
"""

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pymongo import monitoring

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import UNLIMITED, Terms
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from testproject.servers import Mongod, ReplicaSet

DATABASE: Final = "scale"
#: Threads with locks. The locks of a thread that has ended would be released.
POOLS: Final[list[ThreadPoolExecutor]] = []


class Sent(monitoring.CommandListener):
    """Counts the commands of one client."""

    def __init__(self) -> None:
        self.names = Counter[str]()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.names[event.command_name] += 1

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass

    def take(self) -> dict[str, int]:
        """Return the commands since the last time."""
        taken, self.names = self.names, Counter()
        return {name: taken[name] for name in ("update", "find", "findAndModify") if taken[name]}


def new_session(uri: str) -> tuple[Session, Sent]:
    """Return a session and the counter of its commands."""
    sent = Sent()
    return Session(MongoStore(StoreConfig({"host": uri, "event_listeners": [sent]}, DATABASE))), sent


def new_lock(session: Session, key: str, wait: float | None = 30.0, **terms: Any) -> MongoLock:
    """Return a lock of *session*."""
    return MongoLock(lambda: session, (key,), Terms(**terms), LockOptions(wait=wait))


def held(session: Session, number: int, prefix: str = "k", **terms: Any) -> list[MongoLock]:
    """Return *number* locks that are held."""
    POOLS.append(pool := ThreadPoolExecutor(16))
    return list(pool.map(lambda each: new_lock(session, f"{prefix}{each}", **terms).acquire(), range(number)))


def failover(number: int, lease: float) -> None:
    """Kill the primary 0.3 seconds before a renewal."""
    with ReplicaSet(3) as servers:
        session, sent = new_session(servers.uri)
        locks = held(session, number, lease=lease)
        time.sleep(lease / 3 + 3)
        while (left := session.renewals.next_due() - session.now()) < 1:
            time.sleep(0.05)
        sent.take()
        time.sleep(left + 2)
        print("a quiet beat:", sent.take())
        while (left := session.renewals.next_due() - session.now()) < 1:
            time.sleep(0.05)
        time.sleep(left - 0.3)
        sent.take()
        servers.primary().kill()
        time.sleep(lease + 5)
        print("lost:", sum(not lock.held for lock in locks), "of", number, "commands:", sent.take())
        began = time.monotonic()
        session.close(10.0)
        print(f"closed after {time.monotonic() - began:.1f} s:", sent.take())


async def waiters(uri: str, number: int = 3_000) -> None:
    """Drop the collection under waiting coroutines."""
    holder, _ = new_session(uri)
    locks = held(holder, number, lease=300)
    session, sent = new_session(uri)
    tasks = [asyncio.ensure_future(new_lock(session, f"k{each}", None).aacquire()) for each in range(number)]
    collection = session.store.collection  # type: ignore[attr-defined]
    while collection.count_documents({"waiters.0": {"$exists": True}}) < number:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0.5)
    sent.take()
    collection.drop()
    began, longest, back = time.monotonic(), 0.0, 0
    # Nobody holds the locks any more, and each waiter that asks again is granted its key.
    while back < number and time.monotonic() < began + 45:
        asked = time.monotonic()
        async with new_lock(session, f"free{random.random()}", 10):
            longest = max(longest, time.monotonic() - asked)
        await asyncio.sleep(0.1)
        back = sum(task.done() for task in tasks)
    seconds = time.monotonic() - began
    print(
        f"{back} of {len(locks)} are served after {seconds:.1f} s, a free key took {longest:.2f} s,",
        sent.take(),
    )
    for task in tasks:
        task.cancel()
    await asyncio.to_thread(session.close, 10.0)
    holder.close()


async def waiting(uri: str, number: int = 3_000) -> None:
    """Wait for keys that other processes hold. Print the longest time that a free key has taken, each second."""
    session, _ = new_session(uri)
    tasks = [asyncio.ensure_future(new_lock(session, f"k{each}", None).aacquire()) for each in range(number)]
    while tasks:
        asked = time.monotonic()
        async with new_lock(session, f"free{random.random()}", 20):
            print(f"{time.monotonic() - asked:.2f}", flush=True)
        await asyncio.sleep(0.1)


def stopped(uri: str, number: int = 3_000) -> None:
    """Stop the process of many waiters."""
    holder, _ = new_session(uri)
    locks = held(holder, number, lease=300)
    program = [sys.executable, "-m", "verify.scale", "waiting", uri]
    living: Any = {"waiters.until": {"$exists": True}, "$expr": {"$gt": [{"$last": "$waiters.until"}, "$$NOW"]}}
    queued = holder.store.collection  # type: ignore[attr-defined]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        while queued.count_documents(living) < number:
            time.sleep(0.5)
        time.sleep(5)
        child.send_signal(signal.SIGSTOP)
        time.sleep(15)
        print("in the queues after the stop:", queued.count_documents(living))
        child.send_signal(signal.SIGCONT)
        began = time.monotonic()
        while queued.count_documents(living) < number and time.monotonic() < began + 60:
            time.sleep(0.2)
        print(f"{queued.count_documents(living)} of {len(locks)} are queued after {time.monotonic() - began:.1f} s")
        time.sleep(5)
        child.kill()
        assert child.stdout is not None
        seconds = [float(line) for line in child.stdout]
        print(f"a free key took {sorted(seconds)[-2]:.2f} s beside the stop")
    holder.close(10.0)


def end(uri: str) -> None:
    """End a session in order."""
    session, sent = new_session(uri)
    other, _ = new_session(uri)
    locks = held(session, 5_000, "hold", min_hold=0.1)
    locks += held(session, 3_000, "waited")
    readers = {"mode": "shared", "capacity": UNLIMITED}
    locks += held(session, 3_000, "shared", **readers)
    theirs = held(other, 3_000, "shared", **readers)
    collection = session.store.collection  # type: ignore[attr-defined]

    async def wait() -> None:
        tasks = [asyncio.ensure_future(new_lock(other, f"waited{each}", 300).aacquire()) for each in range(3_000)]
        while collection.count_documents({"waiters.0": {"$exists": True}}) < len(tasks):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.5)
        sent.take()
        began = time.monotonic()
        await asyncio.to_thread(session.close)
        print(f"closed after {time.monotonic() - began:.1f} s:", sent.take())
        mine = {"holders": {"$elemMatch": {"session": session.id, "released": None}}}
        left = other.store.collection.count_documents(mine)  # type: ignore[attr-defined]
        print("left:", left, "of", len(locks), "beside", len(theirs))
        await asyncio.gather(*tasks)
        print(f"all waiters are served after {time.monotonic() - began:.1f} s")

    asyncio.run(wait())
    other.close(10.0)


def threads(server: Mongod, number: int = 300) -> None:
    """Have half of the writes of many threads take 0.8 seconds."""
    session, _ = new_session(server.uri)
    locks, over, failed = held(session, 10, "held", lease=6.0), threading.Event(), Counter[str]()
    fault = {"failCommands": ["findAndModify"], "blockConnection": True, "blockTimeMS": 800}
    with server.client() as client:
        mode = {"activationProbability": 0.5}
        client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": fault})

    def work(each: int) -> None:
        while not over.is_set():
            try:
                with new_lock(session, f"own{each}"):
                    failed["done"] += 1
            except Exception as error:  # noqa: BLE001 - it is counted
                failed[type(error).__name__] += 1

    workers = [threading.Thread(target=work, args=(each,)) for each in range(number)]
    for worker in workers:
        worker.start()
    time.sleep(30)
    print("lost:", sum(not lock.held for lock in locks), "of 10,", dict(failed))
    over.set()
    for worker in workers:
        worker.join()
    session.close()


def main(name: str) -> None:
    """Run one of the programs."""
    if name in ("failover", "short"):
        failover(*{"failover": (10_000, 30.0), "short": (3_000, 20.0)}[name])
        return
    if name == "waiting":
        asyncio.run(waiting(sys.argv[2]))
        return
    with ReplicaSet(1, parameters={"enableTestCommands": 1}) as servers:
        server = servers.members[0]
        if name == "waiters":
            asyncio.run(waiters(servers.uri))
        elif name == "stopped":
            stopped(servers.uri)
        elif name == "exit":
            end(servers.uri)
        else:
            threads(server)


if __name__ == "__main__":
    main(sys.argv[1])
