"""Declarations of document locks, and the search for them by name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from django.apps.registry import Apps
from django.db import models
from pymongo import AsyncMongoClient
from pymongo.collection import Collection
from pymongo.errors import ConfigurationError
from pytest_django import Settings

from django_mongolock import LockBackendFailed
from django_mongolock.documents import DocumentLock, declared
from django_mongolock.documents.kind import check_document_places
from django_mongolock.inspection.kinds import find_kind
from django_mongolock.management.checks import check_apps
from testproject.shop.models import Ad, ad_exports
from tests.documents.conftest import FINAL, PENDING, Document, Ground
from tests.documents.models import Advert, LongAdvert, Proxied
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("forget")]
META = {"app_label": "documents", "apps": Apps()}
RIGHT: dict[str, Any] = {"state": "exportStatus", "pending": PENDING, "final": FINAL, "stale_after": 60}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"pending": {}}, "each pending state and its failed state"),
        ({"pending": ["exporting"]}, "each pending state and its failed state"),
        ({"pending": {"": "failed"}}, "must not be empty"),
        ({"pending": {"exporting": None}}, "a state is text"),
        ({"pending": {"exporting": "exporting"}}, "is a pending state"),
        ({"final": []}, "a list of states"),
        ({"final": "exported"}, "a list of states"),
        ({"final": ["exporting"]}, "is a pending state"),
        ({"stale_after": 0}, "stale_after must be more than 0"),
        ({"stale_after": "60"}, "a number of seconds"),
        ({"state": ""}, "cannot be ''"),
        ({"state": "$state"}, "cannot be"),
        ({"state": "a..b"}, "cannot be"),
        ({"version": "_id"}, "cannot be '_id'"),
        ({"holder": 5}, "must be a str"),
        ({"holder": "exportStatus"}, "the same place"),
        ({"holder": "lock", "time": "lock.at"}, "the same place"),
        ({"using": "mongo"}, "a collection has its own"),
    ],
)
def test_wrong(collection: Collection[Document], wrong: dict[str, Any], problem: str) -> None:
    """A wrong declaration is reported at once, with the rule."""
    with pytest.raises((TypeError, ValueError), match=problem):
        DocumentLock[Document](collection, **{**RIGHT, **wrong})
    assert list(declared()) == [ad_exports]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"holder": "locked_buy"}, r"shop\.Ad has no field 'locked_buy': it has body, deleted.*: holder="),
        ({"version": "price"}, "make it a VersionField"),
        ({}, "share"),
    ],
)
def test_wrong_model(wrong: dict[str, Any], problem: str) -> None:
    """A typing error in a field or a state is found at once. Unsuitable fields are found, too (F135)."""
    with pytest.raises((TypeError, ValueError), match=problem):
        DocumentLock(Ad, **{**RIGHT, "name": "test", **wrong})


def test_wrong_places(mongo_uri: str) -> None:
    """Places that cannot hold documents."""

    class Abstract(models.Model):
        class Meta:
            abstract = True

    async def refuse_async() -> None:
        async with AsyncMongoClient[Document](mongo_uri) as client:
            with pytest.raises(TypeError, match="in threads"):
                DocumentLock(client["x"]["y"], **RIGHT)

    asyncio.run(refuse_async())

    child: Any = type("Child", (Proxied,), {"__module__": "shop", "Meta": type("", (), META)})
    proxy: Any = type("Proxy", (child,), {"__module__": "shop", "Meta": type("", (), {**META, "proxy": True})})
    for model in (Abstract, child, proxy):
        with pytest.raises(TypeError, match="one collection of its own"):
            DocumentLock(model, **RIGHT)
    with pytest.raises(TypeError, match="not str"):
        DocumentLock("shop.Ad", **RIGHT)  # type: ignore[arg-type]


def test_a_model_in_sql() -> None:
    """A model in SQL is found by a check and at the first use, because its place depends on a router."""
    from django.core.exceptions import ImproperlyConfigured

    assert check_document_places(app_configs=None) == []
    roles = {"state": "state", "version": "version", "holder": "holder", "time": "time"}
    lock = DocumentLock(Advert, pending=PENDING, final=FINAL, stale_after=5, name="sql", using="default", **roles)
    with pytest.raises(ImproperlyConfigured, match="is not MongoDB"):
        lock.snapshots()
    (found,) = check_document_places(app_configs=None)
    assert found.id == "mongolock.E016"
    assert "'sql'" in found.msg


def test_names(collection: Collection[Document]) -> None:
    """The default name is made of place and state. A name means one lock."""
    lock = DocumentLock[Document](collection, **RIGHT)
    assert lock.name == f"{collection.full_name}.exportStatus"
    again = DocumentLock[Document](collection, **RIGHT)  # its module was loaded again
    assert find_kind(lock.name).name == again.name
    with pytest.raises(ValueError, match="name="):
        DocumentLock[Document](collection, **{**RIGHT, "stale_after": 5})
    DocumentLock(Advert, **RIGHT, using="mongo", name="ads")
    for model, using in ((Advert, "other"), (LongAdvert, "mongo")):  # it would take the place of the first one
        with pytest.raises(ValueError, match="name="):
            DocumentLock(model, **RIGHT, using=using, name="ads")
    others = {"holder": "by", "version": "v", "time": "at"}
    DocumentLock[Document](collection, **{**RIGHT, "state": "other", **others}, name="another")
    assert [one.name for one in declared()] == sorted(["ad exports", "ads", "another", lock.name])


def test_a_function(collection: Collection[Document]) -> None:
    """The function is called for each use, so that a forked process may have a client of its own."""
    calls: list[int] = []

    def ads() -> Collection[Document]:
        calls.append(os.getpid())
        return collection

    lock = DocumentLock[Document](ads, **RIGHT)
    assert (lock.name, calls) == ("ads.exportStatus", [])
    collection.insert_one({"_id": 1, "documentVersion": 1})
    with lock.hold((1, 1), "exporting", final="exported"):
        pass
    assert len(calls) == 1
    places = [lambda place=place: place for place in (collection, collection.database["other"])]
    DocumentLock[Document](places[0], **RIGHT)
    with pytest.raises(ValueError, match="name="):  # the same code for another collection
        DocumentLock[Document](places[1], **RIGHT)

    def away() -> Collection[Document]:
        raise ConfigurationError("no DNS")  # as MongoClient() does

    place: Any
    for place, error in ((lambda: 5, TypeError), (away, LockBackendFailed)):
        with pytest.raises(error, match=r"returned int|ConfigurationError"):
            DocumentLock[Document](place, **RIGHT, name=error.__name__).snapshots()


def test_another_backend(make: Callable[..., Ground], settings: Settings) -> None:
    """The documents are in MongoDB, wherever the named locks are kept."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "BACKEND": "django_mongolock.testing.memory.MemoryLockBackend"}
    ground = make(Advert)
    with ground.lock.hold((ground.add(1), 1), "exporting", final="exported") as held:
        pass
    assert ground.read(held.id, "state") == "exported"


def test_the_apps_that_are_missing(settings: Settings) -> None:
    """E026: A document lock, a VersionField and an EditLockMixin each name their missing app."""
    from django.contrib import admin

    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if not app.startswith("django_mongolock.")]
    found = [
        *check_apps(app_configs=None),
        *Ad._meta.get_field("document_version").check(),
        *admin.site._registry[Ad].check(),
    ]
    named = [str(message.hint) for message in found if message.id == "mongolock.E026"]
    assert named == [
        f'Put "django_mongolock.{app}" into INSTALLED_APPS.' for app in ("documents", "versions", "editing")
    ]
