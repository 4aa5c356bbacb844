"""What each step of a lock costs the server, measured where nothing else goes on: what the model is fed with."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from bench.bench import Bench, fresh_key
from bench.contend import in_a_loop, prove
from bench.contenders import BARE, OURS
from bench.measure import median
from bench.model import Costs
from bench.ours import ALIAS
from bench.peers import DATABASE
from bench.questions.held import beat, forget, hold
from bench.simulation import Steps
from bench.workers import State, workers
from django_mongolock.backends.base import mongo_store
from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms, entry
from django_mongolock.engine.step import Step


class Meter:
    """What the server did between two moments."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.client: MongoClient[dict[str, Any]] = bench.world.client()
        self.start()

    def start(self) -> None:
        status = self.client.admin.command("serverStatus")
        self._cpu = self.bench.world.cpu("mongo")
        self._net = status["network"]["bytesIn"] + status["network"]["bytesOut"]
        self._commands = sum(self.bench.world.commands("mongo").values())
        self._since = self.client.admin.command("hello")["lastWrite"]["opTime"]["ts"]

    def stop(self, count: int, collection: str = "mongolock_locks") -> dict[str, float]:
        """Of each of *count*: milliseconds of CPU, bytes, commands."""
        cpu = self.bench.world.cpu("mongo") - self._cpu
        status = self.client.admin.command("serverStatus")
        net = status["network"]["bytesIn"] + status["network"]["bytesOut"] - self._net
        commands = sum(self.bench.world.commands("mongo").values()) - self._commands
        time.sleep(0.2)
        size = {"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}}
        found = list(
            self.client.local["oplog.rs"].aggregate(
                [{"$match": {"ts": {"$gt": self._since}, "ns": f"{DATABASE}.{collection}"}}, size], allowDiskUse=True
            )
        )
        oplog = found[0]["bytes"] if found else 0
        return {"cpu": cpu * 1000 / count, "net": net / count, "oplog": oplog / count, "commands": commands / count}


def measured(bench: Bench) -> tuple[Costs, Steps]:
    """All costs, each where nothing else goes on."""
    meter, terms = Meter(bench), Terms(lease=30, margin=3)
    with workers(1) as (worker,):
        bench.open([worker], OURS)
        worker.call(pairs, fresh_key(), 20)
        meter.start()
        count = bench.some(100, 1_000)
        client_cpu, acquire = worker.call(pairs, fresh_key(), count)
        pair = meter.stop(count)
        locks = bench.some(1_000, 5_000)
        worker.call(hold, fresh_key("beat"), locks, terms)
        worker.call(beat)
        meter.start()
        for _ in range(3):
            worker.call(beat)
        renewal = meter.stop(3 * locks)
        worker.call(forget)
    stream_cpu = fan_out(bench)
    queued_cpu, waiter_cpu = queueing(bench)
    waiting, hand_over, each = contended(bench, meter)
    costs = Costs(
        pair_cpu=pair["cpu"],
        pair_oplog=pair["oplog"],
        pair_net=pair["net"],
        waiting_cpu=max(0.0, waiting["cpu"] - pair["cpu"]),
        waiting_oplog=max(0.0, waiting["oplog"] - pair["oplog"]),
        waiting_commands=max(0.0, waiting["commands"] - 2),
        renewal_cpu=renewal["cpu"],
        renewal_oplog=renewal["oplog"],
        stream_cpu=stream_cpu,
        connections=each,
        connection_kb=connection_memory(bench),
        hand_over=hand_over,
    )
    # Of an acquire: what is neither the server's CPU nor half of the client's is the disk, and the way there.
    journal = max(0.1, acquire - pair["cpu"] / 2 - client_cpu / 2)
    wake = stream_cpu + client_cpu / 4
    steps = Steps(client_cpu, pair["cpu"] / 2, pair["cpu"] / 2, journal, wake, stream_cpu, queued_cpu, waiter_cpu)
    return costs, steps


def bare_pair(bench: Bench) -> dict[str, float]:
    """What the least costs that a lock could send."""
    meter = Meter(bench)
    with workers(1) as (worker,):
        bench.open([worker], BARE)
        worker.call(pairs, fresh_key(), 20)
        meter.start()
        count = bench.some(100, 1_000)
        worker.call(pairs, fresh_key(), count)
        return meter.stop(count, "bare")


def pairs(state: State, key: str, count: int) -> tuple[float, float]:
    """In the worker: milliseconds of CPU for a pair, and of the acquire alone."""
    peer, acquires, cpu = state["peer"], [], time.process_time()
    for _ in range(count):
        before = clock.now()
        peer.acquire(key)
        acquires.append((clock.now() - before) * 1000)
        peer.release(key)
    return (time.process_time() - cpu) / count * 1000, median(acquires)


def fan_out(bench: Bench) -> float:
    """Milliseconds of the server's CPU that a change costs for each session that listens: the slope over them."""
    sizes, count = ((0, 16) if bench.quick else (0, 16, 32, 64)), bench.some(60, 300)
    costs = []
    for size in sizes:
        with workers(2) as (watcher, writer):
            bench.open([watcher, writer], OURS)
            watcher.call(watch, size)
            writer.call(pairs, fresh_key(), 5)
            cpu = bench.world.cpu("mongo")
            writer.call(pairs, fresh_key(), count)
            costs.append((bench.world.cpu("mongo") - cpu) * 1000 / (2 * count))
            watcher.call(unwatch)
    return max(0.0, statistics.linear_regression(sizes, costs).slope)


def watch(state: State, size: int) -> None:
    """In the worker: listen so many times, as so many processes would that wait for something else."""
    ends = state["ends"] = threading.Event()
    up = threading.Barrier(size + 1)
    store = mongo_store(ALIAS)

    def read(number: int) -> None:
        bells = store.listen(f"nobody{number:06}")
        next(bells)
        up.wait()
        while not ends.is_set():
            next(bells)

    state["readers"] = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(size)]
    for reader in state["readers"]:
        reader.start()
    up.wait()


