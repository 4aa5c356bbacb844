"""The declaration of a document lock (fields, states, staleness), and the state that a document shows by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from bson.int64 import Int64

from ..engine.rule.options import Seconds, check_seconds
from ..engine.text_checks import check_text
from ..inspection.kinds import Row
from ..inspection.snapshot import ShownState
from ..other_collections.field_paths import LAST_VERSION, aware, check_changes, check_path, get_path, meets
from ..other_collections.places import Source, check_id
from ..versions.checking import is_version_field

#: The largest id, holder, version, time or token that is read, in bytes.
LARGEST_VALUE: Final = 8_192
#: The field of the document that is read in the place of a larger value.
TOO_LARGE: Final = "mongolock_bytes"


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of the fields in the documents. "lock.by" is the field "by" of the embedded document "lock".

    - holder: holder of the document, as text.
    - state: state of the work.
    - version: version, raised by every write of the lock.
    - time: time since when the document is held, by the server's clock.
    - key: field by which a document is found.
    """

    holder: str
    state: str
    version: str
    time: str
    key: str = "_id"

    def __post_init__(self) -> None:
        names = self.names()
        for role, name in names.items():
            check_path(f"the field of {role}", name)
            for other, another in names.items():
                if role != other and meets(name, another):
                    raise ValueError(f"{role}={name!r} and {other}={another!r} are the same place in the document")

    @property
    def token(self) -> str:
        """The field beside the holder for the last writer, with the acquisition and its version."""
        return f"{self.holder}Token"

    def names(self) -> dict[str, str]:
        """Return the name of each field of the lock, by its role."""
        return {role: getattr(self, role) for role in ("holder", "state", "version", "time", "token")}

    def projection(self) -> dict[str, Any]:
        """Return the projection for reading the state of a document's lock.

        For a value that is larger than any of the lock's own, the server sends only the size. Another program may have
        written megabytes there.
        """
        found: dict[str, Any] = {"mongolock_now": "$$NOW"}
        for name in (self.key, *self.names().values()):
            size = {"$bsonSize": {"v": f"${name}"}}
            found[name] = {"$cond": [{"$gt": [size, LARGEST_VALUE]}, {TOO_LARGE: size}, f"${name}"]}
        return found


@dataclass(frozen=True, slots=True)
class Rules:
    """The fields, states and times of one document lock.

    - pending: states of work under way, each with its failed state.
    - final: states in which work ends well.
    - stale_after: seconds after which a held document is stale.
    """

    fields: Fields
    pending: Mapping[str, str]
    final: tuple[str, ...]
    stale_after: float

    @classmethod
    def declare(
        cls,
        source: Source,
        fields: Mapping[str, str],
        pending: Mapping[str, str],
        final: Collection[str],
        stale_after: Seconds,
    ) -> Rules:
        """Check the declaration. Raises TypeError and ValueError that name the cure."""
        columns = {role: _column(source, role, name) for role, name in fields.items()}
        if not pending or not hasattr(pending, "items"):
            raise TypeError('pending names each pending state and its failed state: {"exporting": "export_failed"}')
        if isinstance(final, str) or not final:
            raise TypeError('final is a list of states: ["exported"]')
        plain = {check_state(state): check_state(failed) for state, failed in pending.items()}
        ends = tuple(check_state(state) for state in final)
        for state in (*ends, *plain.values()):
            if state in plain:
                raise ValueError(f"{state!r} is a pending state: it cannot be a final or a failed one as well")
        version = source.field(fields["version"])
        if version is not None and not is_version_field(version):
            raise TypeError(
                f"version={version.name!r} is a {type(version).__name__} of {source.name}: make it a VersionField of "
                "django_mongolock.versions, so that save() of an instance that was read before does not write over "
                "what a flow has done since"
            )
        seconds = check_seconds("stale_after", stale_after)
        return cls(Fields(**columns, key=source.key_column), plain, ends, seconds)

    @property
    def ended(self) -> tuple[str, ...]:
        """The states in which no work is under way, whatever the holder's field contains."""
        return tuple(dict.fromkeys((*self.final, *self.pending.values())))

    def check_pending(self, state: object) -> str:
        """Return the pending state for a given one. If it is None, return the only one there is."""
        return _choose("pending", state, tuple(self.pending), tuple(self.pending))

    def check_final(self, state: object) -> str:
        """Return the final state for a given one, possibly a failed one.

        If it is None, return the only final one there is.
        """
        return _choose("final", state, self.final, self.ended)

    def check_changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return *changes* if they touch neither a field of the lock nor the key. Raises TypeError, ValueError."""
        return check_changes(changes, [*self.fields.names().values(), self.fields.key])


def _column(source: Source, role: str, name: str) -> str:
    try:
        return source.column(name)
    except ValueError as error:
        raise ValueError(f"{error}. Add this field, or say which one it is: {role}=") from None


def check_state(state: object) -> str:
    """Return a state as plain text, even if it is a member of TextChoices."""
    if not isinstance(state, str):
        raise TypeError(f"a state is text, not {type(state).__name__}")
    if not state:
        raise ValueError("a state must not be empty")
    return check_text("a state", str.__str__(state))


def _choose(kind: str, state: object, states: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    if state is None:
        if len(states) == 1:
            return states[0]
        raise TypeError(f"name the {kind} state: one of {', '.join(states)}")
    plain = check_state(state)
    if plain not in allowed:
        raise ValueError(f"{plain!r} was not declared as a {kind} state: there are {', '.join(allowed)}")
    return plain


@dataclass(frozen=True, slots=True)
class DocumentSnapshot(Row):
    """A document under a lock. See `Row`.

    - version: version of the document. A retry job needs it together with the id.
    - work: state of the work, beside the lock.
    - failed: state that the document gets when it is released.
    - token: token that the holder has left there, for code only.
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
    """Read a document that was found with `Fields.projection`. Never raises, whatever the document contains."""
    fields = rules.fields
    id_ = document[fields.key]
    if isinstance(id_, Mapping) and TOO_LARGE in id_:
        return _damaged("?", f"its id has {id_[TOO_LARGE]} bytes")
    try:
        id_ = check_id(id_)
    except TypeError as error:
        return _damaged(str(id_), str(error))
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
    # Another server may have set the time by its own clock. A negative age counts as 0.
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
