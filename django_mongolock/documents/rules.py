"""What is declared of a document lock: its fields, its states, and when it is stale."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..engine.rule.options import Seconds, as_seconds, check_seconds
from ..engine.text_checks import check_text
from ..other_collections.field_paths import check_changes, check_path, meets
from ..other_collections.places import Source
from ..versions.checking import is_version_field

#: The largest id, holder, version, time or token that is read, in bytes.
LARGEST_VALUE: Final = 8_192
#: What is read in the place of a larger one: a document with this field.
TOO_LARGE: Final = "mongolock_bytes"


@dataclass(frozen=True, slots=True)
class Fields:
    """The names that the fields have in the documents; "lock.by" is the field "by" of the embedded document "lock".

    holder: who has the document, as text. state: how far its work is. version: raised by all that the lock writes.
    time: since when it is held, by the server's clock. key: by which a document is found.
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
        for role, name in names.items():
            for other, another in names.items():
                if role != other and meets(name, another):
                    raise ValueError(f"{role}={name!r} and {other}={another!r} are the same place in the document")

    @property
    def token(self) -> str:
        """Where the lock notes who wrote last, beside the holder: which acquisition, in which version."""
        return f"{self.holder}Token"

    def names(self) -> dict[str, str]:
        """Return the name of each field of the lock, by its role."""
        return {role: getattr(self, role) for role in ("holder", "state", "version", "time", "token")}

    def projection(self) -> dict[str, Any]:
        """Return what to read of a document to know the state of its lock. Of a value that is larger than any of the
        lock's own, the server sends the size only: another program may have written megabytes there."""
        values = {name: _bounded(name) for name in (self.key, *self.names().values())}
        return {**values, "mongolock_now": "$$NOW"}


def _bounded(name: str) -> dict[str, Any]:
    size = {"$bsonSize": {"v": f"${name}"}}
    return {"$cond": [{"$gt": [size, LARGEST_VALUE]}, {TOO_LARGE: size}, f"${name}"]}


@dataclass(frozen=True, slots=True)
class Rules:
    """Fields, states and times of one document lock.

    pending: the states of work under way, each with its failed state. final: the states in which work ends well.
    stale_after: seconds after which a held document is stale.
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
        """Check what was declared. Raises TypeError and ValueError that name the cure."""
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
    def failed(self) -> tuple[str, ...]:
        """The failed states, each once."""
        return tuple(dict.fromkeys(self.pending.values()))

    @property
    def ended(self) -> tuple[str, ...]:
        """The states in which no work is under way, whatever the holder's field says."""
        return tuple(dict.fromkeys((*self.final, *self.failed)))

    def check_pending(self, state: object) -> str:
        """Return the pending state that is meant. None: the only one there is."""
        return _choose("pending", state, tuple(self.pending))

    def check_final(self, state: object) -> str:
        """Return the final state that is meant, which may be a failed one. None: the only final one there is."""
        return _choose("final", state, self.final, self.failed)

    def check_changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return *changes* if they touch no field of the lock. Raises TypeError, ValueError."""
        return check_changes(changes, self.fields.names().values())


def _column(source: Source, role: str, name: str) -> str:
    try:
        return source.column(name)
    except ValueError as error:
        raise ValueError(f"{error}. Add this field, or say which one it is: {role}=") from None


def check_state(state: object) -> str:
    """Return a state as plain text, also where it is a member of TextChoices."""
    if not isinstance(state, str):
        raise TypeError(f"a state is text, not {type(state).__name__}")
    if not state:
        raise ValueError("a state must not be empty")
    return check_text("a state", str.__str__(state))


def check_age(value: object) -> float:
    """Return an age in seconds: 0, or a time above it. Raises TypeError, ValueError."""
    seconds = as_seconds(value)
    return 0.0 if seconds == 0 and not isinstance(seconds, bool) else check_seconds("older_than", seconds)


def _choose(kind: str, state: object, states: tuple[str, ...], more: tuple[str, ...] = ()) -> str:
    if state is None:
        if len(states) == 1:
            return states[0]
        raise TypeError(f"name the {kind} state: one of {', '.join(states)}")
    plain = check_state(state)
    if plain not in states and plain not in more:
        raise ValueError(f"{plain!r} was not declared as a {kind} state: there are {', '.join((*states, *more))}")
    return plain
