"""The conditions and the updates of document locks, as MongoDB takes them. Nothing is sent here.

Every update is one of operators, not a pipeline: so the changes of a caller mean what MongoDB's own `$set` means. A
pipeline reads the paths of arrays differently.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.field_paths import Document, has, is_type, is_version, literal, version_of
from ..engine.protocol.processes import this_process
from .rules import Fields, Rules


@dataclass(frozen=True, slots=True)
class Mark:
    """Who writes: one acquisition, sweep or release, by a process.

    What it leaves in a document, its token, also has the version that it left the document in. So one look at token and
    version tells whether a write was done, and whether somebody else has written since.
    """

    id: str
    process: str

    def at(self, version: int) -> str:
        """Return the token of its write that leaves this version."""
        return f"{self.id}:{version} {self.process}"


def new_mark() -> Mark:
    """Return a mark that no other process has, nor a forked child, nor a copy of a machine that was cloned while it
    ran: make it when it is sent."""
    return Mark(f"{os.getpid()}.{secrets.token_hex(12)}", this_process())


def process_of(token: object) -> str:
    """Return the name of the process that wrote a token; "" if that is unknown."""
    return token.partition(" ")[2] if isinstance(token, str) else ""


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


def is_stale(rules: Rules, older_than: float = 0.0) -> Document:
    """The document was held for too long, by the clock of the server that updates it, in the very update. A command
    that was held up on its way has an old ``$$NOW``, and finds fewer."""
    name = rules.fields.time
    end = {"$subtract": ["$$NOW", round((rules.stale_after + older_than) * 1000)]}
    return {"$and": [is_type(name, "date"), {"$lte": [f"${name}", end]}]}


def is_taken(rules: Rules) -> Document:
    """The document has a holder whose work has not ended: it is held, or stale.

    A holder in a state that the lock does not know counts where the lock has set the time.
    """
    fields = rules.fields
    known = {"$or": [is_type(fields.time, "date"), has(fields.state, list(rules.pending))]}
    empty = {"$eq": [{"$ifNull": [f"${fields.holder}", ""]}, ""]}
    return {"$and": [{"$not": [empty]}, {"$not": [has(fields.state, rules.ended)]}, known]}


def is_held(rules: Rules) -> Document:
    """The document has a holder, and is neither ended nor stale. Nobody else gets it."""
    return {"$and": [is_taken(rules), {"$not": [is_stale(rules)]}]}


def is_undated(rules: Rules) -> Document:
    """It has a holder from before there was a time."""
    return {"$and": [is_taken(rules), {"$not": [is_type(rules.fields.time, "date")]}]}


@dataclass(frozen=True, slots=True)
class Statement:
    """The update of one document."""

    key: str
    id: Any
    condition: Document
    update: Document

    @property
    def query(self) -> Document:
        return {self.key: {"$eq": self.id}, "$expr": self.condition}


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one document: in which version, for which work, and what else to change in it."""

    id: Any
    version: int
    pending: str
    changes: Document = field(default_factory=dict)


def acquiring(rules: Rules, own: Own, request: Request, dead: str | None = None) -> Statement:
    """Set holder, state, time and token, and raise the version.

    The document still has its version, and is not held; or the same owner holds it by the token *dead*, whose process
    is known to have ended. Once granted, its version is another one: so a copy that the network held up, or that is
    sent again, changes nothing.
    """
    fields = rules.fields
    available: Document = {"$not": [is_held(rules)]}
    if dead is not None:
        available = {"$or": [available, {"$and": [has(fields.holder, [own.owner]), has(fields.token, [dead])]}]}
    same = {"$eq": [version_of(fields.version), literal(request.version)]}
    held = {fields.holder: own.owner, fields.state: request.pending, fields.token: own.mark.at(own.known)}
    update = raising(fields, request.version, {**request.changes, **held})
    update["$currentDate"] = {fields.time: True}
    return Statement(fields.key, request.id, {"$and": [is_whole(fields), same, available]}, update)


def raising(fields: Fields, version: int, values: Document) -> Document:
    """Set *values*, and raise the version, which keeps its type. 0 may be a version that is null, which $inc
    refuses."""
    if version:
        return {"$set": values, "$inc": {fields.version: 1}}
    return {"$set": {**values, fields.version: 1}}


@dataclass(slots=True)
class Own:
    """A document that a flow holds, as its writes may have left it: in version *known*, or in a later one up to *sent*,
    by writes that were not answered.

    failed: the failed state of its work. kind: the type of its version. ended: how the work ended; None: not yet.
    """

    id: Any
    owner: str
    mark: Mark
    known: int
    sent: int
    failed: str
    kind: type[int] = int
    ended: str | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether a write was not answered."""
        return self.sent > self.known

    @property
    def tokens(self) -> list[str]:
        """What may stand in the document."""
        return [self.mark.at(version) for version in range(self.known, self.sent + 1)]

    def is_as_left(self, fields: Fields) -> Document:
        """The flow holds the document, and nobody else has raised its version."""
        versions = range(self.known, self.sent + 1)
        left = [{"$and": [has(fields.token, [self.mark.at(v)]), _is(fields.version, v)]} for v in versions]
        return {"$and": [has(fields.holder, [self.owner]), is_version(fields.version), {"$or": left}]}

    def writing(self, rules: Rules, values: Mapping[str, Any], token: str, *, renew: bool = False) -> Statement:
        """Write *values* if the document is as this flow has left it. The next version is one that no earlier write of
        it had: so the token tells which write was done."""
        fields = rules.fields
        update: Document = {"$set": {**values, fields.token: token, fields.version: self.kind(self.sent + 1)}}
        if renew:
            update["$currentDate"] = {fields.time: True}
        return Statement(fields.key, self.id, self.is_as_left(fields), update)

    def last_token(self) -> str:
        """Return the token of a write that ends the work: that of no holder."""
        return new_mark().at(self.sent + 1)

    def failing(self, rules: Rules, token: str) -> Statement:
        """Release the document in its failed state, if the flow holds it, in whatever version."""
        fields = rules.fields
        mine = [has(fields.holder, [self.owner]), has(fields.token, self.tokens), is_version(fields.version)]
        update = raising(fields, 1, releasing(rules, self.failed, token))
        return Statement(fields.key, self.id, {"$and": mine}, update)


def _is(name: str, value: Any) -> Document:
    return {"$eq": [{"$ifNull": [f"${name}", None]}, literal(value)]}


def releasing(rules: Rules, state: str | None, token: str) -> Document:
    """Empty the holder's field, and set the state; None: leave it as it is."""
    fields = rules.fields
    values: Document = {fields.holder: None, fields.time: None, fields.token: token}
    return values if state is None else {**values, fields.state: state}


def taking_away(rules: Rules, mark: Mark, condition: Document, seen: Any, *, exact: bool) -> Statement:
    """Release a document that has the holder and the state that were *seen*; exact: and the version."""
    fields, version = rules.fields, seen.version
    same = [_is(fields.holder, seen.holder), _is(fields.state, seen.work)]
    if exact or not version:
        same.append({"$eq": [version_of(fields.version), literal(version)]})
    values = releasing(rules, seen.failed, mark.at(version + 1))
    return Statement(
        fields.key, seen.id, {"$and": [is_whole(fields), condition, *same]}, raising(fields, version, values)
    )
