"""Short words for the aggregation expressions that the rule is made of."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

Expression = Any

#: Whether the item `$$e` is the entry that the command asks about.
IS_ASKED: Final[Expression] = {"$eq": ["$$e.grant", "$$c.ask"]}

_BSON_TYPES: Final[dict[type, str]] = {str: "string", int: "int", Int64: "long", datetime: "date", list: "array"}


def let(variables: dict[str, Expression], inside: Expression) -> Expression:
    return {"$let": {"vars": variables, "in": inside}}


def for_each(items: Expression, each: Expression) -> Expression:
    """What *each* makes of every item, which is `$$e` there."""
    return {"$map": {"input": items, "as": "e", "in": each}}


def only(items: Expression, condition: Expression) -> Expression:
    """The items for which *condition* is true; they are `$$e` there."""
    return {"$filter": {"input": items, "as": "e", "cond": condition}}


def size(items: Expression) -> Expression:
    return {"$size": items}


def merge(entry: Expression, changes: dict[str, Expression]) -> Expression:
    return {"$mergeObjects": [entry, changes]}


def after(moment: Expression, milliseconds: Expression) -> Expression:
    return {"$add": [moment, milliseconds]}


def has_types(prefix: str, fields: dict[str, type]) -> Expression:
    """True where every field has its type. One comparison of two lists: cheaper to parse than one per field."""
    types = {"$map": {"input": [prefix + name for name in fields], "in": {"$type": "$$this"}}}
    return {"$eq": [types, [_BSON_TYPES[kind] for kind in fields.values()]]}


def encoded(document: dict[str, Any]) -> RawBSONDocument:
    """The document as it is sent, so that it need not be encoded for each command."""
    return RawBSONDocument(bson.encode(document))
