"""The aggregations behind `overview`: each reads its documents once, and answers with keys and sums.

Any document may be damaged, so no expression here may raise, whatever it meets.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from ..engine.deadlock import EVER
from .patterns import KeyMatch
from .snapshot import RELEASED, count_of

Document = dict[str, Any]

#: How far locks are counted.
MOST_COUNTED: Final = 10_000
#: How many held locks are looked at closely: for who has held one for longest, and for processes.
MOST_HELD: Final = 1_000
#: How many of the locks that were used last are looked at.
MOST_RECENT: Final = 500
#: How long each list is.
SHOWN: Final = 10
#: How far back "lately" goes.
LATELY: Final = timedelta(minutes=5)
#: How many keys are named of what a process holds, and how many processes are told apart.
KEYS: Final = 3
MOST_PROCESSES: Final = 1_000


def held_pipeline(match: KeyMatch) -> list[Document]:
    """Through the locks that are held; first those that will have to be renewed first."""
    return [
        {"$match": {"expires_at": {"$gt": EVER}, "$expr": {"$gt": ["$expires_at", "$$NOW"]}, **match.query()}},
        {"$sort": {"expires_at": 1}},
        {"$limit": MOST_HELD},
        {
            "$facet": {
                "longest": [{"$project": {"since": {"$min": "$holders.acquired_at"}}}, *_first({"since": 1})],
                "processes": _sessions("holders", "server_lease"),
                "sums": [{"$count": "n"}],
            }
        },
        {"$addFields": {"now": "$$NOW"}},
    ]


def stale_pipeline(match: KeyMatch) -> list[Document]:
    """Through the locks that are stale, the latest first."""
    over: Document = {"expires_at": {"$gt": EVER}, "$expr": {"$lte": ["$expires_at", "$$NOW"]}, **match.query()}
    return [
        {"$match": over},
        {"$sort": {"expires_at": -1}},
        {"$limit": MOST_COUNTED},
        # What was released, and only kept for a minimum hold, is not stale when that is over.
        {"$match": {"holders": {"$not": RELEASED}}},
        {
            "$facet": {
                "latest": _first({"expires_at": -1}),
                "processes": _sessions("holders", "server_lease"),
                "sums": [{"$count": "n"}],
            }
        },
    ]


def waits_pipeline(match: KeyMatch) -> list[Document]:
    """Through the locks that somebody waits for: all of them, since each may matter."""
    return [
        {"$match": {"expires_at": {"$gt": EVER}, "waiters.0": {"$exists": True}, **match.query()}},
        {
            "$project": {
                "holders": _list("holders"),
                "waiters": {"$filter": {"input": _list("waiters"), "as": "e", "cond": {"$gt": ["$$e.until", "$$NOW"]}}},
            }
        },
        {"$match": {"waiters": {"$ne": []}}},
        {"$addFields": {"asked": {"$min": "$waiters.since"}}},
        {
            "$facet": {
                "longest": _first({"asked": 1}),
                "processes": _sessions("waiters", "waiter_lease"),
                "entangled": _ENTANGLED,
                "sums": [{"$group": _QUEUES}],
            }
        },
    ]


def recent_pipeline(match: KeyMatch) -> list[Document]:
    """Through the locks that were used last: `purge_at` is moved by use, if only once an hour."""
    granted: Document = {"$max": [{"$max": "$holders.acquired_at"}, "$last_holder.acquired_at"]}
    since: Document = {"$subtract": ["$$NOW", LATELY // timedelta(milliseconds=1)]}
    return [
        {"$sort": {"purge_at": -1}},
        {"$limit": MOST_RECENT},
        {"$match": match.query()},
        {"$project": {"granted": granted}},
        {"$match": {"$expr": {"$gt": ["$granted", since]}}},
        *_first({"granted": -1}),
    ]


def contended_pipeline(match: KeyMatch) -> list[Document]:
    """The locks that had to be waited for most often: of all that there are, by the index."""
    ours = {"_id": {"$type": "string", **match.query().get("_id", {})}}
    return [{"$match": {"contended": {"$gt": 0}, **ours}}, *_first({"contended": -1})]


def _first(order: Document) -> list[Document]:
    """The first of them, by their keys."""
    return [{"$sort": {**order, "_id": 1}}, {"$limit": SHOWN}, {"$project": {"_id": 1}}]


def _list(field: str) -> Document:
    return {"$cond": [{"$isArray": f"${field}"}, f"${field}", []]}


def _moment(field: str) -> Document:
    return {"$cond": [{"$eq": [{"$type": f"${field}"}, "date"]}, f"${field}", None]}


def _sessions(field: str, lease: str) -> list[Document]:
    """The processes in one list of entries; a renewal sets the end of an entry to a whole *lease* from then.

    What was handed over from the queue keeps the end of its place there, which may be sooner: it was granted by a beat.
    """
    until, granted = _moment(f"{field}.until"), _moment(f"{field}.acquired_at")
    renewed: Document = {
        "$cond": [{"$isNumber": f"${field}.{lease}"}, {"$subtract": [until, f"${field}.{lease}"]}, None]
    }
    known: Document = {"$ifNull": [{"$max": [renewed, granted]}, None]}
    beat: Document = {"$cond": [{"$gt": [known, "$$NOW"]}, "$$NOW", known]}
    counts = {"$and": [field == "waiters", {"$isNumber": f"${field}.behind"}]}
    behind: Document = {"$cond": [counts, f"${field}.behind", 0]}
    return [
        {"$unwind": f"${field}"},
        {
            "$group": {
                "_id": f"${field}.session",
                "host": {"$first": f"${field}.host"},
                "pid": {"$first": f"${field}.pid"},
                "count": {"$sum": {"$add": [1, behind]}},
                "keys": {"$firstN": {"n": KEYS, "input": "$_id"}},
                "beat": {"$max": beat},
                "until": {"$max": until},
            }
        },
        {"$match": {"_id": {"$type": "string"}}},
        {"$sort": {"beat": 1, "_id": 1}},
        {"$limit": MOST_PROCESSES},
    ]


_QUEUES: Final[Document] = {"_id": None, "waited": {"$sum": 1}, "waiting": {"$sum": count_of("$waiters")}}
#: Somebody who waits, and holds something that somebody waits for: without one there is no deadlock.
_ENTANGLED: Final[list[Document]] = [
    {
        "$project": {
            "entry": {
                "$concatArrays": [
                    {"$map": {"input": "$holders", "in": {"worker": "$$this.worker", "holds": True}}},
                    {"$map": {"input": "$waiters", "in": {"worker": "$$this.worker", "holds": False}}},
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
