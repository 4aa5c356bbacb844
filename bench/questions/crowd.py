"""Threads of one process that want the same key."""

import time
from collections.abc import Iterator

from bench.bench import Bench, fresh_key
from bench.contend import HEAD_START, gather
from bench.contenders import OURS
from bench.load import in_threads
from bench.measure import Piece, Spread, Table, Turn, interleaved, median
from bench.workers import State, workers
from django_mongolock.engine import clock


def crowd(bench: Bench) -> Iterator[Piece]:
    """One key, and threads of one process that want it: hand-over, throughput, commands."""
    made = Table(
        "Threads of one process: hand-over, throughput, commands",
        ["threads", "hand-over, ms", "acquisitions/s", "commands"],
        note="Each acquires the lock again at once. Commands: of one acquisition.",
    )
    sizes = ("8", "32") if bench.quick else ("8", "32", "128", "512")
    found = interleaved(sizes, bench.some(1, 2), lambda size: shaped(bench, int(size)), bench.failed)
    for size, runs in found.items():
        made.rows.append([size, *map(Spread.of, zip(*runs, strict=True))])
    yield made


def shaped(bench: Bench, size: int) -> tuple[float, float, float]:
    """Return the milliseconds of a hand-over, the acquisitions a second, and the commands of one, for *size*
    threads."""
    seconds, key = bench.some(1, 2), fresh_key("crowd")
    with workers(1) as crew:
        bench.open(crew, OURS)
        begin = clock.now() + HEAD_START
        before = bench.world.commands("mongo")
        crew[0].begin(work, key, size, begin, begin + seconds)
        turns, _ = gather(crew, seconds)
        after = bench.world.commands("mongo")
    count = len(turns.turns)
    spent = sum(after[name] - before[name] for name in after)
    return median(turns.hand_overs), count / (max(turn.leaving for turn in turns.turns) - begin), spent / count


def work(state: State, key: str, count: int, begin: float, end: float) -> tuple[list[Turn], float]:
    """Run *count* threads in the worker, over and over."""
    turns: list[Turn] = []

    def over_and_over(number: int) -> None:
        time.sleep(max(0.0, begin - clock.now()))
        while (asked := clock.now()) < end:
            with state["peer"].make(key):
                granted = leaving = clock.now()
            turns.append(Turn(asked, granted, leaving))

    in_threads(count, over_and_over)
    return turns, 0.0