def unwatch(state: State) -> None:
    """In the worker: end them. They read to the end of their wait, and what is measured next must not pay for it."""
    state["ends"].set()
    for reader in state["readers"]:
        reader.join(30)


def queueing(bench: Bench) -> tuple[float, float]:
    """Milliseconds of the server's CPU for a command on a key that is held, and for each waiter in its document: the
    line over several lengths of the queue, which grows and shrinks by one."""
    sizes, count = ((1, 16) if bench.quick else (1, 16, 32, 64)), bench.some(30, 300)
    costs = []
    with workers(1) as (worker,):
        bench.open([worker], OURS)
        for size in sizes:
            key = fresh_key("queue")
            worker.call(queue_up, key, range(size + 1))
            worker.call(come_and_go, key, 5)
            cpu = bench.world.cpu("mongo")
            worker.call(come_and_go, key, count)
            costs.append((bench.world.cpu("mongo") - cpu) * 1000 / (2 * count))
    line = statistics.linear_regression(sizes, costs)
    return max(0.0, line.intercept), max(0.0, line.slope)


def queue_up(state: State, key: str, numbers: range) -> None:
    """In the worker: one holder, and the others behind it, as processes that do nothing more."""
    for number in numbers:
        _apply(key, _waiter(number))


def come_and_go(state: State, key: str, count: int) -> None:
    """In the worker: so often one comes to the end of the queue, and leaves it."""
    for _ in range(count):
        _apply(key, _waiter(count))
        _apply(key, Step(ask=_name(count), remove=(_name(count),)))


def _apply(key: str, step: Step) -> None:
    mongo_store(ALIAS).apply(key, step, 10.0)


def _waiter(number: int) -> Step:
    terms = Terms(lease=600, margin=1, waiter_lease=600)
    facts: dict[str, str | int] = {
        "host": "worker-1",
        "pid": number,
        "label": "orders",
        "place": "shop/orders.py:120",
        "thread": "MainThread",
    }
    return Step(ask=_name(number), add=entry(_name(number), f"{number:012}", terms, facts), beat=1)


def _name(number: int) -> str:
    return f"{number:012}.{number}-89abcdef"


def contended(bench: Bench, meter: Meter, count: int = 8) -> tuple[dict[str, float], float, float]:
    """What an acquisition costs that waits; the hand-over; the connections of a process."""
    key = fresh_key("costs")
    with workers(count) as crew:
        bench.open(crew, OURS)
        prove(crew, key)
        meter.start()
        turns, _, _ = in_a_loop(crew, key, seconds=bench.some(1, 3))
        cost = meter.stop(len(turns.turns))
        during = connections(meter.client)
    time.sleep(1.0)  # the server notices that they are gone
    return cost, median(turns.hand_overs), max(0.0, (during - connections(meter.client)) / count)


def connections(client: MongoClient[Any]) -> int:
    return int(client.admin.command("serverStatus")["connections"]["current"])


def connection_memory(bench: Bench, count: int = 100) -> float:
    """KB of the server's memory that an idle connection takes."""
    pid = bench.world.mongod().pid
    with MongoClient[Any](bench.world.uri("mongo"), minPoolSize=count, maxPoolSize=count) as client:
        before = memory_of(pid)
        opened = connections(client)
        time.sleep(0.5)
        end = clock.now() + 10
        while clock.now() < end and connections(client) < opened + count / 2:
            time.sleep(0.1)
        return max(0.0, (memory_of(pid) - before) / max(1, connections(client) - opened))


def memory_of(pid: int) -> float:
    """Resident KB of a process; 0 where that is not to be had."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0.0)
