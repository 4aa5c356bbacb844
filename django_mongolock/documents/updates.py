"""The conditions, updates and commands of document locks, in MongoDB's form. Nothing is sent here.

Every update consists of operators, because a pipeline reads the paths of arrays differently. The changes of a caller
therefore mean the same as in MongoDB's own `$set`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pymongo import ReturnDocument, UpdateOne
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure, WriteConcernError

from ..engine.protocol.processes import this_process
from ..engine.store.errors import is_refusal
from ..other_collections.courier import Command
from ..other_collections.field_paths import Document, has, is_type, is_version, literal, version_of
from ..other_collections.places import check_id
from .rules import Fields, Rules


def new_writer() -> str:
    """Return a name for one acquisition, sweep or release by this process.

    No other process has this name, not even a forked child or a clone of the running machine. Make the name when it is
    sent.
    """
    return f"{os.getpid()}.{secrets.token_hex(12)} {this_process()}"


def token_of(writer: str, version: int) -> str:
    """Return the token that a write leaves in a document, with the new version of the document.

    One look at token and version therefore shows whether a write was done, and whether another writer has come since.
    """
    return f"{version}:{writer}"


def is_whole(fields: Fields) -> Document:
    """Return the condition that every field has a valid type. An unreadable field must not count as free."""
    return {
        "$and": [
            is_version(fields.version),
            is_type(fields.holder, "string", "null", "missing"),
            is_type(fields.state, "string", "null", "missing"),
            is_type(fields.time, "date", "null", "missing"),
        ]
    }


def is_stale(rules: Rules, older_than: float = 0.0) -> Document:
    """Return the condition that the document was held for too long.

    The server that updates the document decides by its own clock, in the very update. A command that was delayed on its
    way has an old ``$$NOW``, and finds fewer.
    """
    name = rules.fields.time
    end = {"$subtract": ["$$NOW", round((rules.stale_after + older_than) * 1000)]}
    return {"$and": [is_type(name, "date"), {"$lte": [f"${name}", end]}]}


def is_taken(rules: Rules) -> Document:
    """Return the condition that the document has a holder whose work has not ended. Such a document is held or stale.

    A holder in a state that the lock does not know counts if the lock has set the time.
    """
    fields = rules.fields
    known = {"$or": [is_type(fields.time, "date"), has(fields.state, list(rules.pending))]}
    empty = {"$eq": [{"$ifNull": [f"${fields.holder}", ""]}, ""]}
    return {"$and": [{"$not": [empty]}, {"$not": [has(fields.state, rules.ended)]}, known]}


def is_held(rules: Rules) -> Document:
    """Return the condition that the document has a holder, is in no final or failed state, and is not stale."""
    return {"$and": [is_taken(rules), {"$not": [is_stale(rules)]}]}


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
    """A request for one document, with its version, its work, and further changes."""

    id: Any
    version: int
    pending: str
    changes: Document


def acquiring(rules: Rules, own: Own, request: Request, dead: str | None = None) -> Statement:
    """Set holder, state, time and token, and raise the version.

    The document must still have its version, and must not be held. If *dead* is given, the same owner may hold it by
    that token, because the process of that token is known to have ended. A granted document has another version. A
    delayed or repeated copy of the command therefore changes nothing.
    """
    fields = rules.fields
    available: Document = {"$not": [is_held(rules)]}
    if dead is not None:
        available = {"$or": [available, {"$and": [has(fields.holder, [own.owner]), has(fields.token, [dead])]}]}
    same = {"$eq": [version_of(fields.version), literal(request.version)]}
    held = {fields.holder: own.owner, fields.state: request.pending, fields.token: token_of(own.writer, own.known)}
    update = raising(fields, request.version, {**request.changes, **held})
    update["$currentDate"] = {fields.time: True}
    return Statement(fields.key, request.id, {"$and": [is_whole(fields), same, available]}, update)


def raising(fields: Fields, version: int, values: Document) -> Document:
    """Set *values*, and raise the version without changing its type.

    A version of 0 is set, because it may stand for null and $inc refuses null.
    """
    if version:
        return {"$set": values, "$inc": {fields.version: 1}}
    return {"$set": {**values, fields.version: 1}}


@dataclass(slots=True)
class Own:
    """A document that a flow holds, with the versions in which its writes may have left it.

    - known: last version that was answered.
    - sent: last version that was sent. Writes between the two had no answer.
    - failed: failed state of its work.
    - kind: type of its version.
    - ended: end of the work. None: not yet.
    """

    id: Any
    owner: str
    writer: str
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
        """The tokens that may stand in the document."""
        return [token_of(self.writer, version) for version in range(self.known, self.sent + 1)]

    def writing(self, rules: Rules, values: Mapping[str, Any], token: str, *, renew: bool = False) -> Statement:
        """Write *values* if the flow holds the document, and nobody else has raised its version.

        The next version is one that no earlier write of the flow had. The token therefore shows which write was done.
        """
        fields = rules.fields
        update: Document = {"$set": {**values, fields.token: token, fields.version: self.kind(self.sent + 1)}}
        if renew:
            update["$currentDate"] = {fields.time: True}
        versions = range(self.known, self.sent + 1)
        left = [{"$and": [has(fields.token, [token_of(self.writer, v)]), _is(fields.version, v)]} for v in versions]
        as_left = {"$and": [has(fields.holder, [self.owner]), is_version(fields.version), {"$or": left}]}
        return Statement(fields.key, self.id, as_left, update)

    def last_token(self) -> str:
        """Return the token of a write that ends the work. No holder has this token."""
        return token_of(new_writer(), self.sent + 1)

    def failing(self, rules: Rules, token: str) -> Statement:
        """Release the document in its failed state, if the flow holds it, in whatever version."""
        fields = rules.fields
        mine = [has(fields.holder, [self.owner]), has(fields.token, self.tokens), is_version(fields.version)]
        update = raising(fields, 1, releasing(rules, self.failed, token))
        return Statement(fields.key, self.id, {"$and": mine}, update)


def _is(name: str, value: Any) -> Document:
    return {"$eq": [{"$ifNull": [f"${name}", None]}, literal(value)]}


def releasing(rules: Rules, state: str | None, token: str) -> Document:
    """Empty the holder's field, and set the state. None leaves the state unchanged."""
    fields = rules.fields
    values: Document = {fields.holder: None, fields.time: None, fields.token: token}
    return values if state is None else {**values, fields.state: state}


