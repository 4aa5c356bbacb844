"""Short forms of the rule for two frequent commands: acquire a free lock, and release a lock without waiters.

The whole rule is up to 9 KB. The server parses it for each command, and parsing takes longer than evaluation. In these
two cases the rule comes down to something much shorter. A short form changes only a document of its case. If it changed
nothing, the whole rule is sent. The document afterwards is the same, except that a release does not move `purge_at`,
write the `clock` and its time, or count an expired lease.

There are no short forms for joining the queue and for the hand-over to its head. They were built and measured. The
second one shortens a hand-over by 5 %, and the two save the server less than a tenth of its time. This gain does not
pay for the second command after a wrong guess, and for a second way to grant a lock.
"""

from __future__ import annotations

from typing import Any

from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from .document import SCHEMA
from .expressions import BLANK, IS_BLANK, SOUND, Expression, after, encoded, is_late, merge, purge_time

Filter = dict[str, Any]

_EMPTY = {"$size": 0}

_NEXT_TOKEN: Expression = {"$max": [{"$add": ["$token", Int64(1)]}, {"$toLong": "$$NOW"}]}
_END: Expression = after("$$NOW", "$$c.add.server_lease")
_MINE: Expression = merge(
    "$$c.add",
    {"since": "$$NOW", "until": _END, "beat": "$$c.beat", "acquired_at": "$$NOW", "token": _NEXT_TOKEN},
)
#: The changes when an entry is added to a document without entries, or to none. `$sum` passes over missing fields.
_TAKEN: dict[str, Expression] = {
    "holders": [_MINE],
    "token": _NEXT_TOKEN,
    "expires_at": _END,
    "changes": {"$sum": ["$changes", Int64(1)]},
    "acquisitions": {"$sum": ["$acquisitions", Int64(1)]},
    "clock": "$$c.clock",
    "written_at": "$$NOW",
    "cluster_time": "$$op",
    "purge_at": purge_time("$$NOW", "$purge_at", _END, "$contended"),
}
#: Whether the document is sound and the command is not late. The whole rule judges a late command.
_IS_SOUND: Expression = {"$and": [*SOUND, {"$not": [is_late("$cluster_time")]}]}

#: Adds an entry to a document that matches `IS_FREE`, or makes the document. The command is an upsert. If the document
#: of the key does not match, the upsert fails with a duplicate key. A damaged document stays as it is. The filter
#: cannot see damage, because its `$type` looks into arrays, and the filter of an upsert may have no `$expr`.
TAKE_FREE: list[RawBSONDocument] = [
    encoded(
        {
            "$replaceWith": {
                "$cond": [
                    {"$or": [IS_BLANK, _IS_SOUND]},
                    {"$mergeObjects": [BLANK, "$$ROOT", _TAKEN]},
                    "$$ROOT",
                ]
            }
        }
    )
]
#: Matches documents without a holder and a waiter. Besides, the grant must have no tombstone there. Without entries no
#: time is judged. For that reason any primary may have written last.
IS_FREE: Filter = {"holders": _EMPTY, "waiters": _EMPTY}

_HELD: Expression = {
    "$subtract": [{"$min": ["$$NOW", {"$first": "$holders.until"}]}, {"$first": "$holders.acquired_at"}]
}

#: Releases the only holder of a document that matches `IS_UNCONTENDED`.
RELEASE_UNCONTENDED: list[RawBSONDocument] = [
    encoded(
        {
            "$set": {
                "holders": [],
                "expires_at": None,
                "changes": {"$add": ["$changes", 1]},
                "held_ms": {"$add": ["$held_ms", _HELD]},
                "longest_hold_ms": {"$max": ["$longest_hold_ms", _HELD]},
                "last_holder": {"$first": "$holders"},
            }
        }
    )
]
#: Matches documents without a waiter and with a single holder. The caller adds that the holder is the grant.
IS_UNCONTENDED: Filter = {"v": SCHEMA, "holders": {"$size": 1}, "waiters": _EMPTY}
