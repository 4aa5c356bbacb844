"""The cost of a lock that nobody else wants."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.bench import Bench, fresh_key, is_lock
from bench.contend import prove
from bench.contenders import ASYNC, BARE, IN_THREAD, OTHERS, OURS, QUICK, Contender
from bench.measure import Data, Piece, Spread, Table, interleaved, median, ratio
from bench.workers import State, Worker, workers


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one acquire and release, in milliseconds, microseconds of CPU in this process, and milliseconds of
    the server's."""

    milliseconds: float
    cpu: float
    server_cpu: float = 0.0


def run(state: State, key: str, count: int) -> Cost:
    """Run *count* pairs one after another, in the worker."""
    cpu = time.process_time()
    times = state["peer"].pairs([key] * count)
    return Cost(median(times) * 1000, (time.process_time() - cpu) / count * 1e6)


def alone(bench: Bench) -> Iterator[Piece]:
    """Acquire and release of a key that nobody else wants, against two bare majority writes."""
    ours = (OURS, IN_THREAD, ASYNC, BARE)
    found = compared(bench, [*ours, *(QUICK if bench.quick else OTHERS)])
    yield table("One node", found)
    yield Data("one node", {name: [cost.milliseconds for cost in costs] for name, costs in found.items()})
    if bench.quick:
        return
    mongo = [contender for contender in OTHERS if contender.needs == "mongo"]
    found = compared(bench, [contender.at("mongo3") for contender in (*ours, *mongo)])
    bench.world.stop("mongo3")
    yield table("Three nodes", found)


def compared(bench: Bench, contenders: list[Contender]) -> dict[str, list[Cost]]:
    """Each in a process of its own, one after the other in every round."""
    ready = bench.ready(contenders)
    key, count = fresh_key("alone"), bench.some(10, 60)
    with contextlib.ExitStack() as ends:
        crews: dict[str, list[Worker]] = {}

        def measure(name: str) -> Cost:
            if name not in crews:
                crews[name] = begin(bench, ends, ready[name], key)
            before = bench.world.cpu(ready[name].needs)
            cost: Cost = crews[name][0].call(run, key, count)
            return replace(cost, server_cpu=(bench.world.cpu(ready[name].needs) - before) / count * 1000)

        return interleaved(ready, bench.some(2, 15), measure, bench.failed)


def begin(bench: Bench, ends: contextlib.ExitStack, contender: Contender, key: str) -> list[Worker]:
    """Return a worker that has taken the lock before. A second worker has proved with it that it is a lock."""
    crew = ends.enter_context(workers(2))
    bench.open(crew, contender)
    if is_lock(contender):
        prove(crew, key)
    crew[0].call(run, key, bench.some(2, 60))
    return crew


def table(where: str, found: dict[str, list[Cost]]) -> Table:
    made = Table(
        f"{where}: acquire and release, uncontended",
        ["lock", "ms", "times two bare writes", "client CPU, µs", "server CPU, ms"],
        note="The time that the program waits for both. Median of the rounds, with the lowest and the highest.",
    )
    bare = found.get(BARE.name)
    for name, costs in sorted(found.items(), key=lambda item: median([cost.milliseconds for cost in item[1]])):
        times = [cost.milliseconds for cost in costs]
        against = ratio(times, [cost.milliseconds for cost in bare]) if bare else None
        server = sum(cost.server_cpu for cost in costs) / len(costs)
        made.rows.append([name, Spread.of(times), against, round(median([cost.cpu for cost in costs])), server])
    return made
