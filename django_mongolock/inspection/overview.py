"""A bounded view of all locks at one moment, for a page or a program.

One command returns the few locks to show and the sums. The numbers therefore fit together. Each part of the command
uses an index. Any document may be damaged, so no expression here may raise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from ..engine.rule.deadlock import EARLIEST_END, Cycle
from ..engine.rule.expressions import IS_WHOLE
from ..engine.session.session import off_main_thread
from ..engine.store.mongo import MongoStore
from .kinds import EVERY_KEY, KeyMatch
from .queries import QUEUE, WAS_RELEASED, find_deadlocks, first, projection, waiting, with_obstacles
from .snapshot import Document, LockSnapshot, ShownState, read_snapshot


@dataclass(frozen=True, slots=True)
class Overview:
    """Counts and lists. All times are by the server's clock, at the moment *now*.

    - held, kept, waited, stale: numbers of held locks, of kept locks, of locks with waiters, of stale locks.
    - waiting: number of waiters.
    - capped: whether more locks are held or kept than were counted.
    - unsound: keys of the damaged documents among the held locks examined.
    - longest_held, waited_for, left_behind (stale), contended, recent: the first few locks of each list.
    """

    now: datetime
    held: int = 0
    kept: int = 0
    waited: int = 0
    waiting: int = 0
    stale: int = 0
    capped: bool = False
    unsound: tuple[str, ...] = ()
    longest_held: tuple[LockSnapshot, ...] = ()
    waited_for: tuple[LockSnapshot, ...] = ()
    left_behind: tuple[LockSnapshot, ...] = ()
    contended: tuple[LockSnapshot, ...] = ()
    recent: tuple[LockSnapshot, ...] = ()
    deadlocks: tuple[Cycle, ...] = field(default=())

    @property
    def unused(self) -> bool:
        """Whether no lock has ever been used here."""
        return not (self.held or self.kept or self.stale or self.contended or self.recent)

    @property
    def shown(self) -> tuple[LockSnapshot, ...]:
        """Every lock of the lists, once."""
        return tuple({lock.key: lock for lock in (*self.present, *self.contended, *self.recent)}.values())

    @property
    def present(self) -> tuple[LockSnapshot, ...]:
        """The locks with waiters, the longest held and the stale ones, the worst first. No lock is listed twice."""
        found = {lock.key: lock for lock in (*self.waited_for, *self.longest_held, *self.left_behind)}
        return tuple(sorted(found.values(), key=lambda lock: lock.urgency))

    @property
    def damaged(self) -> list[str]:
        """The keys of the shown locks whose own documents are damaged."""
        return sorted({*self.unsound, *(lock.key for lock in self.shown if lock.state is ShownState.DAMAGED)})

    @property
    def longest_wait(self) -> float:
        """The seconds of the longest present wait, 0 without waiters."""
        return max((lock.longest_wait or 0.0 for lock in self.waited_for), default=0.0)


@off_main_thread
def overview(store: MongoStore, match: KeyMatch = EVERY_KEY, timeout: float = 5.0) -> Overview:
    """Return the overview of the locks whose keys match. Raises LockBackendFailed."""
    with store.bounded(timeout):
        found = list(store.latest.aggregate(overview_pipeline(store.collection.name, match)))
    parts: dict[str, Document] = {part["part"]: part for part in found}
    held, waits, stale = parts["held"], parts["waits"], parts["stale"]
    lists = {
        "longest_held": held["longest"],
        "waited_for": waits["longest"],
        "left_behind": stale["latest"],
        **{name: parts.get(name, {}).get("locks", []) for name in ("contended", "recent")},
    }
    # A later part of the command may see a later state of a lock. The pages show only the first one. A key that is no
    # text belongs to no lock.
    read: dict[str, LockSnapshot] = {}
    for each in (each for locks in lists.values() for each in locks if type(each["_id"]) is str):
        read.setdefault(each["_id"], read_snapshot(each))
    if waits["sums"]:
        read = {lock.key: lock for lock in with_obstacles(store, read.values(), match, timeout)}
    kept = _sum(held, "kept")
    at_work = _sum(held, "n") - kept
    return Overview(
        now=held["now"],
        held=min(at_work, MAX_COUNTED),
        kept=kept,
        capped=at_work + kept > MAX_COUNTED,
        unsound=tuple(row["_id"] for row in held["damaged"]),
        waited=_sum(waits, "waited"),
        waiting=_sum(waits, "waiting"),
        stale=_sum(stale, "n"),
        deadlocks=tuple(find_deadlocks(store, match, timeout)) if waits["sums"] else (),
        **{name: tuple(read[each["_id"]] for each in locks if each["_id"] in read) for name, locks in lists.items()},
    )


def _sum(found: Document, name: str) -> int:
    sums: Document = next(iter(found["sums"]), {})
    return int(sums.get(name, 0))


#: The number up to which locks are counted.
MAX_COUNTED: Final = 10_000
#: The number of held locks that are examined for damage.
MAX_HELD_EXAMINED: Final = 1_000
#: The number of recently used locks that are examined.
MAX_RECENT_EXAMINED: Final = 500
#: The length of each list.
SHOWN: Final = 10
#: The numbers of holders and of waiters read for each lock.
PARTIES: Final = 10
#: The length of the recent activity.
RECENT: Final = timedelta(minutes=5)


def overview_pipeline(collection: str, match: KeyMatch) -> list[Document]:
    """Return the pipeline of one command, so that all parts show one moment. Each part has its name in `part`."""
    parts = {
        "held": _held(match),
        "waits": _waits(match),
        "stale": _stale(match),
        "contended": _contended(match),
        "recent": _recent(match),
    }
    first, *others = ([*stages, {"$addFields": {"part": part, "now": "$$NOW"}}] for part, stages in parts.items())
    return [*first, *({"$unionWith": {"coll": collection, "pipeline": stages}} for stages in others)]


def _held(match: KeyMatch) -> list[Document]:
    """Return the stages for held and kept locks, by the end of their leases, the earliest first."""
    at_work: Document = {"$match": {"kept": False}}
    since: Document = {"$addFields": {"since": {"$min": "$holders.acquired_at"}}}
    few: Document = {"$addFields": {"waiters": first("waiters", PARTIES)}}  # checking a long queue takes long
    damaged: Document = {"_id": {"$type": "string"}, "$expr": {"$not": [IS_WHOLE]}}
    return [
        {"$match": {"expires_at": {"$gt": EARLIEST_END}, "$expr": {"$gt": ["$expires_at", "$$NOW"]}, **match.query()}},
        {"$sort": {"expires_at": 1}},
        {"$limit": MAX_COUNTED + 1},
        {"$addFields": {"kept": WAS_RELEASED}},
        {
            "$facet": {
                "longest": [at_work, since, *_first({"since": 1})],
                "damaged": [{"$limit": MAX_HELD_EXAMINED}, few, {"$match": damaged}, {"$project": {"_id": 1}}],
                "sums": [{"$group": {"_id": None, "n": {"$sum": 1}, "kept": {"$sum": {"$cond": ["$kept", 1, 0]}}}}],
            }
        },
    ]


def _stale(match: KeyMatch) -> list[Document]:
    """Return the stages for stale locks, by the end of their leases, the latest first."""
    over: Document = {"expires_at": {"$gt": EARLIEST_END}, "$expr": {"$lte": ["$expires_at", "$$NOW"]}, **match.query()}
    return [
        {"$match": over},
        {"$sort": {"expires_at": -1}},
        {"$limit": MAX_COUNTED},
        {"$match": {"$expr": {"$not": [WAS_RELEASED]}}},
        {"$facet": {"latest": _first({"expires_at": -1}), "sums": [{"$count": "n"}]}},
    ]


def _waits(match: KeyMatch) -> list[Document]:
    """Return the stages for locks with waiters. There is no limit, since each of these locks may matter."""
    return [
        {"$match": {"expires_at": {"$gt": EARLIEST_END}, "waiters.0": {"$exists": True}, **match.query()}},
        {"$addFields": {"live": QUEUE}},
        {"$match": {"live": {"$ne": []}}},
        {
            "$facet": {
                "longest": [{"$addFields": {"asked": {"$min": "$live.since"}}}, *_first({"asked": 1})],
                "sums": [{"$group": _QUEUES}],
            }
        },
    ]


def _recent(match: KeyMatch) -> list[Document]:
    """Return the stages for the locks that were used last. Use moves `purge_at`, but only once an hour."""
    granted: Document = {"$max": [{"$max": "$holders.acquired_at"}, "$last_holder.acquired_at"]}
    since: Document = {"$subtract": ["$$NOW", RECENT // timedelta(milliseconds=1)]}
    return [
        {"$sort": {"purge_at": -1}},
        {"$limit": MAX_RECENT_EXAMINED},
        {"$match": match.query()},
        {"$addFields": {"granted_at": granted}},
        {"$match": {"$expr": {"$gt": ["$granted_at", since]}}},
        *_first({"granted_at": -1}),
        _GATHER,
    ]


def _contended(match: KeyMatch) -> list[Document]:
    """Return the stages for the most contended locks, by an index."""
    ours = {"_id": {"$type": "string", **match.query().get("_id", {})}}
    return [{"$match": {"contended": {"$gt": 0}, **ours}}, *_first({"contended": -1}), _GATHER]


def _first(order: Document) -> list[Document]:
    """Return the stages for the first locks in this order."""
    return [{"$sort": {**order, "_id": 1}}, {"$limit": SHOWN}, *projection(PARTIES, PARTIES)]


_GATHER: Final[Document] = {"$group": {"_id": None, "locks": {"$push": "$$ROOT"}}}
_QUEUES: Final[Document] = {"_id": None, "waited": {"$sum": 1}, "waiting": {"$sum": waiting("$live")}}
