"""Versions in collections of PyMongo: read, decide, and write if the version is still the one that was read."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import bson
from asgiref.sync import iscoroutinefunction, sync_to_async
from pymongo import ReadPreference, ReturnDocument, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection

from ..engine.runner import arun, run
from ..exceptions import VersionConflict
from .checking import counted
from .retry import ATTEMPTS, BACKOFF, LONGEST, Retrying

Document: TypeAlias = dict[str, Any]
Changes: TypeAlias = Mapping[str, Any]
Change: TypeAlias = Changes | Callable[[Document], Changes | None]
AsyncChange: TypeAlias = Change | Callable[[Document], Awaitable[Changes | None]]


def versioned_update(
    collection: Collection[Document],
    document_id: Any,
    change: Change,
    *,
    version_field: str = "version",
    attempts: int = ATTEMPTS,
    backoff: float = BACKOFF,
    longest: float = LONGEST,
) -> Document:
    """Change the document, raise its version, and return it as it is then.

    change: fields to set, or update operators; or a function that gets the document and returns such a mapping, or
    changes the document itself (fields that it takes out are removed). If another writer is faster, the document is
    read and the function called again; if it changes nothing, nothing is written. A document without the version
    field counts as version 0.

    Raises LookupError if there is no such document, and VersionConflict after the last of the *attempts*; see
    `retry_on_conflict` for *backoff* and *longest*. It is not part of any transaction.
    """
    _check(collection, Collection)
    if iscoroutinefunction(change):
        raise TypeError("change is a coroutine function: await aversioned_update() instead of versioned_update()")
    collection = _confirming(collection)
    for attempt in Retrying(attempts, backoff, longest, aliases=()):
        with attempt:
            return run(_update(collection, document_id, change, version_field), _call)
    raise AssertionError("the last attempt returns or raises")


async def aversioned_update(
    collection: AsyncCollection[Document] | Collection[Document],
    document_id: Any,
    change: AsyncChange,
    *,
    version_field: str = "version",
    attempts: int = ATTEMPTS,
    backoff: float = BACKOFF,
    longest: float = LONGEST,
) -> Document:
    """See versioned_update(). The change may be a coroutine function; a collection that blocks is used in a thread."""
    _check(collection, Collection, AsyncCollection)
    collection = _confirming(collection)
    async for attempt in Retrying(attempts, backoff, longest, aliases=()):
        with attempt:
            return await arun(_update(collection, document_id, change, version_field), _acall)
    raise AssertionError("the last attempt returns or raises")


def _confirming(collection: Any) -> Any:
    """Return the collection with reads that are not older than the last write, and writes that have a reply."""
    concern = collection.write_concern if collection.write_concern.acknowledged else WriteConcern(1)
    return collection.with_options(read_preference=ReadPreference.PRIMARY, write_concern=concern)


def _check(collection: object, *kinds: type) -> None:
    if isinstance(collection, kinds):
        return
    if isinstance(collection, AsyncCollection):
        raise TypeError("an AsyncCollection is for aversioned_update(), with await")
    raise TypeError(
        f"versioned_update() takes a collection of PyMongo, not {collection!r}; a model that derives from "
        "VersionedModel is saved under @retry_on_conflict"
    )


#: A method of the collection or the caller's function, with its arguments.
Call: TypeAlias = "partial[Any]"
Calls: TypeAlias = Generator[Call, Any, Document]


def _call(call: Call) -> Any:
    return call()


async def _acall(call: Call) -> Any:
    if isinstance(getattr(call.func, "__self__", None), Collection):
        return await sync_to_async(call, thread_sensitive=False)()
    outcome = call()
    return await outcome if inspect.isawaitable(outcome) else outcome


def _update(collection: Any, key: Any, change: AsyncChange, field: str) -> Calls:
    """Make one attempt: read, call *change*, write."""
    if not field or "." in field or field.startswith("$") or field == "_id":
        raise ValueError(f"version_field must name a field at the top of the document, not {field!r}")
    read = partial(collection.find_one, {"_id": {"$eq": key}})
    write = partial(collection.find_one_and_update, return_document=ReturnDocument.AFTER)
    if isinstance(change, Mapping):
        operators = _operators(change, field, {})
        operators["$inc"] = {**operators.get("$inc", {}), field: 1}
        document = yield partial(write, {"_id": {"$eq": key}}, operators)
        return _found(document, key, collection)
    if not callable(change):
        raise TypeError(f"change must be a mapping, or a function of the document, not {change!r}")
    before = _found((yield read), key, collection)
    version = _version(before, field)
    mine = copy.deepcopy(before)
    changes = yield partial(change, mine)
    if changes is None or changes is mine:
        operators = _difference(before, mine, field, collection.codec_options)
    else:
        operators = _operators(changes, field, before)
    if not operators:
        return before
    operators["$set"] = {**operators.get("$set", {}), field: version + 1}
    same = {"_id": {"$eq": key}, field: before.get(field)}  # null finds a missing field as well
    after: Document | None = yield partial(write, same, operators)
    if after is None:
        stored = yield read
        conflict = VersionConflict(collection.full_name, key, version, problem="it was deleted meanwhile")
        raise counted(_conflict(conflict, stored, operators["$set"], field) if stored else conflict)
    return after


def _found(document: Document | None, key: Any, collection: Any) -> Document:
    if document is None:
        raise LookupError(f"there is no document {key!r} in {collection.full_name}")
    return document


def _version(document: Document, field: str) -> int:
    version = 0 if document.get(field) is None else document[field]
    if isinstance(version, int | float) and version == int(version) and version is not True:
        return int(version)
    raise ValueError(f"{field!r} of document {document['_id']!r} is {version!r}, not a version: name another field")


def _operators(changes: Changes, field: str, before: Document) -> dict[str, Any]:
    """Return the update operators of a mapping that has operators, or fields to set.

    The fields may include the id and the version as they were.
    """
    if not isinstance(changes, Mapping):
        raise TypeError(f"a change is a mapping of fields, or of update operators, not {changes!r}")
    operators = {name for name in changes if str(name).startswith("$")}
    if operators and len(operators) < len(changes):
        raise ValueError(f"fields and update operators are mixed: {', '.join(map(str, changes))}")
    kept = {name: value for name, value in changes.items() if name not in ("_id", field) or before.get(name) != value}
    if not operators:
        _refuse_paths(kept.keys() & before.keys())
    made = dict(changes) if operators else {"$set": kept} if kept else {}
    for name in (name for body in made.values() if isinstance(body, Mapping) for name in body):
        if str(name).partition(".")[0] in ("_id", field):
            raise ValueError(f"{name!r} cannot be changed: the version is raised by itself, and the id stays")
    return made


def _difference(before: Document, after: Document, field: str, codec: Any) -> dict[str, Any]:
    """Return the update from *before* to *after*, compared as they are stored, where 1, 1.0 and true differ."""

    def stored(document: Document, name: str) -> bytes | None:
        return bson.encode({"": document[name]}, codec_options=codec) if name in document else None

    names = [name for name in {**before, **after} if stored(before, name) != stored(after, name)]
    _refuse_paths(names)
    changed = {name: after[name] for name in names if name in after}
    removed = {name: "" for name in names if name not in after}
    made = {"$set": changed, "$unset": removed}
    return {name: body for name, body in made.items() if _operators({name: body}, field, {}) and body}


def _refuse_paths(names: Iterable[str]) -> None:
    """Raise ValueError for fields of a document that an update would take for something else."""
    for name in names:
        if not name or "." in name or name.startswith("$"):
            raise ValueError(f"the field {name!r} cannot be changed: in an update, this is not the name of a field")


def _conflict(gone: VersionConflict, stored: Document, written: Document, field: str) -> VersionConflict:
    pairs = {name: (mine, stored.get(name)) for name, mine in written.items() if name != field}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return VersionConflict(gone.what, gone.pk, gone.read, stored.get(field), changed)
