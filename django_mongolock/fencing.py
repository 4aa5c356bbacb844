"""Fencing tokens for data that is kept elsewhere. The data remembers the newest token, and refuses older ones.

A lease cannot stop a process that was paused past its end. Later writes of that process carry an old token.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from asgiref.sync import sync_to_async
from django.db import models
from django.db.models import Model, Q, QuerySet
from pymongo.collection import Collection

from .engine.lock.lock import MongoLock
from .engine.session.session import PerProcess
from .exceptions import DocumentDamaged, StaleToken
from .other_collections.courier import Courier, Steps, send
from .other_collections.field_paths import (
    LAST_VERSION,
    Document,
    check_changes,
    check_path,
    check_version,
    get_path,
    has,
    is_type,
    is_version,
    literal,
)
from .other_collections.places import Source, make_source

__all__ = ["FencingTokenField", "afenced_update", "fenced_update"]

Rows: TypeAlias = QuerySet[Any] | models.Manager[Any]
Target: TypeAlias = Rows | type[Model] | Collection[Document] | Callable[[], Collection[Document]]


class FencingTokenField(models.BigIntegerField):  # type: ignore[type-arg]  # its types exist for checkers only
    """The field in which a row keeps the largest fencing token that has written it.

    The default is 0. Forms leave it out.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"default": 0, "editable": False, **options})


def fenced_update(
    target: Target,
    token: int | MongoLock,
    changes: Mapping[str, Any] | None = None,
    /,
    *,
    filter: Mapping[str, Any] | None = None,  # noqa: A002 - as PyMongo calls it
    field: str = "fencing_token",
    using: str | None = None,
    **values: Any,
) -> int:
    """Write *changes* and *values* unless a later holder of the lock has written.

    Return the number of rows or documents.

    - target: queryset of any database, with filters of its own table. With *filter*, a PyMongo collection, a function
      that returns one, or a model on MongoDB.
    - token: lock, or its `fencing_token`.
    - filter: for a collection, a MongoDB filter. For a model, values of its fields, such as ``{"pk": 5}``.
    - field: field that keeps the newest token, set in the same update. Only a queryset needs it as a field of the
      model.
    - using: DATABASES alias of a model.
    - values: further changes. Only for a queryset, these may be expressions.

    Raises StaleToken if a row or document has a newer token. The other rows are written nevertheless, unless the error
    rolls back a transaction. The same token may write again. For documents, DocumentDamaged and LockBackendFailed may
    be raised as well, and written documents are majority-committed. Use the same lock wherever the field is written,
    because tokens of different keys cannot be compared.
    """
    number, made = _number(token), {**(changes or {}), **values}
    if isinstance(target, (QuerySet, models.Manager)):
        return _update_rows(target, number, made, field, (filter, using))
    courier, steps = _plan(target, using, number, made, field, filter)
    return courier.run(steps)


async def afenced_update(
    target: Target,
    token: int | MongoLock,
    changes: Mapping[str, Any] | None = None,
    /,
    *,
    filter: Mapping[str, Any] | None = None,  # noqa: A002
    field: str = "fencing_token",
    using: str | None = None,
    **values: Any,
) -> int:
    """See fenced_update()."""
    number, made = _number(token), {**(changes or {}), **values}
    if isinstance(target, (QuerySet, models.Manager)):
        return await sync_to_async(_update_rows)(target, number, made, field, (filter, using))
    courier, steps = _plan(target, using, number, made, field, filter)
    return await courier.arun(steps)


