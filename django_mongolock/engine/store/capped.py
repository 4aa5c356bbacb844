"""Collections of a fixed size, in which new documents push out the oldest."""

from __future__ import annotations

from typing import Any

from pymongo import CursorType
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

Document = dict[str, Any]

_EXISTS, _UNAUTHORIZED = 48, 13


def make_capped(collection: Collection[Document], size: int, *, resize: bool = False) -> None:
    """Make the collection of *size* bytes, if it is missing. resize: if it is not missing, give it that size.

    Raises OperationFailure if it is missing and may not be made, or has no limit to its size: then it would grow for
    ever.
    """
    database, name = collection.database, collection.name
    try:
        database.create_collection(name, check_exists=False, capped=True, size=size)
    except OperationFailure as error:
        if error.code == _UNAUTHORIZED and not exists(collection):
            raise
        if error.code not in (_EXISTS, _UNAUTHORIZED) or stays_open(collection) is None:
            raise
        if resize:
            database.command("collMod", name, cappedSize=size)


def exists(collection: Collection[Document]) -> bool:
    """Return whether the collection exists. Needs no right but one to something in it."""
    mine = {"name": collection.name}
    return bool(collection.database.list_collection_names(filter=mine, authorizedCollections=True))


def stays_open(collection: Collection[Document]) -> bool | None:
    """Return whether a cursor stays open at the end of the collection: not if it is empty, or not there; None if it is
    not capped. Needs no right but find."""
    try:
        with collection.find({"_id": None}, cursor_type=CursorType.TAILABLE) as cursor:
            next(cursor, None)
            return cursor.alive
    except OperationFailure:
        return None
