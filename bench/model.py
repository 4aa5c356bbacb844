"""On paper: what a fleet of processes asks of the MongoDB that keeps its locks, from the measured costs of each step.

Everything is a sum of rates times costs; nothing waits here (that is `simulation`). It tells what breaks first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured. *_cpu: milliseconds of the server's CPU. *_oplog, *_net: bytes. A pair is an acquire and a release."""

    pair_cpu: float
    pair_oplog: float
    pair_net: float
    waiting_cpu: float  # what an acquisition that waited costs more than a pair: the stream's reads, the renewals
    waiting_oplog: float
    waiting_commands: float
    renewal_cpu: float  # of one lock, once
    renewal_oplog: float
    stream_cpu: float  # of one change, for each stream that is being read
    connections: float  # of a process that waits now and then
    connection_kb: float  # of the server's memory
    hand_over: float  # milliseconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who locks, and how: rates are of each process, times are in seconds."""

    processes: int
    rate: float = 0.5  # acquisitions a second
    contended: float = 0.1  # the share of them that waits
    wait: float = 1.0  # how long those wait
    hold: float = 1.0  # how long a lock is held
    lease: float = 30.0
    shards: int = 1
    cores: int = 8  # of each primary


@dataclass(frozen=True, slots=True)
class Demand:
    """What each primary has to bear."""

    commands: float  # a second
    ops_cores: float  # CPU of acquiring, releasing, renewing
    stream_cores: float  # CPU of telling the streams that are being read
    oplog_gb_hour: float
    net_mb: float  # a second
    connections: float
    connections_gb: float
    streams: float  # that are being read at a time
    cores: int

    @property
    def busy(self) -> float:
        """The part of its CPU that is used; more than 1 cannot be."""
        return (self.ops_cores + self.stream_cores) / self.cores


#: Beyond these something else than CPU gives way: what one mongod lets in (its default), and memory for connections.
MOST_CONNECTIONS: Final = 65_000
MOST_GB: Final = 32.0


def demand(costs: Costs, fleet: Fleet) -> Demand:
    """What *fleet* asks of one primary. Keys are spread evenly over the shards; a stream has a cursor on each."""
    locks = fleet.processes * fleet.rate
    waiting = locks * fleet.contended
    streams = waiting * fleet.wait
    # A lock that is given back before a third of its lease is over is never renewed.
    beats = max(0.0, fleet.hold - fleet.lease / 3) / (fleet.lease / 3)
    renewals = locks * beats
    changes = (2 * locks + renewals) / fleet.shards
    ops = locks * costs.pair_cpu + waiting * costs.waiting_cpu + renewals * costs.renewal_cpu
    oplog = locks * costs.pair_oplog + waiting * costs.waiting_oplog + renewals * costs.renewal_oplog
    connections = fleet.processes * costs.connections
    commands = 2 * locks + waiting * costs.waiting_commands + 2 * renewals / 1000
    return Demand(
        commands=commands / fleet.shards,
        ops_cores=ops / 1000 / fleet.shards,
        stream_cores=streams * changes * costs.stream_cpu / 1000,
        oplog_gb_hour=oplog * 3600 / 1e9 / fleet.shards,
        net_mb=locks * costs.pair_net / 1e6 / fleet.shards,
        connections=connections,
        connections_gb=connections * costs.connection_kb / 1e6,
        streams=streams,
        cores=fleet.cores,
    )


def first_to_break(found: Demand) -> str:
    """What is over its limit by most, or what is nearest to it."""
    used = {
        "streams": found.stream_cores / found.cores,
        "CPU of the commands": found.ops_cores / found.cores,
        "connections": found.connections / MOST_CONNECTIONS,
        "memory for connections": found.connections_gb / MOST_GB,
    }
    name = max(used, key=lambda name: used[name])
    return f"{name} ({used[name]:.0%})"


def most_processes(costs: Costs, fleet: Fleet) -> int:
    """How many processes of that kind one primary bears, before anything is over its limit."""
    low, high = 1, 10_000_000
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        found = demand(costs, replace(fleet, processes=middle))
        fits = found.busy <= 1 and found.connections <= MOST_CONNECTIONS and found.connections_gb <= MOST_GB
        low, high = (middle, high) if fits else (low, middle)
    return low
