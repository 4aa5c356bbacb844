"""What a document says about its lock at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from bson.int64 import Int64

from ..inspection.kinds import Row
from ..inspection.snapshot import ShownState
from ..other_collections.field_paths import LAST_VERSION, aware, get_path
from .rules import TOO_LARGE, Rules


@dataclass(frozen=True, slots=True)
class DocumentSnapshot(Row):
    """A document under a lock. See `Row`.

    version: with the id what a retry job needs. work: the state of the work, beside the lock. failed: the state that it
    gets when it is released. token: what the holder has left there, for code only.
    """

    version: int = 0
    work: str | None = None
    failed: str | None = None
    token: object = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> Any:
        """The id of the document."""
        return self.key

    def cells(self) -> dict[str, object]:
        """See Row.cells()."""
        ends = f" → {self.failed}" if self.failed else ""
        return {**Row.cells(self), "WORK": f"{self.work}{ends}" if self.work else "-"}

    def facts(self) -> dict[str, Any]:
        """See Row.facts()."""
        return {"holder": self.holder, "version": self.version, "work": self.work, "failed_state": self.failed}


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
        return _damaged("?", f"its id has {id_[TOO_LARGE]} bytes")
    values = {role: get_path(document, getattr(fields, role)) for role in _TYPES}
    for role, (types, words) in _TYPES.items():
        value, name = values[role], getattr(fields, role)
        if isinstance(value, Mapping) and TOO_LARGE in value:
            return _damaged(id_, f"its field {name!r} has {value[TOO_LARGE]} bytes")
        if type(value) not in types:  # a subclass, such as bson.Code of str, is another type to the server
            return _damaged(id_, f"its field {name!r} is {type(value).__name__}, not {words}")
    version = values["version"] or 0
    if version >= LAST_VERSION:
        return _damaged(id_, f"its field {fields.version!r} is too large for a version")
    since, now = aware(values["time"]), aware(document.get("mongolock_now"))
    # Another server may have set the time by its own clock: an age below 0 is none.
    age = max(0.0, (now - since).total_seconds()) if since and now else 0.0
    left = rules.stale_after - age if since else None
    held = ShownState.STALE if left is not None and left <= 0 else ShownState.HELD
    return DocumentSnapshot(
        id_,
        held if values["holder"] else ShownState.FREE,
        values["holder"] or None,
        since=since,
        seconds=age,
        left=left,
        version=int(version),
        work=values["state"],
        failed=rules.pending.get(values["state"] or ""),
        token=get_path(document, fields.token),
    )


def _damaged(id_: Any, why: str) -> DocumentSnapshot:
    return DocumentSnapshot(id_, ShownState.DAMAGED, damage=why)
