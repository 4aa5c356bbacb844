"""All locks at one moment, for a page or a program to show: bounded, however many locks there are.

One command, each part of it on an index, returns the few locks to be shown and sums: so these fit together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from ..engine.rule.deadlock import Cycle
from ..engine.store.mongo import MongoStore
from .overview_pipelines import KEYS_SHOWN, MAX_COUNTED, MAX_HELD_EXAMINED, SHOWN, overview_pipeline
from .patterns import EVERY_KEY, KeyMatch
from .queries import find_deadlocks
from .snapshot import Document, LockSnapshot, State, read_date, read_number, read_snapshot, read_text


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

    held, kept, waited, stale: how many locks are held, are only kept, have waiters, are stale. waiting: how many wait.
    capped: even more are held or kept. unsound: the keys of damaged ones among the held locks looked at. longest_held,
    waited_for, left_behind (stale), contended, recent: the first few locks of each list. processes, more_processes: the
    first few, and the number of the others. looked_at: the number of held locks that processes are based on.
    """

    now: datetime
    held: int = 0
    kept: int = 0
    waited: int = 0
    waiting: int = 0
    stale: int = 0
    capped: bool = False
    looked_at: int = 0
    unsound: tuple[str, ...] = ()
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
        return not (self.held or self.kept or self.stale or self.contended or self.recent)

    @property
    def shown(self) -> tuple[LockSnapshot, ...]:
        """Every lock of the lists, once."""
        lists = (self.waited_for, self.longest_held, self.left_behind, self.contended, self.recent)
        return tuple({lock.key: lock for locks in lists for lock in locks}.values())

    @property
    def damaged(self) -> list[str]:
        """The keys of the damaged documents among these."""
        return sorted({*self.unsound, *(lock.key for lock in self.shown if lock.state is State.DAMAGED)})

    @property
    def longest_wait(self) -> float:
        """Seconds that the longest of the present waits has lasted, 0 without waiters."""
        return max((lock.longest_wait or 0.0 for lock in self.waited_for), default=0.0)


def overview(store: MongoStore, match: KeyMatch = EVERY_KEY, timeout: float = 5.0) -> Overview:
    """Look at the locks whose keys match. Raises LockBackendFailed."""
    found = _ask(store, overview_pipeline(store.collection.name, match), timeout)
    parts: dict[str, Document] = {part["part"]: part for part in found}
    held, waits, stale = parts["held"], parts["waits"], parts["stale"]
    lists = {
        "longest_held": held["longest"],
        "waited_for": waits["longest"],
        "left_behind": stale["latest"],
        **{name: parts.get(name, {}).get("locks", []) for name in ("contended", "recent")},
    }
    kept = _sum(held, "kept")
    at_work = _sum(held, "n") - kept
    processes = _processes([*held["processes"], *stale["processes"]], waits["processes"], held["now"])
    return Overview(
        now=held["now"],
        held=min(at_work, MAX_COUNTED),
        kept=kept,
        capped=at_work + kept > MAX_COUNTED,
        looked_at=min(at_work, MAX_HELD_EXAMINED),
        unsound=tuple(row["_id"] for row in held["damaged"]),
        waited=_sum(waits, "waited"),
        waiting=_sum(waits, "waiting"),
        stale=_sum(stale, "n"),
        processes=tuple(processes[:SHOWN]),
        more_processes=len(processes[SHOWN:]),
        deadlocks=tuple(find_deadlocks(store, match, timeout)) if waits["entangled"] else (),
        # A key that is no text belongs to no lock.
        **{
            name: tuple(read_snapshot(each) for each in locks if type(each["_id"]) is str)
            for name, locks in lists.items()
        },
    )


def _sum(found: Document, name: str) -> int:
    sums: Document = next(iter(found["sums"]), {})
    return int(sums.get(name, 0))


def _ask(store: MongoStore, pipeline: list[Document], timeout: float) -> list[Document]:
    with store.bounded(timeout):
        return list(store.latest.aggregate(pipeline))


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
