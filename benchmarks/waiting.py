"""What waiting costs: hand-overs, commands, fairness, many locks, many waiters.

    python -m benchmarks.waiting [--quick] [--only NAME …] [--json FILE]

Everything runs against a real mongod, a replica set of one on this machine, which shares the processors with the
measured processes. Times of different processes are compared by CLOCK_BOOTTIME, which they share.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient, WriteConcern
from pymongo.errors import OperationFailure

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.engine.locks import MongoLock, Options
from django_mongolock.engine.protocol import Granted
from django_mongolock.engine.session import Session
from django_mongolock.engine.store import MongoStore, StoreConfig
from testproject.servers import mongodb

DATABASE: Final = "mongolock_benchmarks"
#: What the server sees of us; it counts them by these names.
COMMANDS: Final = ("findAndModify", "update", "find", "getMore", "aggregate")

#: Beyond so many sessions at one key, a mongod on two shared cores does not keep up with their renewals and streams:
#: commands time out, and the run does not end.
MOST_SESSIONS: Final = 256

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Who contends for one key. Each of *processes* has *sessions*, each of those has *threads*; each thread takes
    the lock *warm* times unmeasured and then *rounds* times."""

    uri: str
    collection: str
    processes: int = 8
    sessions: int = 1
    threads: int = 1
    rounds: int = 50
    warm: int = 3
    polls: bool = False

    @property
    def waiters(self) -> int:
        return self.processes * self.sessions * self.threads


@dataclass
class Turns:
    """Of each acquisition: its token, and when it was asked for, granted and given back."""

    turns: list[tuple[int, float, float, float]] = field(default_factory=list)

    @property
    def hand_overs(self) -> list[float]:
        """Milliseconds from the call of release to the next holder's return from acquire."""
        return [(after[2] - before[3]) * 1000 for before, after in pairwise(self.turns) if after[1] < before[3]]

    @property
    def waits(self) -> list[float]:
        return [(granted - asked) * 1000 for _, asked, granted, _ in self.turns]

    def overtakings(self, slack: float = 0.02) -> int:
        """How often one was served although another had asked more than *slack* seconds before it, and waited."""
        last = float("inf")
        count = 0
        for _, asked, *_ in reversed(self.turns):
            count += asked > last + slack
            last = min(last, asked)
        return count


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def new_session(load: Load) -> Session:
    return Session(MongoStore(StoreConfig({"host": load.uri}, DATABASE, load.collection)))


def take(session: Session) -> tuple[int, float, float, float]:
    """Take the lock and give it back."""
    asked = clock.now()
    lock = MongoLock(lambda: session, ("hot",), Options(Terms(margin=1), wait=None)).acquire()
    granted, token, leaving = clock.now(), lock.fencing_token, clock.now()
    lock.release()
    return token, asked, granted, leaving


def contend(load: Load, ready: Any, results: Any) -> None:
    """One of the processes."""
    if load.polls:
        MongoStore.watch = refuse_to_watch  # type: ignore[method-assign, assignment]
    sessions = [new_session(load) for _ in range(load.sessions)]
    turns: list[tuple[int, float, float, float]] = []
    started = threading.Barrier(load.sessions * load.threads + 1)

    def work(session: Session) -> None:
        for _ in range(load.warm):
            take(session)
        started.wait()
        started.wait()
        turns.extend([take(session) for _ in range(load.rounds)])

    workers = [threading.Thread(target=work, args=(session,)) for session in sessions for _ in range(load.threads)]
    for worker in workers:
        worker.start()
    started.wait()
    ready.wait()
    started.wait()
    for worker in workers:
        worker.join()
    results.put(turns)
    ready.wait()
    for session in sessions:
        session.close()


def refuse_to_watch(store: MongoStore, session: str) -> Any:
    raise OperationFailure("not in this measurement", 13)


class Bare(threading.Thread):
    """Writes one small document with majority, over and over: what a hand-over is measured by."""

    def __init__(self, uri: str) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self._uri = uri
        self._ends = False

    def run(self) -> None:
        with MongoClient[Figures](self._uri) as client:
            bare = client[DATABASE].get_collection("bare", write_concern=WriteConcern(w="majority"))
            while not self._ends:
                before = clock.now()
                bare.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)
                self.times.append((clock.now() - before) * 1000)
                time.sleep(0.005)

    def end(self) -> float:
        """Their median, in milliseconds."""
        self._ends = True
        self.join()
        return statistics.median(self.times)


def bare_write(uri: str, seconds: float = 1.0) -> float:
    bare = Bare(uri)
    bare.start()
    time.sleep(seconds)
    return bare.end()


