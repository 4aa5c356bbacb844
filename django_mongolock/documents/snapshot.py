"""What a document says about its lock at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from bson.int64 import Int64

from ..backends.field_paths import LAST_VERSION, aware, get_path
from ..inspection.kinds import Row
from .rules import TOO_LARGE, Rules

#: A document under a lock, as lists, pages and JSON have it.
DocumentSnapshot = Row


_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "holder": ((str, type(None)), "text"),
    "state": ((str, type(None)), "text"),
    "version": ((int, Int64, type(None)), "a whole number"),
    "time": ((datetime, type(None)), "a date"),
}


def read_snapshot(rules: Rules, document: Mapping[str, Any]) -> DocumentSnapshot:
    """Read a document that was found with `Fields.projection`. Never raises, whatever is in it."""
    fields = rules.fields
    id_ = document[fields.key]
    if isinstance(id_, Mapping) and TOO_LARGE in id_:
        return DocumentSnapshot("?", damage=f"its id has {id_[TOO_LARGE]} bytes")
    values = {role: get_path(document, getattr(fields, role)) for role in _TYPES}
    for role, (types, words) in _TYPES.items():
        value, name = values[role], getattr(fields, role)
        if isinstance(value, Mapping) and TOO_LARGE in value:
            return DocumentSnapshot(id_, damage=f"its field {name!r} has {value[TOO_LARGE]} bytes")
        if type(value) not in types:  # a subclass, such as bson.Code of str, is another type to the server
            return DocumentSnapshot(id_, damage=f"its field {name!r} is {type(value).__name__}, not {words}")
    version = values["version"] or 0
    if version >= LAST_VERSION:
        return DocumentSnapshot(id_, damage=f"its field {fields.version!r} is too large for a version")
    since, now = aware(values["time"]), aware(document.get("mongolock_now"))
    # Another server may have set the time by its own clock: an age below 0 is none.
    age = max(0.0, (now - since).total_seconds()) if since and now else 0.0
    return DocumentSnapshot(
        id_,
        int(version),
        values["holder"] or None,
        values["state"],
        rules.pending.get(values["state"] or ""),
        since,
        age,
        left=rules.stale_after - age if since else None,
        token=get_path(document, fields.token),
    )
