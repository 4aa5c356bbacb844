"""Which commands to send when, as generators: they decide, and neither wait nor send. `engine.runner` runs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from bson.int64 import Int64
from pymongo.collection import Collection

from ..exceptions import LockBackendFailed
from .rules import LAST_VERSION, Rules
from .updates import Document

#: How often a command is sent whose outcome is unknown, besides what the driver does by itself.
SENDS: Final = 2

T = TypeVar("T")
#: What is sent: a function of the collection. Outcome: what it returns.
Command = Callable[[Collection[Document]], Any]
Steps = Generator[Command, Any, T]


def send(command: Command, *, if_unknown: Callable[[], object] | None = None) -> Steps[Any]:
    """Send a command that may be sent again, until there is an answer. Raises LockBackendFailed.

    if_unknown: called if it ends without an answer (cancelled, struck by a signal, MongoDB away).
    """
    outcome_unknown = False
    for rest in reversed(range(SENDS)):
        try:
            return (yield command)
        except BaseException as error:
            passing = error.passing if isinstance(error, LockBackendFailed) else None
            outcome_unknown |= passing is not False
            if passing and rest:
                continue
            if outcome_unknown and if_unknown is not None:
                if_unknown()
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
    id_ = document["_id"]
    for role, (types, words) in _TYPES.items():
        value = get_path(document, getattr(fields, role))
        if type(value) not in types:  # a subclass, such as bson.Code of str, is another type to the server
            name = "missing" if value is None else type(value).__name__
            return LockState(id_, damage=f"its field {getattr(fields, role)!r} is {name}, not {words}")
    if version >= LAST_VERSION:
        return LockState(id_, damage=f"its field {fields.version!r} is too large for a version")
    since, now = aware(time), aware(document.get("mongolock_now"))
    # Another server may have set the time by its own clock: an age below 0 is none.
    age = max(0.0, (now - since).total_seconds()) if since and now else 0.0
    return LockState(id_, int(version), holder or None, state, since, get_path(document, fields.attempt), age)


_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "holder": ((str, type(None)), "text"),
    "state": ((str, type(None)), "text"),
    "version": ((int, Int64), "a whole number"),
    "time": ((datetime, type(None)), "a date"),
}


def read_states(rules: Rules, ids: Sequence[Any]) -> Command:
    """Make the command that reads documents by their ids, as far as their locks need it."""

    def command(collection: Collection[Document]) -> dict[Any, Document]:
        found = collection.find({"_id": {"$in": list(ids)}}, rules.fields.projection())
        return {document["_id"]: document for document in found}

    return command


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