class Bench:
    """The measurements; each returns its figures and prints them."""

    def __init__(self, uri: str, *, quick: bool) -> None:
        self.uri = uri
        self.quick = quick
        self.client = MongoClient[Figures](uri)

    @contextmanager
    def collection(self) -> Iterator[str]:
        name = f"waiting_{uuid.uuid4().hex}"
        yield name
        self.client[DATABASE].drop_collection(name)

    def counts(self) -> dict[str, int]:
        commands = self.client.admin.command("serverStatus")["metrics"]["commands"]
        return {name: int(commands[name]["total"]) for name in COMMANDS}

    def run(self, *, bare: bool = False, **load: Any) -> tuple[Turns, Figures]:
        """Let them contend. Also returns the commands for each acquisition, and what a bare write took meanwhile."""
        with self.collection() as name:
            told = Load(self.uri, name, **load)
            context = multiprocessing.get_context("spawn")
            ready, results = context.Barrier(told.processes + 1), context.Queue()
            children = [context.Process(target=contend, args=(told, ready, results)) for _ in range(told.processes)]
            for child in children:
                child.start()
            ready.wait()
            before, started = self.counts(), clock.now()
            writer = Bare(self.uri)
            if bare:
                writer.start()
            turns = sorted(turn for _ in children for turn in results.get())
            seconds, after = clock.now() - started, self.counts()
            figures: Figures = {"bare write, same load": round(writer.end(), 2)} if bare else {}
            ready.wait()
            for child in children:
                child.join()
            if bare:
                before["update"] += len(writer.times)
        figures["acquisitions per second"] = round(len(turns) / seconds)
        figures["commands"] = {n: round((after[n] - before[n]) / len(turns), 2) for n in COMMANDS}
        figures["commands, sum"] = round(sum(after[n] - before[n] for n in COMMANDS) / len(turns), 2)
        return Turns(turns), figures

    # What is measured

    def hand_over(self) -> Figures:
        """Between 8 processes, beside one bare majority write."""
        idle = bare_write(self.uri)
        turns, figures = self.run(bare=True, rounds=20 if self.quick else 100)
        alone, _ = self.run(rounds=20 if self.quick else 100)
        two, _ = self.run(processes=2, rounds=20 if self.quick else 100)
        median = statistics.median(alone.hand_overs)
        return {
            "bare write, idle": round(idle, 2),
            **figures,
            "hand-over, median": round(median, 2),
            "hand-over, p95": round(percentile(alone.hand_overs, 0.95), 2),
            "hand-over beside the bare writes, median": round(statistics.median(turns.hand_overs), 2),
            "hand-over between 2 processes, median": round(statistics.median(two.hand_overs), 2),
            "times a bare write, idle": round(median / idle, 2),
            "times a bare write, same load": round(
                statistics.median(turns.hand_overs) / figures["bare write, same load"], 2
            ),
        }

    def polling(self) -> Figures:
        """The same without a change stream."""
        turns, figures = self.run(rounds=10 if self.quick else 40, polls=True)
        return {**figures, "hand-over, median": round(statistics.median(turns.hand_overs), 2)}

    def commands(self) -> Figures:
        """Commands for each contended acquisition, by who waits."""
        table: Figures = {}
        for waiters in (8, 64) if self.quick else (8, 32, 64, 128, 256):
            rounds = max(4, 512 // waiters)
            shapes: dict[str, Figures] = {
                "threads of 1 process": {"processes": 1, "threads": waiters},
                "threads of 8 processes": {"processes": 8, "threads": waiters // 8},
                "sessions of their own": {"processes": 8, "sessions": waiters // 8},
            }
            if waiters > MOST_SESSIONS:
                del shapes["sessions of their own"]
                print("   ", waiters, "sessions of their own: not measured, see MOST_SESSIONS", flush=True)
            for name, shape in shapes.items():
                _, figures = self.run(rounds=rounds, **shape)
                table[f"{waiters} {name}"] = {"sum": figures["commands, sum"], **figures["commands"]}
                print("   ", waiters, name, table[f"{waiters} {name}"], flush=True)
        return table

    def fairness(self) -> Figures:
        """8 processes x 100, after a warm-up."""
        turns, _ = self.run(rounds=30 if self.quick else 100, warm=10)
        # Towards the end there are fewer and fewer who wait, and at the start they come one by one.
        waits = turns.waits[16:-16]
        return {
            "overtaken": turns.overtakings(),
            "mean wait": round(statistics.mean(waits), 1),
            "longest wait": round(max(waits), 1),
            "longest / mean": round(max(waits) / statistics.mean(waits), 2),
        }

    def held(self) -> Figures:
        """10,000 held locks in one process: what a beat costs."""
        count, terms = 10_000, Terms(lease=30, margin=3)
        with self.collection() as name:
            session = new_session(Load(self.uri, name))
            grants = hold_many(session, count, terms)
            figures: list[tuple[float, float, int]] = []
            for _ in range(2 if self.quick else 4):
                for grant in grants:
                    grant.renew_at = 0.0
                before, cpu, started = self.counts(), time.process_time(), clock.now()
                session.beat()
                used, took, after = time.process_time() - cpu, clock.now() - started, self.counts()
                figures.append((used, took, sum(after[n] - before[n] for n in COMMANDS)))
            alive = sum(grant.held for grant in grants)
            for grant in grants:
                grant.lose("the benchmark is over")
                session.forget(grant)
            session.close()
        used, took, commands = (statistics.median(column) for column in zip(*figures, strict=True))
        return {
            "held": alive,
            "commands a beat": commands,
            "seconds a beat": round(took, 2),
            "of one core, at a lease of 30 s": f"{used / (terms.lease / 3):.1%}",
        }

    def many(self) -> Figures:
        """1,000 threads and 10,000 coroutines want one key, in one process."""
        threads, tasks = (200, 1_000) if self.quick else (1_000, 10_000)
        context = multiprocessing.get_context("spawn")
        figures: Figures = {}
        for name, count, call in (("threads", threads, crowd_of_threads), ("coroutines", tasks, crowd_of_tasks)):
            with self.collection() as collection:
                results = context.Queue()
                child = context.Process(target=call, args=(Load(self.uri, collection), count, results))
                before = self.counts()
                child.start()
                figures[f"{count} {name}"] = results.get()
                child.join()
                after = self.counts()
                figures[f"{count} {name}"]["commands each"] = round(
                    sum(after[n] - before[n] for n in COMMANDS) / count, 2
                )
        return figures


def hold_many(session: Session, count: int, terms: Terms) -> list[Any]:
    """Have the session hold so many locks. They are written at once: to acquire each would take minutes."""
    store: Any = session.store
    collection = store.collection
    with MongoLock(lambda: session, ("pattern",), Options(terms)):
        pattern = collection.find_one({"_id": "pattern"}) or {}
    (holder,) = pattern["holders"]
    grants, documents = [], []
    for number in range(count):
        lock = MongoLock(lambda: session, (f"key:{number:06}",), Options(terms))
        grant = lock._new_grant(session, lock.key, threading.main_thread())
        grant.hold(Granted(holder["token"], datetime.now(UTC), clock.now() + terms.lease, clock.now()), 0.0)
        grants.append(grant)
        documents.append({**pattern, "_id": grant.key, "holders": [{**holder, "grant": grant.id}]})
    collection.insert_many(documents)
    session._grants |= {grant.id: grant for grant in grants}
    return grants


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def crowd_of_threads(load: Load, count: int, results: Any) -> None:
    session, done = new_session(load), []
    take(session)
    holder = MongoLock(lambda: session, ("hot",), Options(Terms(margin=1))).acquire()
    threads, bytes_ = threading.active_count(), memory()
    workers = [threading.Thread(target=lambda: done.append(take(session))) for _ in range(count)]
    for worker in workers:
        worker.start()
    time.sleep(1)
    figures: Figures = {
        "KB each": round((memory() - bytes_) / count / 1024, 1),
        "threads of ours": threading.active_count() - threads - count,
    }
    started = clock.now()
    holder.release()
    for worker in workers:
        worker.join()
    results.put({**figures, "finished": len(done), "ms each": round((clock.now() - started) / count * 1000, 2)})
    session.close()


def crowd_of_tasks(load: Load, count: int, results: Any) -> None:
    session, done = new_session(load), []

    async def work() -> None:
        async with MongoLock(lambda: session, ("hot",), Options(Terms(margin=1), wait=None)) as lock:
            done.append(lock.fencing_token)

    async def crowd() -> Figures:
        holder = await MongoLock(lambda: session, ("hot",), Options(Terms(margin=1))).aacquire()
        threads, bytes_ = threading.active_count(), memory()
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        await asyncio.sleep(2)
        figures: Figures = {
            "KB each": round((memory() - bytes_) / count / 1024, 1),
            "threads more": threading.active_count() - threads,
        }
        started = clock.now()
        await holder.arelease()
        await asyncio.gather(*tasks)
        return {**figures, "finished": len(done), "ms each": round((clock.now() - started) / count * 1000, 2)}

    take(session)
    results.put(asyncio.run(crowd()))
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting")
    names = ("hand_over", "polling", "commands", "fairness", "held", "many")
    parser.add_argument("--quick", action="store_true", help="smaller numbers: a minute or so")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: Figures = {}
    with mongodb() as uri:
        bench = Bench(uri, quick=options.quick)
        for name in options.only:
            measure: Callable[[], Figures] = getattr(bench, name)
            print(f"{name}: {measure.__doc__}", flush=True)
            figures[name] = measure()
            for what, figure in figures[name].items():
                print(f"  {what}: {figure}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
