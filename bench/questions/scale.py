"""From the costs of each step here to a fleet: the model, and a simulation that is compared with a real run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Final

from bench.bench import Bench, fresh_key
from bench.contend import in_a_loop, prove
from bench.contenders import BARE, OURS
from bench.costs import bare_pair, measured
from bench.measure import Cell, Data, Goal, Note, Piece, Spread, Table, median, ratio
from bench.model import Costs, Demand, Fleet, demand, first_to_break, most_processes
from bench.simulation import Steps, simulate
from bench.workers import workers

#: The fleets of the table: who holds a lock for a second; on one primary, and on sixteen.
FLEETS: Final = tuple(Fleet(processes, shards=shards) for processes in (10, 1_000, 100_000) for shards in (1, 16))


def scale(bench: Bench) -> Iterator[Piece]:
    """The costs of each step, a model of 10 to 100,000 processes from them, and a simulation against a real run."""
    costs, steps = measured(bench)
    bare = bare_pair(bench)
    yield Data("costs", asdict(costs))
    yield Data("steps", asdict(steps))
    yield cost_table(costs, steps, bare)
    yield fleet_table(costs)
    yield limits(costs)
    yield from compared(bench, steps)
    yield Note(
        "sharded: not measured here (there is no mongos in the wheel). A change stream of a sharded collection has a "
        "cursor on each shard, and reports a change only when every shard has passed it: if one of them is idle, "
        "that takes up to periodicNoopIntervalSecs (10 s by default), and a waiter then learns of its grant by the "
        "renewal of its place in the queue"
    )


def cost_table(costs: Costs, steps: Steps, bare: dict[str, float]) -> Table:
    made = Table("What each step costs here", ["step", "server CPU, ms", "oplog, bytes", "network, bytes"])
    made.rows += [
        [BARE.name, bare["cpu"], round(bare["oplog"]), round(bare["net"])],
        ["acquire and release", costs.pair_cpu, round(costs.pair_oplog), round(costs.pair_net)],
        ["additional, if it waited", costs.waiting_cpu, round(costs.waiting_oplog), None],
        ["renewal of one lock", costs.renewal_cpu, round(costs.renewal_oplog), None],
        ["a change, for each session that listens", costs.stream_cpu, None, None],
        ["a command on a key that is held", steps.queued_cpu, None, None],
        ["such a command, for each waiter there", steps.waiter_cpu, None, None],
    ]
    made.note = (
        f"A process that sometimes waits has {costs.connections:.1f} connections, of about {costs.connection_kb:.0f}"
        f" KB each in the server. Hand-over of one key, between 8 processes: {costs.hand_over:.1f} ms, which is about "
        f"{1000 / costs.hand_over:,.0f} acquisitions a second of one key."
    )
    return made


def fleet_table(costs: Costs) -> Table:
    fleet = FLEETS[0]
    made = Table(
        "The model",
        [
            "processes",
            "shards",
            "commands/s",
            "cores",
            "for streams",
            "oplog, GB/h",
            "connections",
            "breaks first",
        ],
        note=f"For each primary, with {fleet.cores} cores as fast as these. Each process takes {fleet.rate} locks a "
        f"second and holds each for {fleet.hold:.0f} s; {fleet.contended:.0%} of them wait, for {fleet.wait:.0f} s. A "
        "percentage is the share of the limit (65,000 connections, 32 GB for them).",
    )
    for fleet in FLEETS:
        found: Demand = demand(costs, fleet)
        cores = [found.ops_cores, found.stream_cores]
        row: list[Cell] = [f"{fleet.processes:,}", str(fleet.shards), found.commands, *cores]
        made.rows.append([*row, found.oplog_gb_hour, round(found.connections), first_to_break(found)])
    return made


def limits(costs: Costs) -> Table:
    made = Table(
        "Processes that one primary supports, according to the model",
        ["configuration", "processes", "breaks first"],
        note="Found by trial: the largest number of processes within all limits.",
    )
    kinds = {
        "as above": Fleet(1),
        "no waiting (wait=0, tasks are retried)": Fleet(1, contended=0.0),
        "waits of 0.1 s (a shorter hold)": Fleet(1, wait=0.1),
        "as above, 16 shards": Fleet(1, shards=16),
        "no waiting, 16 shards": Fleet(1, contended=0.0, shards=16),
        "locks held for 10 min, one each": Fleet(1, rate=1 / 600, hold=600.0, contended=0.0),
    }
    for name, fleet in kinds.items():
        most = most_processes(costs, fleet)
        breaks = first_to_break(demand(costs, replace(fleet, processes=most)))
        made.rows.append([name, f"{most:,}", breaks.partition(" (")[0]])
    return made


def compared(bench: Bench, steps: Steps) -> Iterator[Piece]:
    """The simulation and reality, by turns."""
    made = Table(
        "Simulated and real: processes at one key",
        [
            "processes",
            "simulated, /s",
            "if every change woke all",
            "real, /s",
            "real / simulated",
            "hand-over simulated, ms",
            "real, ms",
        ],
        note="The simulation knows only the cost of each single step (of a command also for each waiter in its "
        "document), and that all processes share these cores. "
        "A change wakes only whom it concerns; in the next column every change wakes all who wait.",
    )
    sizes = (2, 8) if bench.quick else (1, 2, 4, 8, 16, 32, 64)
    rounds, points = bench.some(1, 2), {}
    for size in sizes:
        imagined = simulate(steps, size)
        crowded = simulate(replace(steps, rest=0.0), size)
        real = [reality(bench, size) for _ in range(rounds)]
        rates = [rate for rate, _ in real]
        agreement = ratio(rates, [imagined.per_second] * rounds)
        hand_over = median(imagined.hand_overs)
        made.rows.append(
            [
                str(size),
                imagined.per_second,
                crowded.per_second,
                Spread.of(rates),
                agreement,
                hand_over,
                Spread.of(t for _, t in real),
            ]
        )
        points[str(size)] = [imagined.per_second, median(rates)]
        worst = max(agreement.median, 1 / agreement.median)
        yield Goal(f"model: {size} processes, real and simulated throughput differ by a factor of", worst, 2.0)
    yield made
    yield Data("simulated and real", points)


def reality(bench: Bench, size: int) -> tuple[float, float]:
    """Acquisitions a second, and the hand-over in milliseconds."""
    key, seconds = fresh_key("real"), bench.some(1, 2)
    with workers(size) as crew:
        bench.open(crew, OURS)
        prove(crew, key)
        in_a_loop(crew, key, seconds / 2)  # all listen
        turns, begin, _ = in_a_loop(crew, key, seconds)
    return len(turns.turns) / (max(turn.leaving for turn in turns.turns) - begin), median(turns.hand_overs)
