"""The conditions and the updates of document locks, as MongoDB takes them. Nothing is sent here.

Every condition is an expression, which compares a value as a whole: a plain query would find "x" in the array ["x"].
Every value of a caller in one is a `$literal`, since the text "$price" is the name of a field there otherwise.

Every update is one of operators, not a pipeline: so the changes of a caller mean what MongoDB's own `$set` means. A
pipeline reads the paths of arrays differently.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.processes import this_process
from .rules import LAST_VERSION, Fields, Rules, check_age

Document = dict[str, Any]
#: The ids and versions that a document may have, of which its holder knows.
Known = Collection[tuple[str, int]]


def new_attempt() -> str:
    """Return a new id for one thing that the lock does to documents, with the name of the process. Make it when it is
    sent: then it is of no other process, nor of a forked child, nor of a copy of a machine that was cloned while it
    ran."""
    return f"{os.getpid()}.{secrets.token_hex(12)} {this_process()}"


def process_of(attempt: object) -> str:
    """Return the name of the process that made the id of an attempt; "" if that is unknown."""
    return attempt.partition(" ")[2] if isinstance(attempt, str) else ""


def literal(value: object) -> Document:
    return {"$literal": value}


def is_type(name: str, *types: str) -> Document:
    return {"$in": [{"$type": f"${name}"}, list(types)]}


def version_of(name: str) -> Document:
    """The version of a document: 0 if it has none."""
    return {"$ifNull": [f"${name}", 0]}


def is_version(name: str) -> Document:
    """The field is a whole number to which one can be added, or missing. A fraction, or a number that is too large, is
    damage."""
    return {"$and": [is_type(name, "int", "long", "null", "missing"), {"$lt": [version_of(name), LAST_VERSION]}]}


def is_whole(fields: Fields) -> Document:
    """Every field has a type that it may have. A field that cannot be read must not count as free."""
    return {
        "$and": [
            is_version(fields.version),
            is_type(fields.holder, "string", "null", "missing"),
            is_type(fields.state, "string", "null", "missing"),
            is_type(fields.time, "date", "null", "missing"),
        ]
    }


def has(name: str, values: Sequence[Any]) -> Document:
    return {"$in": [f"${name}", [literal(value) for value in values]]}


def is_free(fields: Fields) -> Document:
    """The holder's field is empty: missing, null or empty text."""
    return {"$eq": [{"$ifNull": [f"${fields.holder}", ""]}, ""]}


def is_stale(rules: Rules, older_than: float = 0.0) -> Document:
    """The document was held for too long, by the clock of the server that updates it, in the very update. A command
    that was held up on its way has an old ``$$NOW``, and finds fewer."""
    name = rules.fields.time
    end = {"$subtract": ["$$NOW", round((rules.stale_after + older_than) * 1000)]}
    return {"$and": [is_type(name, "date"), {"$lte": [f"${name}", end]}]}


@dataclass(frozen=True, slots=True)
class Statement:
    """The update of one document. Its query also has the document's id."""

    id: Any
    condition: Document
    update: Document

    @property
    def query(self) -> Document:
        return {"_id": {"$eq": self.id}, "$expr": self.condition}


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one document: in which version, for which work, and what else to change in it."""

    id: Any
    version: int
    pending: str
    changes: Document = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One attempt to acquire documents: in whose name, and by which id."""

    owner: str
    attempt: str

    def is_granted(self, rules: Rules) -> Document:
        """This very attempt was granted the document, and still holds it."""
        fields = rules.fields
        return {"$and": [has(fields.attempt, [self.attempt]), has(fields.holder, [self.owner])]}

    def acquiring(self, rules: Rules, request: Request, former: str | None = None) -> Statement:
        """Set holder, state and time, and raise the version.

        The document still has its version; and no work on it is under way, or it is free, or the same owner holds it
        and is stale, or holds it by the attempt *former*, whose process is known to have ended. Once granted, its
        version is another one: so a copy that the network held up, or that is sent again, changes nothing.
        """
        fields = rules.fields
        over = is_stale(rules) if former is None else {"$or": [is_stale(rules), has(fields.attempt, [former])]}
        mine = {"$and": [has(fields.holder, [self.owner]), over]}
        available = {"$or": [is_free(fields), has(fields.state, rules.ended), mine]}
        same = {"$eq": [version_of(fields.version), literal(request.version)]}
        # 0 may be a version that is null, which $inc refuses; any other keeps its type with $inc.
        raised = {"$inc": {fields.version: 1}} if request.version else {}
        values = {
            **request.changes,
            fields.holder: self.owner,
            fields.state: request.pending,
            fields.attempt: self.attempt,
            **({} if request.version else {fields.version: 1}),
        }
        update = {"$set": values, "$currentDate": {fields.time: True}, **raised}
        return Statement(request.id, {"$and": [is_whole(fields), same, available]}, update)

    def putting_back(self, rules: Rules, request: Request) -> Statement:
        """Set a document that this attempt was granted to the failed state of its work."""
        update = {"$set": releasing(rules, rules.pending[request.pending])}
        return Statement(request.id, self.is_granted(rules), update)


