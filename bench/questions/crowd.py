"""Many threads and coroutines of one process, or of a few, that want the same key."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.bench import Bench, fresh_key
from bench.contend import HEAD_START, checked, gather
from bench.contenders import OURS
from bench.load import in_threads, memory
from bench.measure import Data, Goal, Piece, Spread, Table, Turn, Turns, interleaved, median
from bench.workers import State, workers
from django_mongolock.engine import clock

#: Waiters of a kind: how many processes they are spread over, and what they are.
SHAPES: Final = {
    "threads of 1 process": (1, "threads"),
    "threads of 8 processes": (8, "threads"),
    "coroutines of 1 process": (1, "coroutines"),
    "coroutines of 8 processes": (8, "coroutines"),
}


def crowd(bench: Bench) -> Iterator[Piece]:
    """One key, and threads or coroutines that want it: in one process, and in eight."""
    sizes = (8, 32) if bench.quick else (8, 32, 128, 512)
    made = Table(
        "Threads and coroutines: hand-over, throughput, commands",
        ["waiters", "hand-over, ms", "acquisitions/s", "longest / mean wait", "commands", "of them getMore"],
        note="Each acquires the lock again at once. Commands: of one acquisition.",
    )
    found = interleaved(
        [f"{size} {shape}" for size in sizes for shape in SHAPES],
        bench.some(1, 2),
        lambda name: shaped(bench, int(name.split()[0]), *SHAPES[name.partition(" ")[2]]),
        bench.failed,
    )
    for name, runs in found.items():
        made.rows.append([name, *(Spread.of(run[n] for run in runs) for n in range(5))])
        yield Goal(f"(d) {name}: commands of a contended acquisition", median([run[3] for run in runs]), 3)
    yield made
    yield Data("crowd", {name: [median(column) for column in zip(*runs, strict=True)] for name, runs in found.items()})
    yield from very_many(bench)


def shaped(bench: Bench, size: int, processes: int, kind: str) -> tuple[float, float, float, float, float]:
    """So many waiters of a kind: hand-over, throughput, longest / mean wait, commands, and those that only read."""
    seconds, key = bench.some(1, 2), fresh_key("crowd")
    with workers(processes) as crew:
        bench.open(crew, OURS)
        for worker in crew:  # all listen then
            worker.begin(KINDS[kind], key, size // processes, clock.now(), clock.now() + 0.3)
        gather(crew, 0.3)
        begin = clock.now() + HEAD_START
        before = bench.world.commands("mongo")
        for worker in crew:
            worker.begin(KINDS[kind], key, size // processes, begin, begin + seconds)
        turns, _ = gather(crew, seconds)
        after = bench.world.commands("mongo")
    count = len(turns.turns)
    waits = turns.steady(begin + seconds / 4, begin + seconds).waits or turns.waits
    return (
        median(turns.hand_overs),
        count / (max(turn.leaving for turn in turns.turns) - begin),
        max(waits) / (sum(waits) / len(waits)),
        sum(after[name] - before[name] for name in after) / count,
        (after["getMore"] - before["getMore"]) / count,
    )


def with_threads(state: State, key: str, count: int, begin: float, end: float) -> tuple[list[Turn], float]:
    """In the worker: so many threads, over and over."""
    make: Callable[[str], Any] = state["peer"].make
    turns: list[Turn] = []

    def work(number: int) -> None:
        time.sleep(max(0.0, begin - clock.now()))
        while (asked := clock.now()) < end:
            with make(key):
                granted = leaving = clock.now()
            turns.append(Turn(asked, granted, leaving))

    in_threads(count, work)
    return turns, 0.0


def with_coroutines(state: State, key: str, count: int, begin: float, end: float) -> tuple[list[Turn], float]:
    """In the worker: so many coroutines, over and over."""
    make: Callable[[str], Any] = state["peer"].make
    turns: list[Turn] = []

    async def work() -> None:
        await asyncio.sleep(max(0.0, begin - clock.now()))
        while (asked := clock.now()) < end:
            async with make(key):
                granted = leaving = clock.now()
            turns.append(Turn(asked, granted, leaving))

    async def everybody() -> None:
        await asyncio.gather(*(work() for _ in range(count)))

    asyncio.run(everybody())
    return turns, 0.0


KINDS: Final = {"threads": with_threads, "coroutines": with_coroutines}


def very_many(bench: Bench) -> Iterator[Piece]:
    """A thousand threads, ten thousand coroutines, each of which wants it once."""
    made = Table(
        "Many waiters in one process, each acquiring once",
        ["waiters", "KB each", "threads of ours", "ms each", "commands each"],
        note="KB: memory for one waiter, with its thread or task.",
    )
    for count, kind, wait in (
        (bench.some(100, 1_000), "threads", all_threads),
        (bench.some(500, 10_000), "coroutines", all_coroutines),
    ):
        with workers(1) as (worker,):
            bench.open([worker], OURS)
            before = bench.world.commands("mongo")
            figures = worker.call(wait, fresh_key("many"), count)
            after = bench.world.commands("mongo")
            commands = sum(after[name] - before[name] for name in after) / count
            made.rows.append([f"{count:,} {kind}", *figures, commands])
            yield Data(f"KB of a waiting {kind[:-1]}", figures[0])
    yield made


def all_threads(state: State, key: str, count: int) -> list[float]:
    """In the worker: KB, threads, milliseconds each."""
    peer = state["peer"]
    holder = peer.make(key).acquire()
    threads, bytes_ = threading.active_count(), memory()
    turns: list[Turn] = []

    def work() -> None:
        with peer.make(key):
            turns.append(Turn(0.0, now := clock.now(), now))

    crew = [threading.Thread(target=work) for _ in range(count)]
    for thread in crew:
        thread.start()
    time.sleep(1.0)
    figures = [(memory() - bytes_) / count / 1024, float(threading.active_count() - threads - count)]
    started = clock.now()
    holder.release()
    for thread in crew:
        thread.join()
    checked(Turns(turns))
    return [*figures, (clock.now() - started) / count * 1000]


def all_coroutines(state: State, key: str, count: int) -> list[float]:
    """In the worker: KB, threads, milliseconds each."""
    peer = state["peer"]

    async def work() -> None:
        async with peer.make(key):
            pass

    async def everybody() -> list[float]:
        holder = await peer.make(key).aacquire()
        threads, bytes_ = threading.active_count(), memory()
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        await asyncio.sleep(2.0)
        figures = [(memory() - bytes_) / count / 1024, float(threading.active_count() - threads)]
        started = clock.now()
        await holder.arelease()
        await asyncio.gather(*tasks)
        return [*figures, (clock.now() - started) / count * 1000]

    return asyncio.run(everybody())
