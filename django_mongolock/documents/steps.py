"""What to send when, as generators: they decide, and never wait or send. The two drivers of the engine run them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.collection import Collection

from ..exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentNotFound,
    LockBackendFailed,
    LockError,
)
from . import updates
from .rules import LAST_VERSION, Fields, Rules
from .updates import Claim, Document

#: How often a command is sent whose outcome nobody knows, beside what the driver does by itself.
SENDS: Final = 2
#: How often somebody asks again who was refused for a reason that was gone when he looked.
ROUNDS: Final = 3
#: How many documents one command is about.
ACQUIRE_BATCH: Final = 500

T = TypeVar("T")
Call = Callable[[Collection[Document]], Any]


@dataclass(slots=True, eq=False)
class Send:
    """Have *call* made with the collection. Outcome: what it returns."""

    call: Call
    done: bool = field(default=False, init=False)
    afterwards: Call | None = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Later:
    """Have *call* made in the background, once *after* is not under way any more, and again until it returns True: a
    command that was held up in the network may arrive later still. Outcome: None, at once."""

    after: Send
    call: Call


Action = Send | Later
Steps = Generator[Action, Any, T]


@dataclass(frozen=True, slots=True)
class Target:
    """Documents of which collection, under which rules. name: the collection, for people."""

    name: str
    rules: Rules


def send(call: Call) -> Steps[Any]:
    """Send a command that may be sent again, until there is an answer. Raises LockBackendFailed."""
    for rest in reversed(range(SENDS)):
        try:
            return (yield Send(call))
        except LockBackendFailed as error:
            if not rest or not error.passing:
                raise
    raise AssertionError("not reached")


def send_or_let_go(call: Call, let_go: Call) -> Steps[Any]:
    """Send a command. If it ends without an answer (cancelled, struck by a signal, MongoDB away), have *let_go* called
    in the background: nobody will ever finish what it may have got."""
    outcome_unknown = False
    for rest in reversed(range(SENDS)):
        attempt = Send(call)
        try:
            return (yield attempt)
        except LockBackendFailed as error:
            outcome_unknown |= error.passing
            if rest and error.passing:
                continue
            if outcome_unknown:
                yield Later(attempt, let_go)
            raise
        except BaseException:
            yield Later(attempt, let_go)
            raise
    raise AssertionError("not reached")


def _letting_go(rules: Rules, claim: Claim, ids: Sequence[Any]) -> Call:
    """Set the documents that a claim got to their failed state."""
    query = {"_id": {"$in": list(ids)}, "$expr": claim.is_granted(rules)}
    update = [{"$set": updates.letting_go(rules, updates.failed_state(rules))}]

    def call(collection: Collection[Document]) -> bool:
        return collection.update_many(query, update).matched_count > 0

    return call


def acquire(target: Target, claim: Claim, id_: Any, version: int) -> Steps[Document]:
    """Get one document; returns it as it is then.

    Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, LockBackendFailed.
    """
    rules = target.rules
    query, update = claim.query(rules, {id_: version}), claim.update(rules)

    def call(collection: Collection[Document]) -> Any:
        return collection.find_one_and_update(query, update, return_document=ReturnDocument.AFTER)

    for rest in reversed(range(ROUNDS)):
        granted: Document | None = yield from send_or_let_go(call, _letting_go(rules, claim, [id_]))
        if granted is not None:
            return granted
        found: dict[Any, Document] = yield from send(_look(rules.fields, [id_]))
        refusal = why_not(target, id_, version, found.get(id_))
        # Whoever had it may have finished just now: ask again, before saying that nobody has it.
        if not rest or not (isinstance(refusal, DocumentHeld) and is_available(rules, claim.owner, found[id_])):
            raise refusal
    raise AssertionError("not reached")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The documents that were granted, as they are now; and why others were not, by their ids."""

    granted: list[Document]
    refused: dict[Any, LockError]


def acquire_many(target: Target, claim: Claim, versions: Mapping[Any, int]) -> Steps[Outcome]:
    """Get those of many documents that are to be had, in three commands for each `ACQUIRE_BATCH`."""
    outcome = Outcome([], {})
    items = list(versions.items())
    for start in range(0, len(items), ACQUIRE_BATCH):
        yield from _acquire_batch(target, claim, dict(items[start : start + ACQUIRE_BATCH]), outcome)
    return outcome


