"""The examples in the pages on cron, fencing, looking, models of one's own and running are run."""

# ruff: noqa: S102 - what is executed are our own pages

from __future__ import annotations

import io
import os
import re
import sys
import types
import uuid
from contextlib import redirect_stdout
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.utils import ConnectionRouter
from django.test.utils import isolate_apps
from django.utils.module_loading import import_string
from pytest_django import Settings

from django_mongolock import (
    MongoLock,
    StaleToken,
    fenced_update,
    lock_key,
    mongo_lock,
    mongo_semaphore,
)
from django_mongolock.conf import LockSettings, find_wrong
from testproject.shop.models import Ad, Order, ad_exports
from tests.support.looking import document, held_elsewhere, holder, holders
from tests.test_docs_topics import DOCS, blocks

pytestmark = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)


class TestCron:
    """docs/howto/cron.md"""

    @pytest.fixture
    def pages(self) -> list[Any]:
        return blocks("howto/cron.md")

    def test_once(self, pages: list[Any]) -> None:
        """The second server is told that it is done."""
        names: dict[str, Any] = {"__name__": f"docs_{uuid.uuid4().hex}"}
        exec(pages[0], names)
        said = [io.StringIO(), io.StringIO()]
        for out in said:
            call_command(names["Command"](stdout=out))
        assert [out.getvalue() for out in said] == ["1,042 orders\n", "made by another server\n"]

    def test_a_whole_command(self, pages: list[Any]) -> None:
        """It is held for its minute after its end, and skipped by the next server."""
        names: dict[str, Any] = {"__name__": f"docs_{uuid.uuid4().hex}"}
        exec(pages[1], names)
        out = io.StringIO()
        assert call_command(names["Command"](stdout=out)) == "imported"
        assert holder("import-books")
        assert not call_command(names["Command"](stdout=io.StringIO()))
        assert document("import-books")["acquisitions"] == 1


