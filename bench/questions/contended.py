"""The speed, the fairness and the costs of hand-overs between processes that want the same key."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from bench.bench import Bench, fresh_key
from bench.contend import at_once, in_a_loop, prove
from bench.contenders import FEW, MAIN, OTHERS, OURS, POLLING, QUICK, Contender
from bench.floor import Floor, floor
from bench.measure import Data, Piece, Spread, Table, interleaved, median, ratio
from bench.timeline import timeline
from bench.workers import workers

#: The sizes by the number of processes, with the rounds, the seconds of each, and the contenders.
SIZES: Final[dict[int, tuple[int, float, tuple[Contender, ...]]]] = {
    2: (2, 1.0, MAIN),
    8: (3, 1.5, (POLLING, *OTHERS)),
    32: (2, 2.0, MAIN),
    128: (1, 4.0, FEW),
}
QUICK_SIZES: Final = {2: (1, 0.4, QUICK), 8: (2, 0.5, QUICK)}
#: Commands that only ask whether there is news.
READS: Final = "getMore"


@dataclass(frozen=True, slots=True)
class Run:
    """One contender, one round. Times are in milliseconds, each cost is of one acquisition."""

    hand_over: float
    per_second: float
    mean_wait: float
    longest_wait: float
    commands: float
    reads: float
    server_cpu: float
    client_cpu: float


def contended(bench: Bench) -> Iterator[Piece]:
    """One key and 2 to 128 processes that want it: hand-over, throughput, fairness, commands, CPU."""
    sizes = QUICK_SIZES if bench.quick else SIZES
    everything: dict[str, Any] = {}
    for count, (rounds, seconds, others) in sizes.items():
        ready, floors = bench.ready([OURS, *others]), list[Floor]()

        def measure(name: str, count: int = count, seconds: float = seconds) -> Run:
            if name == OURS.name:
                floors.append(floor(bench.world, bench.some(5, 100)))  # noqa: B023 - called in this turn of the loop
            return run(bench, ready[name], count, seconds)  # noqa: B023 - see above

        found = interleaved(ready, rounds, measure, bench.failed)
        yield from tables(count, found, ready, floors)
        if count == min(sizes):
            yield timeline(bench, floors[0])
        everything[str(count)] = {
            name: {field: [getattr(run, field) for run in runs] for field in Run.__slots__}
            for name, runs in found.items()
        }
        yield Data("sizes", everything)


def run(bench: Bench, contender: Contender, count: int, seconds: float) -> Run:
    """Let *count* processes acquire over and over for *seconds*, and then each of them once, some times."""
    key, world, needs = fresh_key("hot"), bench.world, contender.needs
    with workers(count) as crew:
        bench.open(crew, contender)
        prove(crew, key)  # and all are connected then, and all listen
        before, cpu = world.commands(needs), world.cpu(needs)
        turns, begin, client = in_a_loop(crew, key, seconds)
        after, server = world.commands(needs), world.cpu(needs) - cpu
        all_ = len(turns.turns)
        rushes = [at_once(crew, key) for _ in range(1 if bench.quick or count > 32 else 2)]
        spent = {name: (after[name] - before[name]) / all_ for name in after}
        hand_overs = [time for rush in rushes for time in rush.hand_overs]
        waits = (turns.steady(begin + seconds / 4, begin + seconds) if all_ > 4 * count else turns).waits
    return Run(
        hand_over=median(hand_overs),
        per_second=all_ / (max(turn.leaving for turn in turns.turns) - begin),
        mean_wait=sum(waits) / max(1, len(waits)),
        longest_wait=max(waits, default=0.0),
        commands=sum(spent.values()) if spent else float("nan"),
        reads=spent.get(READS, float("nan")),
        server_cpu=server / all_ * 1000,
        client_cpu=client / all_ * 1000,
    )


def spread(runs: list[Run], field: str) -> Spread:
    return Spread.of(getattr(run, field) for run in runs)


def tables(
    count: int, found: dict[str, list[Run]], ready: dict[str, Contender], floors: list[Floor]
) -> Iterator[Table]:
    """Speed with fairness, and cost."""
    least = median([each.total for each in floors])
    ours = found.get(OURS.name, [])
    speed = Table(
        f"{count} processes: hand-over and throughput",
        ["lock", "waits", "hand-over, ms", "times ours", "times the floor", "acquisitions/s", "longest / mean wait"],
        note="Hand-over: from the call of release to the return of acquire in a process that was waiting, with each "
        "process acquiring the lock once. Acquisitions: with each process acquiring it again at once. "
        f"Floor: a majority write and a message between two clients of MongoDB took {least:.2f} ms, measured by turns.",
    )
    cost = Table(
        f"{count} processes: what an acquisition costs",
        ["lock", "commands", "of them getMore", "server CPU, ms", "client CPU, ms"],
        note="CPU of the server and of all clients together. Redis also counts the commands of its scripts.",
    )
    for name in sorted(found, key=lambda name: spread(found[name], "hand_over").median):
        runs = found[name]
        over = spread(runs, "hand_over")
        same = len(runs) == len(ours)
        times = ratio([r.hand_over for r in runs], [r.hand_over for r in ours]) if same and ours else None
        uneven = Spread.of(r.longest_wait / r.mean_wait for r in runs if r.mean_wait)
        waits = ready[name].make.waits
        speed.rows.append([name, waits, over, times, over.median / least, spread(runs, "per_second"), uneven])
        commands, reads = spread(runs, "commands").median, spread(runs, "reads").median
        cpu = [spread(runs, "server_cpu").median, spread(runs, "client_cpu").median]
        cost.rows.append([name, commands, reads, *cpu])
    yield from (speed, cost)
