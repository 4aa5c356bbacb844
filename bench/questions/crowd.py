"""Many threads and coroutines of one process, or of a few, that want the same key."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.bench import Bench, fresh_key
from bench.contend import HEAD_START, gather
from bench.contenders import OURS
from bench.load import in_threads
from bench.measure import Data, Piece, Spread, Table, Turn, interleaved, median
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
    yield made
    yield Data("crowd", {name: [median(column) for column in zip(*runs, strict=True)] for name, runs in found.items()})


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