def taking_away(rules: Rules, writer: str, condition: Document, seen: Any, *, exact: bool) -> Statement:
    """Release a document that has the holder and the state that were *seen*.

    If *exact*, the version must match as well.
    """
    fields, version = rules.fields, seen.version
    same = [_is(fields.holder, seen.holder), _is(fields.state, seen.work)]
    if exact or not version:
        same.append({"$eq": [version_of(fields.version), literal(version)]})
    values = releasing(rules, seen.failed, token_of(writer, version + 1))
    return Statement(
        fields.key, seen.id, {"$and": [is_whole(fields), condition, *same]}, raising(fields, version, values)
    )


#: The names of errors for which the server sends none.
_NAMES: Final = {11000: "DuplicateKey", 121: "DocumentValidationFailure", 28: "PathNotViable"}


class Refusal(str):
    """The reason why MongoDB does not write a document, for people.

    The causes are its validator, a unique index, or a path of the changes through a value without fields.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of several statements, with the number that found their document, and the refusals."""

    matched: int
    refused: dict[Any, Refusal]


def refusal_of(error: OperationFailure) -> Refusal | None:
    """Return the refusal that concerns one document. Return None for any other error."""
    if error.code is None or not is_refusal(error):
        return None
    name = (error.details or {}).get("codeName") or _NAMES.get(error.code, "not written")
    return Refusal(f"MongoDB refused it (code {error.code}, {name})")


def write_one(statement: Statement) -> Command:
    """Make the command that updates a document and returns the new document.

    The command returns None if the statement does not find the document, and a `Refusal` if MongoDB refuses the write.
    """

    def command(collection: Collection[Document]) -> Document | Refusal | None:
        after = ReturnDocument.AFTER
        try:
            return collection.find_one_and_update(statement.query, statement.update, return_document=after)
        except OperationFailure as error:
            if (refusal := refusal_of(error)) is None:
                raise
            return refusal

    return command


def delete_one(statement: Statement) -> Command:
    """Make the command that deletes a document and returns the old document.

    The command returns None if the statement does not find the document.
    """
    return lambda collection: collection.find_one_and_delete(statement.query)


def write_many(statements: Sequence[Statement]) -> Command:
    """Make the command that updates many documents, each by its own statement. A refused one stops no other."""

    def command(collection: Collection[Document]) -> Written:
        updates = [UpdateOne(each.query, each.update) for each in statements]
        try:
            return Written(collection.bulk_write(updates, ordered=False).matched_count, {})
        except BulkWriteError as error:
            return _read(error, statements)

    return command


def _read(error: BulkWriteError, statements: Sequence[Statement]) -> Written:
    """Return the refusals that concern documents. Raises the driver's error for anything else."""
    details = error.details or {}
    refused: dict[Any, Refusal] = {}
    for each in details.get("writeErrors", ()):
        single = OperationFailure(each.get("errmsg", ""), each.get("code"), each)
        if (refusal := refusal_of(single)) is None:
            raise single from error
        refused[statements[each["index"]].id] = refusal
    for each in details.get("writeConcernErrors", ()):
        raise WriteConcernError(each.get("errmsg", ""), each.get("code"), each) from error
    return Written(details.get("nMatched", 0), refused)


def read_some(fields: Fields, ids: Sequence[Any]) -> Command:
    """Make the command that reads documents by their ids, as far as their locks need it."""

    def command(collection: Collection[Document]) -> dict[Any, Document]:
        return by_id(fields, collection.find({fields.key: {"$in": list(ids)}}, fields.projection()))

    return command


def by_id(fields: Fields, found: Iterable[Document]) -> dict[Any, Document]:
    """Return documents by their ids in the form of `check_id`.

    A client may be configured to return moments with a zone.
    """
    return {check_id(document[fields.key]): document for document in found}


def read_one(fields: Fields, id_: Any) -> Command:
    """Make the command that reads a document, or returns None if there is none."""
    return lambda collection: collection.find_one({fields.key: {"$eq": id_}})
