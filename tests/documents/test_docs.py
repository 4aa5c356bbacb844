"""The pages of the documentation run, in the order in which they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.db import connections
from django.test.utils import isolate_apps
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.documents.document_lock import declare as declare_again
from django_mongolock.documents.document_lock import undeclare
from testproject.shop.models import Ad, ad_exports
from tests.documents.conftest import Document
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_commands import run

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("forget")]
DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def documents(db: None, mongo: MongoClient[Document]) -> Collection[Document]:
    """The collection of the model."""
    return mongo[str(connections["mongo"].settings_dict["NAME"])]["shop_ad"]


def test_document_locks(capsys: pytest.CaptureFixture[str], documents: Collection[Document]) -> None:
    """The story, as it is told."""
    ads = [Ad.objects.create(user_id="7", title=f"ad {number}", price=5) for number in range(2)]
    told: list[tuple[str, str, int]] = []
    names: dict[str, Any] = {
        "Ad": Ad,
        "ad_id": ads[0].pk,
        "admin": admin,
        "export": lambda ad, version: told.append(("export", str(ad.pk), version)),
        "withdraw": lambda ad: told.append(("withdraw", str(ad.pk), ad.document_version)),
    }
    _, _, declare, one, refused, waiting, many, retry, in_admin = blocks("howto/document-locks.md")

    undeclare(ad_exports)
    exec(declare, names)  # noqa: S102
    exec(one, names)  # noqa: S102
    assert told == [("export", str(ads[0].pk), 2)]
    ads[0].refresh_from_db()
    assert (ads[0].export_status, ads[0].price, ads[0].locked_by) == ("exported", 7, None)

    exec(refused, names)  # noqa: S102
    assert "it has version 3" in capsys.readouterr().out

    exec(waiting, names)  # noqa: S102
    assert told.pop() == ("withdraw", str(ads[0].pk), 4)

    lock = names["ad_exports"]
    held = lock.acquire(ads[1], "exporting", owner="dead")
    exec(many, names)  # noqa: S102
    assert told[1:] == [("withdraw", str(ads[0].pk), 6)]
    assert f"{ads[1].pk} was left: " in capsys.readouterr().out

    stale = [{"$set": {"lockTimestamp": {"$subtract": ["$$NOW", 400_000]}}}]
    documents.update_one({"_id": held.id}, stale)
    exec(retry, names)  # noqa: S102
    assert f"{held.id} was held by dead for" in capsys.readouterr().out
    assert told[2:] == [("export", str(ads[1].pk), 4)]

    held = lock.acquire(Ad.objects.get(pk=held.id), "exporting")
    documents.update_one({"_id": held.id}, stale)
    out, _ = run("clear_stale_locks", "--no-input", "--document-lock", "exports")
    assert out.strip() == "Cleared 1 of 1 stale documents of exports."
    assert out.strip() in (DOCS / "howto/document-locks.md").read_text()

    exec(in_admin, names)  # noqa: S102
    undeclare(lock)
    declare_again(ad_exports)
    assert "clear_stale_documents" in names["AdAdmin"](Ad, admin.site).actions


@isolate_apps("testproject.shop")
def test_a_whole_model(mongo: MongoClient[Document]) -> None:
    """The model of the page can be locked, also documents from before it had a version; or those are given one."""
    _, model, declare, *_ = blocks("howto/document-locks.md")
    names: dict[str, Any] = {"__name__": "testproject.shop.docs"}
    exec(model, names)  # noqa: S102
    exec(declare.replace("    Ad,\n", '    Ad,\n    using="mongo",\n'), names)  # noqa: S102
    lock, found = names["ad_exports"], names["Ad"].objects.using("mongo")
    collection = mongo[str(connections["mongo"].settings_dict["NAME"])][found.model._meta.db_table]
    try:
        found.create(user_id="7", title="new", price=5)
        collection.insert_one({"userId": "7", "title": "old", "price": 5, "optedIn": True, "exportStatus": "new"})
        with lock.hold(found.get(title="new"), "exporting", final="exported") as held:
            assert held.version == 2
        with lock.hold(found.get(title="old"), "exporting", final="exported") as held:
            assert held.version == 1
        assert {ad.export_status for ad in found.all()} == {"exported"}
    finally:
        collection.delete_many({})


def test_which_lock() -> None:
    """The fenced update."""
    ad = Ad.objects.create(user_id="7", title="x", price=5)
    names: dict[str, Any] = {"Ad": Ad, "ad": ad}
    (fenced,) = blocks("explanation/which-lock.md")
    exec(fenced, names)  # noqa: S102
    assert Ad.objects.get().price == 7