class _Writer:
    """The write counter of this process. The count identifies a late copy as an older write with the same token."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}.{secrets.token_hex(12)}"
        self.numbers = itertools.count(1)


_writer = PerProcess(_Writer)


def _number(token: object) -> int:
    number = token.fencing_token if isinstance(token, MongoLock) else token
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"token is a lock or its fencing_token, not {type(token).__name__}")
    return check_version(number)


def _update_rows(rows: Rows, token: int, values: dict[str, Any], field: str, given: tuple[object, object]) -> int:
    if given != (None, None):
        raise TypeError("a queryset has its own filter and using(): Order.objects.using(...).filter(pk=order.pk)")
    if field in values:
        raise TypeError(f"{field} is set by fenced_update() itself: pass the token as the second argument")
    rows.model._meta.get_field(field)  # raises FieldDoesNotExist
    chosen: Any = rows.all()
    chosen._for_write = True
    chosen = chosen.using(chosen.db)  # newer tokens are looked for there, too: a replica may not have them yet
    older = chosen.filter(Q(**{f"{field}__lte": token}) | Q(**{f"{field}__isnull": True}))
    if older.query.count_active_tables() > 1 or any(rows.model._meta.parents.values()):
        # Django would look for the rows first, or in a part of the statement that is not checked again after a wait.
        raise TypeError(
            "fenced_update() compares tokens where it writes: in one table. Filter by fields of the row's own, or by "
            "pk__in; a model that inherits from a table has several"
        )
    updated: int = older.update(**values, **{field: token})
    newer = chosen.filter(**{f"{field}__gt": token}).order_by().values_list("pk", field)
    if (found := newer.first()) is not None:
        raise StaleToken(token, found[1], field, f"{rows.model._meta.label} {found[0]!r}")
    return updated


def _plan(  # noqa: PLR0917
    target: object, using: str | None, token: int, changes: dict[str, Any], field: str, given: Mapping[str, Any] | None
) -> tuple[Courier, Steps[int]]:
    if not callable(target):
        raise TypeError(
            "fenced_update() takes a queryset, also for one row: Order.objects.filter(pk=order.pk); or a model or "
            f"collection of MongoDB with filter=. This is a {type(target).__name__}"
        )
    source = make_source(target, using)
    if not isinstance(given, Mapping):
        raise TypeError('name the documents: filter={"_id": 5}; of a model, filter={"pk": 5}; {} for all of them')
    column = check_path("the field of the token", source.column(field, must_exist=False))
    made = check_changes(source.changes(changes), [column, f"{column}_write"])
    return source.courier(), _update_documents(source, source.filter(given), token, column, made)


def _update_documents(
    source: Source, where: Document, token: int, column: str, changes: Mapping[str, Any]
) -> Steps[int]:
    stamp, writer = f"{column}_write", _writer.current()
    number, unanswered = next(writer.numbers), list[BaseException]()
    may_write = _may_write(column, stamp, token, writer.name, number)
    mark = {column: token, stamp: {"by": writer.name, "number": number}}

    def write(collection: Collection[Document]) -> int:
        written = {"$set": {**changes, **mark}}
        return collection.update_many({"$and": [where, {"$expr": may_write}]}, written).matched_count

    def find_newest(collection: Collection[Document]) -> Any:
        refused = {"$and": [where, {"$expr": {"$not": [may_write]}}]}
        return collection.find_one(refused, {column: 1}, sort=[(column, -1)])

    # A repeated write after a lost answer writes the same once more. The repeated write is refused if a later holder
    # has written, or this holder has written again.
    written: int = yield from send(write, unanswered)
    if unanswered:  # a copy may have written documents that the filter does not find any more
        known = {name: where[name] for name in ("_id",) if name in where}  # the `_id` stays, and has an index
        written = yield from send(lambda collection: collection.count_documents({**known, **mark}))
    found = yield from send(find_newest)
    if found is None:
        return written
    newest = get_path(found, column)
    if isinstance(newest, bool) or not isinstance(newest, int) or newest >= LAST_VERSION:
        problem = f"its field {column!r} is {type(newest).__name__}, not a token"
        raise DocumentDamaged(source.name, found["_id"], problem)
    if newest != token:
        raise StaleToken(token, newest, column, f"{source.name} {found['_id']!r}")
    # Another thread or task has written meanwhile with the same token, after this write or before it.
    return written or (yield from _update_documents(source, where, token, column, changes))


def _may_write(field_of_token: str, field_of_write: str, token: int, writer: str, number: int) -> Document:
    """Return the condition that the document has no later token, and no value that is no token.

    With the same token, the same *writer* must not have written later. The writer counts its writes.
    """
    name, stamp = field_of_token, field_of_write
    older = {"$lt": [f"${name}", literal(token)]}
    later_write = {"$and": [has(f"{stamp}.by", [writer]), {"$gt": [f"${stamp}.number", literal(number)]}]}
    same = {"$and": [{"$eq": [f"${name}", literal(token)]}, {"$not": [later_write]}]}
    not_later = {"$and": [is_version(name), {"$or": [older, same]}]}
    return {"$or": [is_type(name, "null", "missing"), not_later]}
