"""All locks at one moment, for a page or a program to show: bounded, however many locks there are.

A handful of commands, each on an index, return keys and sums; the last one reads the few documents to be shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ..engine.deadlock import Cycle
from ..engine.mongo_store import MongoStore
from .overview_pipelines import (
    KEYS_SHOWN,
    MAX_COUNTED,
    MAX_HELD_EXAMINED,
    SHOWN,
    contended_pipeline,
    held_pipeline,
    recent_pipeline,
    stale_pipeline,
    waits_pipeline,
)
from .patterns import EVERY_KEY, KeyMatch
from .queries import count, find_deadlocks, snapshots
from .snapshot import Document, LockSnapshot, State, read_date, read_number, read_text

#: How many holders and how many waiters of a lock are read.
PARTIES: Final = 10


@dataclass(frozen=True, slots=True)
class Process:
    """A process, and how many locks it holds and waits for. renewed_at: when it last renewed any of these.

    keys: the first few that it holds. silent: all its leases have ended; it died, or hangs.
    """

    host: str | None
    pid: int | None
    holds: int
    waits: int
    keys: tuple[str, ...]
    renewed_at: datetime | None
    silent: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """Counts and lists. Times are according to the server's clock, at the moment *now*.

    held, waited, stale: how many locks are held, have waiters, are stale. waiting: how many wait. capped: even more
    are held. longest_held, waited_for, left_behind (stale), contended, recent: the first few locks of each list.
    processes, more_processes: the first few, and the number of the others. looked_at: the number of held locks that
    longest_held and processes are based on.
    """

    now: datetime
    held: int = 0
    waited: int = 0
    waiting: int = 0
    stale: int = 0
    capped: bool = False
    looked_at: int = 0
    longest_held: tuple[LockSnapshot, ...] = ()
    waited_for: tuple[LockSnapshot, ...] = ()
    left_behind: tuple[LockSnapshot, ...] = ()
    contended: tuple[LockSnapshot, ...] = ()
    recent: tuple[LockSnapshot, ...] = ()
    processes: tuple[Process, ...] = ()
    more_processes: int = 0
    deadlocks: tuple[Cycle, ...] = field(default=())

    @property
    def unused(self) -> bool:
        """Whether no lock has been used here."""
        return not (self.held or self.stale or self.contended or self.recent)

    @property
    def shown(self) -> tuple[LockSnapshot, ...]:
        """Every lock of the lists, once."""
        lists = (self.waited_for, self.longest_held, self.left_behind, self.contended, self.recent)
        return tuple({lock.key: lock for locks in lists for lock in locks}.values())

    @property
    def damaged(self) -> tuple[LockSnapshot, ...]:
        """The damaged documents among these."""
        return tuple(lock for lock in self.shown if lock.state is State.DAMAGED)

    @property
    def longest_wait(self) -> float:
        """Seconds that the longest of the present waits has lasted, 0 without waiters."""
        return max((lock.longest_wait or 0.0 for lock in self.waited_for), default=0.0)


def overview(store: MongoStore, match: KeyMatch = EVERY_KEY, timeout: float = 5.0) -> Overview:
    """Look at the locks whose keys match. Raises LockBackendFailed."""
    held, waits, stale = (
        _ask(store, pipeline(match), timeout)[0] for pipeline in (held_pipeline, waits_pipeline, stale_pipeline)
    )
    looked_at = _sum(held, "n")
    counted = looked_at
    if looked_at == MAX_HELD_EXAMINED:  # there may be more; a count in the index alone needs the time as a value
        counted = count(store, {"expires_at": {"$gt": held["now"]}, **match.query()}, MAX_COUNTED + 1, timeout)
    lists = {
        "longest_held": _keys(held["longest"]),
        "waited_for": _keys(waits["longest"]),
        "left_behind": _keys(stale["latest"]),
        "contended": _keys(_ask(store, contended_pipeline(match), timeout)),
        "recent": _keys(_ask(store, recent_pipeline(match), timeout)),
    }
    read = _read(store, {key for keys in lists.values() for key in keys}, timeout)
    found = {name: tuple(read[key] for key in keys if key in read) for name, keys in lists.items()}
    # One command chose a lock and a later one read it: it may have changed in between.
    found["waited_for"] = tuple(lock for lock in found["waited_for"] if lock.queue)
    for name, state in (("longest_held", State.HELD), ("left_behind", State.STALE)):
        found[name] = tuple(lock for lock in found[name] if lock.state in (state, State.DAMAGED))
    processes = _processes([*held["processes"], *stale["processes"]], waits["processes"], held["now"])
    return Overview(
        now=held["now"],
        held=min(counted, MAX_COUNTED),
        capped=counted > MAX_COUNTED,
        looked_at=looked_at,
        waited=_sum(waits, "waited"),
        waiting=_sum(waits, "waiting"),
        stale=_sum(stale, "n"),
        processes=tuple(processes[:SHOWN]),
        more_processes=len(processes[SHOWN:]),
        deadlocks=tuple(find_deadlocks(store, match, timeout)) if waits["entangled"] else (),
        **found,
    )


def _sum(found: Document, name: str) -> int:
    sums: Document = next(iter(found["sums"]), {})
    return int(sums.get(name, 0))


def _ask(store: MongoStore, pipeline: list[Document], timeout: float) -> list[Document]:
    with store.bounded(timeout):
        return list(store.latest.aggregate(pipeline))


def _keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys that are text: others belong to no lock."""
    return [row["_id"] for row in rows if isinstance(row["_id"], str)]


def _read(store: MongoStore, keys: set[str], timeout: float) -> dict[str, LockSnapshot]:
    if not keys:
        return {}
    query = {"_id": {"$in": sorted(keys)}}
    found = snapshots(store, query, limit=len(keys), holders=PARTIES, waiters=PARTIES, timeout=timeout)
    return {lock.key: lock for lock in found}


def _processes(holds: Iterable[Document], waits: Iterable[Document], now: datetime) -> list[Process]:
    """Each process once; the one whose last renewal is longest ago comes first."""
    rows: dict[str, tuple[list[Document], list[Document]]] = defaultdict(lambda: ([], []))
    for row in holds:
        rows[row["_id"]][0].append(row)
    for row in waits:
        rows[row["_id"]][1].append(row)
    found = [_process(holding, waiting, now) for holding, waiting in rows.values()]
    return sorted(found, key=lambda process: (process.renewed_at or now, process.host or "", process.pid or 0))


def _process(holds: list[Document], waits: list[Document], now: datetime) -> Process:
    rows = [*holds, *waits]
    ends = [end for row in rows if (end := read_date(row["until"]))]
    keys = [key for row in holds for key in row["keys"] if isinstance(key, str)]
    return Process(
        host=read_text(rows[0].get("host")),
        pid=read_number(rows[0].get("pid")),
        holds=sum(row["count"] for row in holds),
        waits=sum(row["count"] for row in waits),
        keys=tuple(keys[:KEYS_SHOWN]),
        renewed_at=max((beat for row in rows if (beat := read_date(row["beat"]))), default=None),
        silent=bool(ends) and max(ends) <= now,
    )