class TestAtMostN:
    """docs/howto/at-most-n.md"""

    def test_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The task runs with one of three permits; the scheduler leads until it has sent all; and is asked about."""
        export, scheduler, asking = blocks("howto/at-most-n.md")
        names: dict[str, Any] = {"__name__": f"docs_{uuid.uuid4().hex}"}
        exec(export, names)
        assert names["export_tenant"](5) == "exported 5"
        assert document("export:5")["last_holder"]["capacity"] == 3
        sent: list[int] = []

        def send_what_is_due(token: int) -> bool:
            sent.append(token)
            return len(sent) == 3

        names["send_what_is_due"] = send_what_is_due
        exec(scheduler, names)
        assert sent == [document("scheduler")["token"]] * 3
        with held_elsewhere("scheduler", label="leader"):
            exec(asking, names)
        assert capsys.readouterr().out.startswith("held 20")


class TestFencing:
    """docs/howto/fencing.md"""

    @isolate_apps("testproject.shop")
    def test_a_row(self) -> None:
        """The row notes the token; a newer one refuses the write; a row that is not there is 0, which is looked at."""
        declare, write, *_, elsewhere = blocks("howto/fencing.md")
        names: dict[str, Any] = {"__name__": "testproject.shop.accounts"}
        exec(declare, names)
        model = names["Account"]
        with connection.schema_editor() as editor:
            editor.create_model(model)
        try:
            account = model.objects.create(balance=100)
            exec(write, names)
            names["withdraw"](account, 10)
            account.refresh_from_db()
            assert (account.balance, account.fencing_token) == (90, document("shop.account:1")["token"])
            later = account.fencing_token + 10**9
            model.objects.update(fencing_token=later)
            with pytest.raises(StaleToken):
                names["withdraw"](account, 10)
            assert model.objects.get().balance == 90

            rows: Any = object()
            names["Report"] = types.SimpleNamespace(objects=types.SimpleNamespace(filter=lambda **_: rows))
            told: list[Any] = []
            names["fenced_update"] = lambda *given, **values: told.append((given, values))
            exec(elsewhere, names)
            names["store_report"]("t", "x", "7")
            assert told == [((rows, 7), {"text": "x"})]

            exec(write, names)
            account = model.objects.get()
            model.objects.all().delete()
            with pytest.raises(model.DoesNotExist):
                names["withdraw"](account, 10)
        finally:
            with connection.schema_editor() as editor:
                editor.delete_model(model)

    def test_a_document(self) -> None:
        """The same for a document."""
        ad = Ad.objects.create(user_id="7", title="x", price=5)
        *_, write, _ = blocks("howto/fencing.md")
        names: dict[str, Any] = {"Ad": Ad, "mongo_lock": mongo_lock}
        exec(write, names)
        assert names["set_price"](ad, 7) == 1
        assert Ad.objects.get(pk=ad.pk).price == 7
        fenced_update(Ad, document("seller:7")["token"] + 10**9, {"price": 8}, filter={"pk": ad.pk})
        with pytest.raises(StaleToken):
            names["set_price"](ad, 9)
        assert Ad.objects.get(pk=ad.pk).price == 8


def test_locks(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/howto/locks.md: each of them can be made and taken, and each name is where it is said to be."""
    made: list[MongoLock] = []

    def noting(make: Any) -> Any:
        def note(*keys: Any, **options: Any) -> MongoLock:
            made.append(make(*keys, **options))
            return made[-1]

        return note

    _, page = blocks("howto/locks.md")
    start = (DOCS / "howto/locks.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(start, {})
    assert capsys.readouterr().out == ""
    with held_elsewhere("import:books", label="the nightly import"):
        exec(start.replace("wait=10", "wait=0"), {})
    assert "held by the nightly import" in capsys.readouterr().out
    names = {"mongo_lock": noting(mongo_lock), "mongo_semaphore": noting(mongo_semaphore), "lock_key": lock_key}
    exec(page, {**names, "order": Order(pk=5), "task_id": "5"})
    assert len(made) == 6
    for lock in made:
        with lock:
            assert lock.held
    text = (DOCS / "howto/locks.md").read_text()
    for name in re.findall(r"`lock\.(\w+)", text):
        assert hasattr(MongoLock, name), name
    for path in re.findall(r"`(django_mongolock\.[\w.]+)`", text):
        assert import_string(path)


def test_looking() -> None:
    """docs/howto/looking.md"""
    info, look, take, documents, force = blocks("howto/looking.md")
    names: dict[str, Any] = {}
    lock = mongo_lock("order:5", owner="job 5").acquire()
    exec(info, names)
    assert (names["info"].state, names["info"].waiting) == ("held", 0)
    exec(look, names)
    assert [lock.key for lock in names["held"]] == ["order:5"]
    assert [lock.key for lock in names["mine"]] == ["order:5"]
    assert not names["stale"]
    assert not names["wanted"]
    exec(take, names)
    assert holders("order:5") == []
    assert not lock.release()

    ad = Ad.objects.create(user_id="7", title="x", price=5)
    held = ad_exports.acquire(ad, "exporting", owner="flow 7")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(documents, {"ad_exports": ad_exports})
    assert out.getvalue().startswith(f"{ad.pk} exporting held by flow 7 for 0.")
    exec(force, {"ad_exports": ad_exports})
    assert not held.fail()


def test_models_of_ones_own(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/howto/mongo-models.md: the router of the page, before ours, puts everything where it belongs."""
    router, project = blocks("howto/mongo-models.md")
    module: Any = types.ModuleType("docs_routers")
    exec(router, module.__dict__)
    monkeypatch.setitem(sys.modules, "docs_routers", module)
    names: dict[str, Any] = {"DATABASES": {}, "os": os}
    exec(project, names)
    settings.MONGOLOCK = names["MONGOLOCK"]
    paths = [path.replace("shop.routers", "docs_routers") for path in names["DATABASE_ROUTERS"]]
    asked = ConnectionRouter(paths)
    module.MongoRouter.apps = {"shop"}  # an app that there is here
    where = {app: [db for db in ("default", "mongo") if asked.allow_migrate(db, app)] for app in ("shop", "auth")}
    assert where == {"shop": ["mongo"], "auth": ["default"]}
    assert asked.allow_migrate("mongo", "django_mongolock")
    assert not asked.allow_migrate("default", "django_mongolock")
    assert asked.db_for_write(Ad) == "mongo"


def test_running(settings: Settings) -> None:
    """docs/howto/running.md: the settings are right, and name what the text says."""
    names: dict[str, Any] = {"DATABASES": {}}
    (project,) = blocks("howto/running.md")
    exec(project, names)
    assert list(find_wrong(names["MONGOLOCK"])) == []
    assert names["MONGOLOCK"]["DATABASE"] in names["DATABASES"]
    assert (LockSettings().LEASE, LockSettings().RETENTION) == (30, 7 * 24 * 3600)
