"""What a lock document looks like: one that an upsert begins with, and one that is not damaged."""

from __future__ import annotations

from bson.int64 import Int64

from .document import (
    DOCUMENT_FIELDS,
    GRANTED_FIELDS,
    LAST_CLUSTER_TIME,
    LAST_TOKEN,
    MAX_ENTRIES,
    SCHEMA,
    WAITER_FIELDS,
)
from .expressions import Expression, for_each, has_types, size

#: Whether an upsert has only just made this document.
IS_BLANK: Expression = {"$eq": ["$$ROOT", {"_id": "$_id"}]}
#: Whether the fields of the document are what this package writes, apart from the entries in its arrays.
SOUND: list[Expression] = [
    has_types("$", DOCUMENT_FIELDS),
    {"$lte": ["$cluster_time", LAST_CLUSTER_TIME]},  # or none: nothing that would make every command late
    {"$eq": ["$v", SCHEMA]},
    {"$lt": ["$token", LAST_TOKEN]},
]
#: Whether the whole document is what this package writes.
IS_WHOLE: Expression = {
    "$and": [
        *SOUND,
        {"$lte": [{"$add": [size("$holders"), size("$waiters")]}, MAX_ENTRIES]},
        {"$allElementsTrue": [for_each({"$concatArrays": ["$holders", "$waiters"]}, has_types("$$e.", WAITER_FIELDS))]},
        {"$allElementsTrue": [for_each("$holders", has_types("$$e.", GRANTED_FIELDS))]},
    ]
}

#: What an upsert starts from.
_ZERO = Int64(0)
BLANK: dict[str, Expression] = {
    "_id": "$_id", "v": SCHEMA, "holders": [], "waiters": [], "tombstones": [], "token": _ZERO,
    "clock": "$$c.clock", "written_at": "$$NOW", "cluster_time": "$$op", "purge_at": "$$NOW", "changes": _ZERO,
    "acquisitions": _ZERO, "contended": _ZERO, "expired": _ZERO, "waited_ms": _ZERO, "held_ms": _ZERO,
    "longest_wait_ms": _ZERO, "longest_hold_ms": _ZERO,
}  # fmt: skip
