"""All that goes on among the locks at one moment, for a page or a program to show: bounded, however many there are.

A handful of commands, each on an index: of leases, of contention, of `purge_at` for those that were used last. They
answer with keys and sums; the last one reads the few documents that are worth showing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ..engine.deadlock import Cycle
from ..engine.store import MongoStore
from .overview_pipelines import (
    KEYS,
    MOST_COUNTED,
    MOST_HELD,
    SHOWN,
    contended_pipeline,
    held_pipeline,
    recent_pipeline,
    stale_pipeline,
    waits_pipeline,
)
from .patterns import EVERY_KEY, KeyMatch
from .snapshot import Document, Entry, Seen, State, _date, _number, _text, count, find_deadlocks, survey

#: How many holders, and how many of those who wait, are read of one lock.
ENTRIES: Final = 10


@dataclass(frozen=True, slots=True)
class Process:
    """A session: one process, what it holds and waits for. beat: when it last renewed any of that.

    keys: the first few that it holds. silent: all that it has is over; it died, or hangs.
    """

    host: str | None
    pid: int | None
    holds: int
    waits: int
    keys: tuple[str, ...]
    beat: datetime | None
    silent: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """What goes on. Times are by the server's clock, at the moment *now*.

    held, waited, waiting, stale: how many locks are held, how many are waited for, by how many processes, and how many
    are stale. capped: even more are held. longest_held, waited_for, left_behind, contended, lately: the few that are
    worth showing, each first of its kind. processes, more_processes: the first, and how many there are besides. What
    is told of those that are held for longest and of processes is about the first *looked_at* locks.
    """

    now: datetime
    held: int = 0
    waited: int = 0
    waiting: int = 0
    stale: int = 0
    capped: bool = False
    looked_at: int = 0
    longest_held: tuple[Seen, ...] = ()
    waited_for: tuple[Seen, ...] = ()
    left_behind: tuple[Seen, ...] = ()
    contended: tuple[Seen, ...] = ()
    lately: tuple[Seen, ...] = ()
    processes: tuple[Process, ...] = ()
    more_processes: int = 0
    deadlocks: tuple[Cycle, ...] = field(default=())

    @property
    def unused(self) -> bool:
        """Has nobody taken a lock here?"""
        return not (self.held or self.stale or self.contended or self.lately)

    @property
    def shown(self) -> tuple[Seen, ...]:
        """Every lock of the lists, once."""
        lists = (self.waited_for, self.longest_held, self.left_behind, self.contended, self.lately)
        return tuple({seen.key: seen for seens in lists for seen in seens}.values())

    @property
    def damaged(self) -> tuple[Seen, ...]:
        """The damaged documents among those of the lists."""
        return tuple(seen for seen in self.shown if seen.state is State.DAMAGED)

    @property
    def longest_wait(self) -> float:
        """Seconds that the one has waited who has waited longest, 0 if nobody waits."""
        waits = [first for seen in self.waited_for if (first := longest_wait(seen)) is not None]
        return max(waits, default=0.0)


def longest_wait(seen: Seen) -> float | None:
    """Seconds that the first in the queue of a lock has waited; None if nobody waits."""
    since = [waiter.since for waiter in living(seen) if waiter.since]
    return (seen.now - min(since)).total_seconds() if since else None


def living(seen: Seen) -> list[Entry]:
    """Those of the queue whose places have not run out."""
    return [waiter for waiter in seen.waiters if waiter.until and waiter.until > seen.now]


def overview(store: MongoStore, match: KeyMatch = EVERY_KEY, timeout: float = 5.0) -> Overview:
    """Look at the locks whose keys are like that. Raises LockBackendFailed."""
    held, waits, stale = (
        _ask(store, pipeline(match), timeout)[0] for pipeline in (held_pipeline, waits_pipeline, stale_pipeline)
    )
    looked_at = _sum(held, "n")
    counted = looked_at
    if looked_at == MOST_HELD:  # there may be more; to be counted in the index alone, the time has to be a value
        counted = count(store, {"expires_at": {"$gt": held["now"]}, **match.query()}, MOST_COUNTED + 1, timeout)
    lists = {
        "longest_held": _keys(held["longest"]),
        "waited_for": _keys(waits["longest"]),
        "left_behind": _keys(stale["latest"]),
        "contended": _keys(_ask(store, contended_pipeline(match), timeout)),
        "lately": _keys(_ask(store, recent_pipeline(match), timeout)),
    }
    seen = _read(store, [key for keys in lists.values() for key in keys], timeout)
    found = {name: tuple(seen[key] for key in keys if key in seen) for name, keys in lists.items()}
    # A lock was chosen by one command and read by a later one: it may not be like that any more.
    found["waited_for"] = tuple(each for each in found["waited_for"] if living(each))
    for name, state in (("longest_held", State.HELD), ("left_behind", State.STALE)):
        found[name] = tuple(each for each in found[name] if each.state in (state, State.DAMAGED))
    processes = _processes([*held["processes"], *stale["processes"]], waits["processes"], held["now"])
    return Overview(
        now=held["now"],
        held=min(counted, MOST_COUNTED),
        capped=counted > MOST_COUNTED,
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
    """Those that are ours to show."""
    return [row["_id"] for row in rows if isinstance(row["_id"], str)]


def _read(store: MongoStore, keys: list[str], timeout: float) -> dict[str, Seen]:
    wanted = sorted(set(keys))
    if not wanted:
        return {}
    bounds = {"limit": len(wanted), "holders": ENTRIES, "waiters": ENTRIES, "timeout": timeout}
    return {seen.key: seen for seen in survey(store, {"_id": {"$in": wanted}}, **bounds)}  # type: ignore[arg-type]


def _processes(holding: list[Document], queueing: list[Document], now: datetime) -> list[Process]:
    """Each process once. First those that have not been heard of for longest."""
    rows: dict[str, tuple[Document, Document]] = {}
    for row in holding:
        known = rows.get(row["_id"], ({}, {}))[0]
        rows[row["_id"]] = (_together(known, row) if known else row, {})
    for row in queueing:
        rows[row["_id"]] = (rows.get(row["_id"], ({}, {}))[0], row)
    found = [_process(holds, waits, now) for holds, waits in rows.values()]
    return sorted(found, key=lambda process: (process.beat or now, process.host or "", process.pid or 0))


def _together(held: Document, stale: Document) -> Document:
    """What one process holds and what it has left behind."""
    return {**stale, **held, "count": held["count"] + stale["count"], "keys": [*held["keys"], *stale["keys"]][:KEYS]}


def _process(holds: Document, waits: Document, now: datetime) -> Process:
    both = [row for row in (holds, waits) if row]
    ends = [end for row in both if (end := _date(row["until"]))]
    return Process(
        host=_text(both[0].get("host")),
        pid=_number(both[0].get("pid")),
        holds=holds.get("count", 0),
        waits=waits.get("count", 0),
        keys=tuple(key for key in holds.get("keys", ()) if isinstance(key, str)),
        beat=max((beat for row in both if (beat := _date(row["beat"]))), default=None),
        silent=bool(ends) and max(ends) <= now,
    )