def is_held(rules: Rules, owner: str, known: Known) -> Document:
    """The owner still holds the document, as it was left by one of its writes. Each is known by its own id, and by the
    version that it left behind."""
    fields = rules.fields
    same = [
        {"$and": [has(fields.attempt, [attempt]), {"$eq": [f"${fields.version}", literal(version)]}]}
        for attempt, version in known
    ]
    return {"$and": [has(fields.holder, [owner]), is_version(fields.version), {"$or": same}]}


def is_held_in_any_version(rules: Rules, owner: str, attempts: Sequence[str]) -> Document:
    """The owner still holds the document by one of the attempts, whatever its version is."""
    return {"$and": [has(rules.fields.holder, [owner]), has(rules.fields.attempt, attempts)]}


def writing(rules: Rules, attempt: str, changes: Mapping[str, Any], more: Mapping[str, Any]) -> Document:
    """Write *changes* and *more*, and raise the version if there are any changes."""
    fields = rules.fields
    raised = {"$inc": {fields.version: 1}} if changes else {}
    return {"$set": {**changes, **more, fields.attempt: attempt}, **raised}


def releasing(rules: Rules, state: str | None) -> Document:
    """Empty the holder's field, and set the state."""
    fields = rules.fields
    return {fields.holder: None, fields.time: None, fields.state: state}


@dataclass(frozen=True, slots=True)
class StaleFilter:
    """Which stale documents are meant: of one owner; stale for so many seconds already; with one of these ids.

    unheld: also those that are pending and have no holder, unless they have a time that is not stale.
    """

    owner: str | None = None
    older_than: float = 0.0
    ids: Sequence[Any] | None = None
    unheld: bool = False

    def __post_init__(self) -> None:
        check_age(self.older_than)

    def query(self, rules: Rules) -> Document:
        """Pending documents that were held for too long."""
        return self._pending(rules, self.condition(rules))

    def condition(self, rules: Rules) -> Document:
        """They can be judged, and are stale."""
        fields = rules.fields
        stale = is_stale(rules, self.older_than)
        over = {"$and": [{"$not": [is_free(fields)]}, stale]}
        if self.unheld:
            dateless = {"$not": [is_type(fields.time, "date")]}
            over = {"$or": [over, {"$and": [is_free(fields), {"$or": [dateless, stale]}]}]}
        return {"$and": [is_whole(fields), over]}

    def at_work(self, rules: Rules) -> Document:
        """Pending documents that can be judged and have a holder, for however long."""
        return self._pending(rules, {"$and": [is_whole(rules.fields), {"$not": [is_free(rules.fields)]}]})

    def held(self, rules: Rules) -> Document:
        """Those of them that are not stale; also those that have no time yet."""
        conditions = [is_whole(rules.fields), {"$not": [is_free(rules.fields)]}, {"$not": [is_stale(rules)]}]
        return self._pending(rules, {"$and": conditions})

    def undated(self, rules: Rules) -> Document:
        """Pending documents that have a holder, but no time."""
        return self._pending(rules, self.dateless(rules))

    def dateless(self, rules: Rules) -> Document:
        """They can be judged, and have a holder, but no time."""
        fields = rules.fields
        return {
            "$and": [is_whole(fields), {"$not": [is_free(fields)]}, {"$not": [is_type(fields.time, "date")]}],
        }

    def damaged(self, rules: Rules) -> Document:
        """Pending documents that cannot be judged."""
        return self._pending(rules, {"$not": [is_whole(rules.fields)]})

    def _pending(self, rules: Rules, condition: Document) -> Document:
        # The plain condition is what an index narrows; the expressions are what decides.
        fields = rules.fields
        query: Document = {fields.state: {"$in": list(rules.pending)}, "$expr": condition}
        if self.owner is not None:
            query[fields.holder] = {"$eq": self.owner}
        return query if self.ids is None else {**query, "_id": {"$in": list(self.ids)}}


def may_write(field_of_token: str, field_of_write: str, token: int, writer: str, number: int) -> Document:
    """No token later than *token* stands in the document, and nothing that is no token; nor a later write of the same
    *writer* with this token. The writer counts its writes."""
    name, stamp = field_of_token, field_of_write
    older = {"$lt": [f"${name}", literal(token)]}
    later_write = {"$and": [has(f"{stamp}.by", [writer]), {"$gt": [f"${stamp}.number", literal(number)]}]}
    same = {"$and": [{"$eq": [f"${name}", literal(token)]}, {"$not": [later_write]}]}
    not_later = {"$and": [is_version(name), {"$or": [older, same]}]}
    return {"$or": [is_type(name, "null", "missing"), not_later]}
