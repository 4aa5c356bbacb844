"""Writes that carry the fencing token of a named lock: the document refuses a token that is older than its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pymongo import ReturnDocument
from pymongo.collection import Collection

from ..conf import get_settings
from ..exceptions import DocumentDamaged, DocumentNotFound, FencedOff
from . import updates
from .rules import LAST_VERSION, check_changes, check_path, check_version
from .sender import Sender
from .source import Place, Source, make_source
from .steps import Steps, get_path, send
from .updates import Document

FIELD: Final = "fencingToken"


def fenced_write(
    place: Place,
    document: Any,
    token: int,
    changes: Mapping[str, Any],
    *,
    field: str = FIELD,
    using: str | None = None,
) -> Any:
    """Write *changes* to a document, unless a later holder of the lock has written to it before; return it as it is
    then: an instance of the model, or the document.

    place: a model on MongoDB, a PyMongo collection, or a function that returns one. document: an instance, a document
    or an id. token: `MongoLock.fencing_token`. field: the field that keeps the latest token; a model need not have it.
    A token that was there before may write again. The write is one update, acknowledged by the majority.

    Raises FencedOff, DocumentNotFound, DocumentDamaged, LockBackendFailed. Only writes that go this way are fenced.
    """
    sender, steps = _prepare(make_source(place, using), document, token, changes, field)
    return sender.run(steps)


async def afenced_write(
    place: Place,
    document: Any,
    token: int,
    changes: Mapping[str, Any],
    *,
    field: str = FIELD,
    using: str | None = None,
) -> Any:
    """See fenced_write()."""
    sender, steps = _prepare(make_source(place, using), document, token, changes, field)
    return await sender.arun(steps)


def _prepare(
    source: Source, document: Any, token: int, changes: Mapping[str, Any], field: str
) -> tuple[Sender, Steps[Any]]:
    column = check_path("the field of the token", source.column(field, must_exist=False))
    made = check_changes(source.changes(changes), [column])
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"token is a lock's fencing_token, a whole number, not {type(token).__name__}")
    sender = Sender(source.collection(), get_settings().COMMAND_TIMEOUT)
    return sender, _write(source, source.key(document), check_version(token), column, made)


def _write(source: Source, id_: Any, token: int, column: str, changes: Mapping[str, Any]) -> Steps[Any]:
    query = {"_id": {"$eq": id_}, "$expr": updates.may_write(column, token)}
    update = [{"$set": {**updates.literals(changes), column: updates.literal(token)}}]

    def write(collection: Collection[Document]) -> Any:
        return collection.find_one_and_update(query, update, return_document=ReturnDocument.AFTER)

    def look(collection: Collection[Document]) -> Any:
        return collection.find_one({"_id": {"$eq": id_}}, {column: 1})

    # Sent again after a lost answer, it writes the same once more, or is refused since somebody came later.
    document = yield from send(write)
    if document is not None:
        return source.instance(document)
    found = yield from send(look)
    if found is None:
        raise DocumentNotFound(source.name, id_)
    latest = get_path(found, column)
    if isinstance(latest, bool) or not isinstance(latest, int) or latest >= LAST_VERSION:
        raise DocumentDamaged(source.name, id_, f"its field {column!r} is {type(latest).__name__}, not a token")
    raise FencedOff(source.name, id_, token, latest)