def _acquire_batch(target: Target, claim: Claim, versions: dict[Any, int], outcome: Outcome) -> Steps[None]:
    rules = target.rules
    query, update = claim.query(rules, versions), claim.update(rules)
    got = {"_id": {"$in": list(versions)}, "$expr": claim.is_granted(rules)}

    def call(collection: Collection[Document]) -> list[Document]:
        collection.update_many(query, update)
        return list(collection.find(got))

    # What earlier batches got has a holder that may never learn of it, too.
    earlier = [document["_id"] for document in outcome.granted]
    granted = yield from send_or_let_go(call, _letting_go(rules, claim, [*earlier, *versions]))
    outcome.granted.extend(granted)
    missed = list(versions.keys() - {document["_id"] for document in granted})
    if missed:
        found = yield from send(_look(rules.fields, missed))
        outcome.refused.update({id_: why_not(target, id_, versions[id_], found.get(id_)) for id_ in missed})


def _look(fields: Fields, ids: Sequence[Any]) -> Call:
    def call(collection: Collection[Document]) -> dict[Any, Document]:
        found = collection.find({"_id": {"$in": list(ids)}}, fields.projection())
        return {document["_id"]: document for document in found}

    return call


def why_not(target: Target, id_: Any, version: int, document: Document | None) -> LockError:
    """Why a document was refused, by what it looked like right afterwards."""
    if document is None:
        return DocumentNotFound(target.name, id_)
    seen = look_at(target.rules, document)
    if seen.damage:
        return DocumentDamaged(target.name, id_, seen.damage)
    if seen.version != version:
        return DocumentChanged(target.name, id_, version, seen.version)
    # An advice, by the server's clock: whoever asks then is judged anew.
    after = max(0.0, target.rules.stale_after - seen.age) if seen.since else 0.0
    return DocumentHeld(target.name, id_, seen.holder or "somebody who was quicker", seen.state, seen.since, after)


def is_available(rules: Rules, owner: str, document: Document) -> bool:
    """Would *owner* be granted a document that looks like this?"""
    seen = look_at(rules, document)
    return not seen.holder or seen.holder == owner or seen.state in rules.settled


@dataclass(frozen=True, slots=True)
class Seen:
    """How the lock of one document stands. since, and age, for how many seconds it has been held: for people, by the
    server's clock. It may be another server's by now, so an age below 0 is none. Nothing is believed by them."""

    id: Any
    version: int = 0
    holder: str | None = None
    state: str | None = None
    since: datetime | None = None
    attempt: object = None
    age: float = 0.0
    damage: str = ""


def look_at(rules: Rules, document: Mapping[str, Any]) -> Seen:
    """Read what stands in a document that was read with `Fields.projection`. Never raises, whatever is in it."""
    fields = rules.fields
    holder, state, version, time = (dig(document, getattr(fields, role)) for role in _TYPES)
    id_ = document["_id"]
    for role, (types, words) in _TYPES.items():
        value = dig(document, getattr(fields, role))
        if type(value) not in types:  # a subclass, such as bson.Code of str, is another type to the server
            name = "missing" if value is None else type(value).__name__
            return Seen(id_, damage=f"its field {getattr(fields, role)!r} is {name}, not {words}")
    if version >= LAST_VERSION:
        return Seen(id_, damage=f"its field {fields.version!r} is too large for a version")
    since, now = aware(time), aware(document.get("mongolock_now"))
    age = max(0.0, (now - since).total_seconds()) if since and now else 0.0
    return Seen(id_, int(version), holder or None, state, since, dig(document, fields.attempt), age)


_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "holder": ((str, type(None)), "text"),
    "state": ((str, type(None)), "text"),
    "version": ((int, Int64), "a whole number"),
    "time": ((datetime, type(None)), "a date"),
}


def dig(document: Mapping[str, Any], path: str) -> Any:
    """The value of a field, None where there is none."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def aware(value: object) -> datetime | None:
    """A moment as MongoDB has it, in UTC."""
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)
