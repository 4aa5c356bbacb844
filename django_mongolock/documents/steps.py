"""Which commands to send when, as generators: they decide, and neither wait nor send. `engine.runner` runs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from bson.int64 import Int64
from pymongo.collection import Collection

from ..exceptions import LockBackendFailed
from .rules import LAST_VERSION, TOO_LARGE, Rules
from .updates import Document

#: How often a command is sent whose outcome is unknown, besides what the driver does by itself.
SENDS: Final = 2

T = TypeVar("T")
#: What is sent: a function of the collection. Outcome: what it returns.
Command = Callable[[Collection[Document]], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Send nothing for so many seconds."""

    seconds: float


Steps = Generator[Command | Pause, Any, T]


@dataclass(slots=True)
class Doubt:
    """Whether a command may have taken effect, or may do so yet, that was not answered."""

    remains: bool = False


def send(command: Command, doubt: Doubt | None = None) -> Steps[Any]:
    """Send a command that may be sent again, until there is an answer. Raises LockBackendFailed.

    doubt: remains if any of the copies was not answered (cancelled, struck by a signal, MongoDB away).
    """
    for rest in reversed(range(SENDS)):
        try:
            return (yield command)
        except BaseException as error:
            passing = error.passing if isinstance(error, LockBackendFailed) else None
            if doubt is not None and passing is not False:
                doubt.remains = True
            if not (passing and rest):
                raise
    raise AssertionError("not reached")


@dataclass(frozen=True, slots=True)
class LockState:
    """What stands in one document about its lock.

    since, age (for how many seconds it has been held): for people, by the server's clock. damage: why it cannot be
    read; empty otherwise.
    """

    id: Any
    version: int = 0
    holder: str | None = None
    state: str | None = None
    since: datetime | None = None
    attempt: object = None
    age: float = 0.0
    damage: str = ""


def read_state(rules: Rules, document: Mapping[str, Any]) -> LockState:
    """Read a document that was found with `Fields.projection`. Never raises, whatever is in it."""
    fields = rules.fields
    holder, state, version, time = (get_path(document, getattr(fields, role)) for role in _TYPES)
    version = version or 0
    id_ = document["_id"]
    if isinstance(id_, Mapping) and TOO_LARGE in id_:
        return LockState("?", damage=f"its _id has {id_[TOO_LARGE]} bytes")
    for role, (types, words) in _TYPES.items():
        value = get_path(document, getattr(fields, role))
        if isinstance(value, Mapping) and TOO_LARGE in value:
            return LockState(id_, damage=f"its field {getattr(fields, role)!r} has {value[TOO_LARGE]} bytes")
        if type(value) not in types:  # a subclass, such as bson.Code of str, is another type to the server
            return LockState(id_, damage=f"its field {getattr(fields, role)!r} is {type(value).__name__}, not {words}")
    if version >= LAST_VERSION:
        return LockState(id_, damage=f"its field {fields.version!r} is too large for a version")
    since, now = aware(time), aware(document.get("mongolock_now"))
    # Another server may have set the time by its own clock: an age below 0 is none.
    age = max(0.0, (now - since).total_seconds()) if since and now else 0.0
    return LockState(id_, int(version), holder or None, state, since, get_path(document, fields.attempt), age)


_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "holder": ((str, type(None)), "text"),
    "state": ((str, type(None)), "text"),
    "version": ((int, Int64, type(None)), "a whole number"),
    "time": ((datetime, type(None)), "a date"),
}


def get_path(document: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, None where there is none."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def aware(value: object) -> datetime | None:
    """Return a moment as MongoDB has it, in UTC."""
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)
