"""Writes to documents with the fencing token of a named lock. The document itself refuses an older token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from bson import Int64
from pymongo.collection import Collection

from django_mongolock import fencing
from django_mongolock.exceptions import DocumentDamaged, StaleToken
from django_mongolock.fencing import _writer, fenced_update
from testproject.shop.models import Ad
from tests.documents.conftest import Document, Ground
from tests.documents.models import EmbeddingAdvert
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO


@pytest.fixture
def write(do: Callable[..., Any]) -> Callable[..., Any]:
    """Both faces."""
    return partial(do, fencing, "fenced_update")


@pytest.mark.parametrize("field", ["fencing_token", "lock.token"])
def test_older_is_refused(collection: Collection[Document], write: Callable[..., Any], field: str) -> None:
    """The first token is taken, and the same one and a later one write again. An older one changes nothing."""
    collection.insert_one({"_id": 1, "price": 1})
    for token, price in ((5, 2), (5, 3), (8, 4)):
        assert write(collection, token, {"price": price, "title": "$price"}, filter={"_id": 1}, field=field) == 1
        assert [found["price"] for found in collection.find()] == [price]
    before = collection.find_one()
    with pytest.raises(StaleToken) as caught:
        write(collection, 7, filter={"_id": 1}, field=field, price=9)
    assert (caught.value.token, caught.value.newest, caught.value.field) == (7, 8, field)
    assert caught.value.where == f"{collection.full_name} 1"
    assert collection.find_one() == before
    assert before is not None
    assert before["title"] == "$price"


def test_model(write: Callable[..., Any]) -> None:
    """The filter has values of fields. The model needs no field for the token, and saving it leaves the token alone."""
    ad = Ad.objects.create(user_id="7", title="x", price=1)
    assert write(Ad, 5, {"price": "2", "opted_in": False}, filter={"pk": ad.pk, "user_id": 7}) == 1
    after = Ad.objects.get()
    assert (after.pk, after.price, after.opted_in) == (ad.pk, 2, False)
    after.save()
    with pytest.raises(StaleToken, match=f"in shop.Ad {ad.pk!r}".replace("(", r"\(").replace(")", r"\)")):
        write(Ad, 4, {"price": 3}, filter={"pk": str(ad.pk)})
    for wrong in ({"prize": 3}, {"price__gt": 3}):
        with pytest.raises(ValueError, match="no field"):
            write(Ad, 6, wrong, filter={"pk": ad.pk})
        with pytest.raises(ValueError, match="no field"):
            write(Ad, 6, {"price": 3}, filter=wrong)
    assert Ad.objects.get().price == 2


def test_several_documents(collection: Collection[Document], write: Callable[..., Any]) -> None:
    """Documents with an older token are written. Other documents make the update an error."""
    collection.insert_many([{"_id": 1, "fencing_token": 7}, {"_id": 2, "fencing_token": None}, {"_id": 3, "other": 1}])
    with pytest.raises(StaleToken):
        write(collection, 5, filter={"other": {"$exists": False}}, price=9)
    tokens = {found["_id"]: found.get("fencing_token") for found in collection.find()}
    assert tokens == {1: 7, 2: 5, 3: None}
    assert write(collection, 8, filter={}) == 3


@pytest.mark.parametrize("found", ["5", 5.0, True, [5], {"a": 1}, Int64(2**63 - 1)], ids=str)
def test_damaged(collection: Collection[Document], found: Any) -> None:
    """A token that cannot be compared refuses every write."""
    collection.insert_one({"_id": 1, "fencing_token": found})
    with pytest.raises(DocumentDamaged, match="fencing_token"):
        fenced_update(collection, 2**40, {"price": 1}, filter={"_id": 1})
    assert collection.find_one() == {"_id": 1, "fencing_token": found}


def test_a_filter_inside_of_a_field(make: Callable[..., Ground]) -> None:
    """A path leads into an embedded model, as it does in the changes. No document is made."""
    ground = make(EmbeddingAdvert)
    ground.add(1, settings={"in": True})
    for wanted, written in ((True, 1), (False, 0)):
        assert fenced_update(EmbeddingAdvert, 5, filter={"settings.in": wanted}, using="mongo") == written


@pytest.mark.parametrize(
    ("token", "changes", "which", "problem"),
    [
        ("5", {}, {"_id": 1}, "token is a lock or its fencing_token, not str"),
        (True, {}, {"_id": 1}, "token is a lock or its fencing_token, not bool"),
        (5, {}, None, "name the documents"),
        (5, {}, 1, "name the documents"),
        (5, {"fencing_token": 6}, {"_id": 1}, "lock's own"),
        (5, {"_id": 6}, {"_id": 1}, "not _id"),
    ],
)
def test_wrong_calls(collection: Collection[Document], token: Any, changes: Any, which: Any, problem: str) -> None:
    """A wrong call is an error before any command."""
    with pytest.raises((TypeError, ValueError), match=problem):
        fenced_update(collection, token, changes, filter=which)


@pytest.mark.parametrize("place", [1, 2])
def test_two_writes_at_once(plain: Ground, strike: Callable[..., Any], place: int) -> None:
    """Another thread writes with the same token before this write, or before its look at newer ones. Both writes are
    done."""
    id_, ads = plain.add(1), plain.collection
    strike(plain, before=lambda number: number == place and fenced_update(ads, 5, {"title": "x"}, filter={"_id": id_}))
    assert fenced_update(ads, 5, {"price": 2}, filter={"_id": id_}) == 1
    assert plain.read(id_, "price", "title") == (2, "x")


def test_a_late_copy(plain: Ground, strike: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """F87: A late copy of an earlier write of the same holder does not revert the newer one."""
    id_, ads, sent = plain.add(1), plain.collection, strike(plain)
    for price in (2, 3):
        assert fenced_update(ads, 5, {"price": price}, filter={"_id": id_}) == 1
    assert (sent[0](), plain.read(id_, "price")) == (0, 3)
    monkeypatch.setattr(_writer, "_made", None)  # as in another process that was given the token
    assert fenced_update(ads, 5, {"price": 4}, filter={"_id": id_}) == 1


def test_a_lost_answer(plain: Ground, strike: Callable[..., Any]) -> None:
    """A written document counts, even if the filter does not find it any more."""
    plain.add(1, price=1)
    strike(plain, 1)
    assert fenced_update(plain.collection, 5, {"price": 2}, filter={"price": 1}) == 1
