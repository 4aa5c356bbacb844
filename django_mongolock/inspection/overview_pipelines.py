"""The aggregation behind `overview`: each part reads its documents once, and returns a few locks and sums.

Any document may be damaged: no expression here may raise, whatever it meets.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from ..context import BROWSER, CLAIMED
from ..engine.rule.deadlock import EARLIEST_END
from ..engine.rule.validity import IS_WHOLE
from .patterns import KeyMatch
from .queries import ENTRY_BYTES, QUEUE, WAS_RELEASED, array, first, projection, waiting

Document = dict[str, Any]

#: Locks are counted up to this number.
MAX_COUNTED: Final = 10_000
#: How many held locks are examined for processes, and for damage.
MAX_HELD_EXAMINED: Final = 1_000
#: How many of the locks that were used last are examined.
MAX_RECENT_EXAMINED: Final = 500
#: The length of each list.
SHOWN: Final = 10
#: How many holders and how many waiters of a lock are read.
PARTIES: Final = 10
#: How far back the recent activity goes.
RECENT: Final = timedelta(minutes=5)
#: How many keys of a process are shown, and how many processes are examined.
KEYS_SHOWN: Final = 3
MAX_PROCESSES: Final = 1_000


def overview_pipeline(collection: str, match: KeyMatch) -> list[Document]:
    """Everything in one command, and so at one moment: a document for each part, which has its name in `part`."""
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
    """The held and the kept locks; those whose leases end first come first."""
    at_work: Document = {"$match": {"kept": False}}
    since: Document = {"$addFields": {"since": {"$min": "$holders.acquired_at"}}}
    few: Document = {"$addFields": {"waiters": first("waiters", PARTIES)}}  # a long queue takes long to check
    damaged: Document = {"_id": {"$type": "string"}, "$expr": {"$not": [IS_WHOLE]}}
    return [
        {"$match": {"expires_at": {"$gt": EARLIEST_END}, "$expr": {"$gt": ["$expires_at", "$$NOW"]}, **match.query()}},
        {"$sort": {"expires_at": 1}},
        {"$limit": MAX_COUNTED + 1},
        {"$addFields": {"kept": WAS_RELEASED}},
        {
            "$facet": {
                "longest": [
                    at_work,
                    since,
                    *_first({"since": 1}),
                ],
                "processes": [at_work, {"$limit": MAX_HELD_EXAMINED}, *_sessions("holders", "server_lease")],
                "damaged": [{"$limit": MAX_HELD_EXAMINED}, few, {"$match": damaged}, {"$project": {"_id": 1}}],
                "sums": [
                    {"$group": {"_id": None, "n": {"$sum": 1}, "kept": {"$sum": {"$cond": ["$kept", 1, 0]}}}},
                ],
            }
        },
    ]


def _stale(match: KeyMatch) -> list[Document]:
    """The stale locks; those whose leases ended last come first."""
    over: Document = {"expires_at": {"$gt": EARLIEST_END}, "$expr": {"$lte": ["$expires_at", "$$NOW"]}, **match.query()}
    return [
        {"$match": over},
        {"$sort": {"expires_at": -1}},
        {"$limit": MAX_COUNTED},
        {"$match": {"$expr": {"$not": [WAS_RELEASED]}}},
        {
            "$facet": {
                "latest": _first({"expires_at": -1}),
                "processes": _sessions("holders", "server_lease"),
                "sums": [{"$count": "n"}],
            }
        },
    ]


def _waits(match: KeyMatch) -> list[Document]:
    """The locks with waiters: all of them, since each may matter."""
    return [
        {"$match": {"expires_at": {"$gt": EARLIEST_END}, "waiters.0": {"$exists": True}, **match.query()}},
        {"$addFields": {"live": QUEUE}},
        {"$match": {"live": {"$ne": []}}},
        {
            "$facet": {
                "longest": [{"$addFields": {"asked": {"$min": "$live.since"}}}, *_first({"asked": 1})],
                "processes": _sessions("live", "waiter_lease"),
                "entangled": _ENTANGLED,
                "sums": [{"$group": _QUEUES}],
            }
        },
    ]


def _recent(match: KeyMatch) -> list[Document]:
    """The locks that were used last. Use moves `purge_at`, but only once an hour."""
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
    """The most contended of all locks, found by an index."""
    ours = {"_id": {"$type": "string", **match.query().get("_id", {})}}
    return [{"$match": {"contended": {"$gt": 0}, **ours}}, *_first({"contended": -1}), _GATHER]


def _first(order: Document) -> list[Document]:
    """The first in this order."""
    return [{"$sort": {**order, "_id": 1}}, {"$limit": SHOWN}, *projection(PARTIES, PARTIES)]


def _moment(field: str) -> Document:
    return {"$cond": [{"$eq": [{"$type": f"${field}"}, "date"]}, f"${field}", None]}


def _sessions(field: str, lease: str) -> list[Document]:
    """The processes among holders or waiters. A renewal sets the end of an entry to a whole *lease* later, and so tells
    when it was. An entry that came from the queue keeps the end of its place there, but its grant was a renewal too.
    """
    until, granted = _moment(f"{field}.until"), _moment(f"{field}.acquired_at")
    renewed: Document = {
        "$cond": [{"$isNumber": f"${field}.{lease}"}, {"$subtract": [until, f"${field}.{lease}"]}, None]
    }
    known: Document = {"$ifNull": [{"$max": [renewed, granted]}, None]}
    beat: Document = {"$cond": [{"$gt": [known, "$$NOW"]}, "$$NOW", known]}
    counts = {"$and": [field == "live", {"$isNumber": f"${field}.behind"}]}
    behind: Document = {"$cond": [counts, f"${field}.behind", 0]}
    return [
        {"$project": {field: 1}},
        {"$unwind": f"${field}"},
        {
            "$match": {
                # No process has an edit lock, a claim, or a lock that it has released.
                f"{field}.host": {"$nin": [BROWSER, CLAIMED]},
                f"{field}.released": {"$not": {"$type": "date"}},
                "$expr": {"$lte": [{"$bsonSize": {"entry": f"${field}"}}, ENTRY_BYTES]},
            }
        },
        {
            "$group": {
                "_id": f"${field}.session",
                "host": {"$first": f"${field}.host"},
                "pid": {"$first": f"${field}.pid"},
                "count": {"$sum": {"$add": [1, behind]}},
                "keys": {"$firstN": {"n": KEYS_SHOWN, "input": "$_id"}},
                "beat": {"$max": beat},
                "until": {"$max": until},
            }
        },
        {"$match": {"_id": {"$type": "string"}}},
        {"$sort": {"beat": 1, "_id": 1}},
        {"$limit": MAX_PROCESSES},
    ]


_GATHER: Final[Document] = {"$group": {"_id": None, "locks": {"$push": "$$ROOT"}}}
_QUEUES: Final[Document] = {"_id": None, "waited": {"$sum": 1}, "waiting": {"$sum": waiting("$live")}}
#: A thread or task that waits, and holds a lock with waiters: without one there is no deadlock.
_ENTANGLED: Final[list[Document]] = [
    {
        "$project": {
            "entry": {
                "$concatArrays": [
                    {"$map": {"input": array("holders"), "in": {"worker": "$$this.worker", "holds": True}}},
                    {"$map": {"input": "$live", "in": {"worker": "$$this.worker", "holds": False}}},
                ]
            }
        }
    },
    {"$unwind": "$entry"},
    {"$group": {"_id": "$entry.worker", "does": {"$addToSet": "$entry.holds"}}},
    {"$match": {"_id": {"$type": "string", "$ne": ""}, "does": {"$size": 2}}},
    {"$limit": 1},
    {"$project": {"_id": 1}},
]
