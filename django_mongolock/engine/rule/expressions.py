"""Short names for the aggregation expressions of the rule, and expressions that test whether a document is whole."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from .document import (
    DOCUMENT_FIELDS,
    GRANTED_FIELDS,
    LAST_CLUSTER_TIME,
    LAST_TOKEN,
    MAX_ENTRIES,
    SCHEMA,
    WAITER_FIELDS,
)

Expression = Any

#: Whether the item `$$e` is the entry that the command asks about.
IS_ASKED: Final[Expression] = {"$eq": ["$$e.grant", "$$c.ask"]}

#: `purge_at` is moved in steps of this many milliseconds, so that its index stays quiet.
PURGE_STEP = 3_600_000
_BSON_TYPES: Final[dict[type, str]] = {str: "string", int: "int", Int64: "long", datetime: "date", list: "array"}


def let(variables: dict[str, Expression], inside: Expression) -> Expression:
    return {"$let": {"vars": variables, "in": inside}}


def for_each(items: Expression, each: Expression) -> Expression:
    """Return the result of *each* for every item. The item is `$$e` in *each*."""
    return {"$map": {"input": items, "as": "e", "in": each}}


def only(items: Expression, condition: Expression) -> Expression:
    """Return the items for which *condition* is true. The item is `$$e` in *condition*."""
    return {"$filter": {"input": items, "as": "e", "cond": condition}}


def size(items: Expression) -> Expression:
    return {"$size": items}


def merge(entry: Expression, changes: dict[str, Expression]) -> Expression:
    return {"$mergeObjects": [entry, changes]}


def after(moment: Expression, milliseconds: Expression) -> Expression:
    return {"$add": [moment, milliseconds]}


def has_types(prefix: str, fields: dict[str, type]) -> Expression:
    """Return whether every field has its type.

    One comparison of two lists is cheaper to parse than one for each field.
    """
    types = {"$map": {"input": [prefix + name for name in fields], "in": {"$type": "$$this"}}}
    return {"$eq": [types, [_BSON_TYPES[kind] for kind in fields.values()]]}


def is_late(cluster_time: Expression) -> Expression:
    """Return whether the command was parsed before the one that left this *cluster_time* in the document."""
    return {"$and": ["$$op", {"$lt": ["$$op", cluster_time]}]}


def purge_time(now: Expression, before: Expression, expires_at: Expression, contended: Expression) -> Expression:
    """Return when the document may be removed.

    - before: moment until now.
    - expires_at: end of the last lease.
    - contended: number of grants that had to wait.
    """
    keep = {"$add": [{"$max": [now, expires_at]}, {"$cond": [contended, "$$c.retention", "$$c.brief"]}]}
    return {"$cond": [{"$gte": [before, keep]}, before, {"$add": [keep, PURGE_STEP]}]}


def encoded(document: dict[str, Any]) -> RawBSONDocument:
    """Return the document in encoded form, so that it is not encoded again for each command."""
    return RawBSONDocument(bson.encode(document))


#: Whether an upsert has just made this document.
IS_BLANK: Expression = {"$eq": ["$$ROOT", {"_id": "$_id"}]}
#: Whether this package wrote the fields of the document, apart from the entries in its arrays.
SOUND: list[Expression] = [
    has_types("$", DOCUMENT_FIELDS),
    {"$lte": ["$cluster_time", LAST_CLUSTER_TIME]},  # may be missing, but a larger one would make every command late
    {"$eq": ["$v", SCHEMA]},
    {"$lt": ["$token", LAST_TOKEN]},
]
#: Whether this package wrote the whole document.
IS_WHOLE: Expression = {
    "$and": [
        *SOUND,
        {"$lte": [{"$add": [size("$holders"), size("$waiters")]}, MAX_ENTRIES]},
        {"$allElementsTrue": [for_each({"$concatArrays": ["$holders", "$waiters"]}, has_types("$$e.", WAITER_FIELDS))]},
        {"$allElementsTrue": [for_each("$holders", has_types("$$e.", GRANTED_FIELDS))]},
    ]
}

#: The document from which an upsert starts.
_ZERO = Int64(0)
BLANK: dict[str, Expression] = {
    "_id": "$_id", "v": SCHEMA, "holders": [], "waiters": [], "tombstones": [], "token": _ZERO,
    "clock": "$$c.clock", "written_at": "$$NOW", "cluster_time": "$$op", "purge_at": "$$NOW", "changes": _ZERO,
    "acquisitions": _ZERO, "contended": _ZERO, "expired": _ZERO, "waited_ms": _ZERO, "held_ms": _ZERO,
    "longest_wait_ms": _ZERO, "longest_hold_ms": _ZERO,
}  # fmt: skip
