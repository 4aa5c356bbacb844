"""Writes with the fencing token of a named lock: an older one is refused by the document itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from bson import Int64, ObjectId
from pymongo.collection import Collection

from django_mongolock import (
    DocumentDamaged,
    DocumentNotFound,
    FencedOff,
    afenced_write,
    fenced_write,
    mongo_lock,
)
from testproject.shop.models import Ad
from tests.documents.conftest import Document
from tests.lock_fixtures import WITH_MONGO
from tests.looking import new_key

pytestmark = WITH_MONGO


def awaited(*arguments: Any, **options: Any) -> Any:
    return asyncio.run(afenced_write(*arguments, **options))


@pytest.fixture(params=[fenced_write, awaited])
def write(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Both faces."""
    face: Callable[..., Any] = request.param
    return face


@pytest.mark.parametrize("field", ["fencingToken", "lock.token"])
def test_older_is_refused(collection: Collection[Document], write: Callable[..., Any], field: str) -> None:
    """The first token is taken, the same one writes again, a later one too; an older one changes nothing."""
    collection.insert_one({"_id": 1, "price": 1})
    for token, price in ((5, 2), (5, 3), (8, 4)):
        assert write(collection, 1, token, {"price": price, "title": "$price"}, field=field)["price"] == price
    before = collection.find_one()
    with pytest.raises(FencedOff) as caught:
        write(collection, 1, 7, {"price": 9}, field=field)
    assert (caught.value.token, caught.value.newest) == (7, 8)
    assert collection.find_one() == before
    assert before is not None
    assert before["title"] == "$price"


def test_model(write: Callable[..., Any]) -> None:
    """An instance comes back; the model needs no field for the token, and saving it leaves the token alone."""
    ad = Ad.objects.create(user_id="7", title="x", price=1)
    after = write(Ad, ad, 5, {"price": "2", "opted_in": False})
    assert (after.pk, after.price, after.opted_in) == (ad.pk, 2, False)
    after.save()
    with pytest.raises(FencedOff):
        write(Ad, str(ad.pk), 4, {"price": 3})
    with pytest.raises(ValueError, match="no field"):
        write(Ad, ad, 6, {"prize": 3})
    assert Ad.objects.get().price == 2


def test_former_holder(collection: Collection[Document]) -> None:
    """The story it is for: a holder that was paused past its lease writes after the next one."""
    collection.insert_one({"_id": 1, "price": 1})
    key = new_key()
    with mongo_lock(key) as former:
        token = former.fencing_token
    with mongo_lock(key) as lock:
        latest = lock.fencing_token
        fenced_write(collection, 1, latest, {"price": 2})
    with pytest.raises(FencedOff):
        fenced_write(collection, 1, token, {"price": 3})
    assert collection.find_one() == {"_id": 1, "price": 2, "fencingToken": latest}


def test_no_such_document(collection: Collection[Document]) -> None:
    """None is made."""
    with pytest.raises(DocumentNotFound):
        fenced_write(collection, ObjectId(), 5, {"price": 1})
    assert collection.find_one() is None


@pytest.mark.parametrize("found", ["5", 5.0, True, [5], {"a": 1}, Int64(2**63 - 1)], ids=str)
def test_damaged(collection: Collection[Document], found: Any) -> None:
    """A token that cannot be compared refuses every write."""
    collection.insert_one({"_id": 1, "fencingToken": found})
    with pytest.raises(DocumentDamaged, match="fencingToken"):
        fenced_write(collection, 1, 2**40, {"price": 1})
    assert collection.find_one() == {"_id": 1, "fencingToken": found}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((1, "5", {}), "whole number"),
        ((1, True, {}), "whole number"),
        ((None, 5, {}), "without an id"),
        ((1, 5, {"fencingToken": 6}), "lock's own"),
        ((1, 5, {"_id": 6}), "not _id"),
    ],
)
def test_wrong_calls(collection: Collection[Document], arguments: tuple[Any, ...], problem: str) -> None:
    """Told before anything is sent."""
    with pytest.raises((TypeError, ValueError), match=problem):
        fenced_write(collection, *arguments)
