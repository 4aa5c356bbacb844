"""The commands of document locks, as functions of the collection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pymongo import ReturnDocument, UpdateOne
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure, WriteConcernError

from ..backends.courier import Command
from ..backends.field_paths import Document
from ..engine.store.errors import is_refusal
from .rules import Fields
from .updates import Statement

_NAMES: Final = {11000: "DuplicateKey", 121: "DocumentValidationFailure", 28: "PathNotViable"}


class Refusal(str):
    """MongoDB does not write this document: its validator, a unique index, or a path of the changes that leads through
    a value without fields. For people."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What came of several statements: how many found their document, and which were refused."""

    matched: int
    refused: dict[Any, Refusal]


def refusal_of(error: OperationFailure) -> Refusal | None:
    """Return what the server refused about one document; None for an error about anything else."""
    if error.code is None or not is_refusal(error):
        return None
    name = (error.details or {}).get("codeName") or _NAMES.get(error.code, "not written")
    return Refusal(f"MongoDB refused it (code {error.code}, {name})")


def write_one(statement: Statement) -> Command:
    """Make the command that updates a document, and returns it as it is then; None if the statement does not find it;
    or a `Refusal`."""

    def command(collection: Collection[Document]) -> Document | Refusal | None:
        after = ReturnDocument.AFTER
        try:
            return collection.find_one_and_update(statement.query, statement.update, return_document=after)
        except OperationFailure as error:
            if (refusal := refusal_of(error)) is None:
                raise
            return refusal

    return command


def write_many(statements: Sequence[Statement]) -> Command:
    """Make the command that updates many documents, each by its own statement: one that is refused stops no other."""

    def command(collection: Collection[Document]) -> Written:
        if not statements:
            return Written(0, {})
        updates = [UpdateOne(each.query, each.update) for each in statements]
        try:
            return Written(collection.bulk_write(updates, ordered=False).matched_count, {})
        except BulkWriteError as error:
            return _read(error, statements)

    return command


def _read(error: BulkWriteError, statements: Sequence[Statement]) -> Written:
    """Return what was refused about documents. Raises the driver's error for anything else."""
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


def read_some(fields: Fields, ids: Sequence[Any], *, whole: bool = False) -> Command:
    """Make the command that reads documents by their ids, as far as their locks need it, or whole."""
    projection = None if whole else fields.projection()

    def command(collection: Collection[Document]) -> dict[Any, Document]:
        found = collection.find({fields.key: {"$in": list(ids)}}, projection)
        return {document[fields.key]: document for document in found}

    return command


def read_one(fields: Fields, id_: Any) -> Command:
    """Make the command that reads a document; None if there is none."""
    return lambda collection: collection.find_one({fields.key: {"$eq": id_}})
