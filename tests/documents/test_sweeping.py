"""Documents whose holder has died are found and released, by the server's clock alone."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse
from pymongo import MongoClient

from django_mongolock import DocumentLock, DocumentLockLost, LockBackendFailed
from django_mongolock.documents import Swept, declared
from django_mongolock.documents.sender import Sender
from testproject.shop.models import Ad, ad_exports
from tests.documents.conftest import FINAL, PENDING, USUAL, Document, Ground
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import NOBODY, WITH_MONGO
from tests.test_admin import browser

pytestmark = WITH_MONGO


def ago(seconds: float) -> datetime:
    """A moment of the past: the server's clock is ours here."""
    return datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=seconds)


def stuck(ground: Ground, seconds: float = 100, **values: Any) -> Any:
    """A document that somebody has held for so long."""
    return ground.add(**{"version": 4, "holder": "dead", "state": "exporting", "time": ago(seconds), **values})


class TestSweep:
    """clear_stale: pending becomes its failed state, held by nobody."""

    def test_frees(self, ground: Ground) -> None:
        """Each pending state gets its own failed one; the version stays."""
        first, second = stuck(ground), stuck(ground, 200, state="withdrawing")
        swept = ground.lock.clear_stale()
        assert (swept.count, swept.found, swept.dated, swept.damaged) == (2, 2, 0, [])
        assert [seen.id for seen in swept.cleared] == [second, first]  # held for longest first
        assert ground.read(first, "state", "holder", "time", "version") == ("failed", None, None, 4)
        assert ground.read(second, "state", "holder") == ("withdraw_failed", None)
        assert ground.lock.clear_stale() == Swept()

    @pytest.mark.parametrize(
        "values",
        [
            {"seconds": 30},
            {"seconds": -1_000},
            {"holder": None},
            {"holder": ""},
            {"state": "exported"},
            {"state": "failed"},
            {"state": "new"},
            {"state": None},
        ],
        ids=str,
    )
    def test_leaves(self, ground: Ground, values: dict[str, Any]) -> None:
        """What is held for less, or by nobody, or is not pending."""
        id_ = stuck(ground, **values)
        before = ground.raw(id_)
        assert not ground.lock.stale()
        assert ground.lock.clear_stale() == Swept()
        assert ground.raw(id_) == before

    def test_the_retry_takes_it_from_there(self, ground: Ground) -> None:
        """What is found, and what was freed, is what a retry job needs; the dead one, if it lives, writes nothing."""
        id_ = ground.add(1)
        dead = ground.lock.acquire((id_, 1), "exporting")
        ground.change(id_, time=ago(100))
        (seen,) = ground.lock.stale()
        assert (seen.id, seen.version, seen.state, seen.failed) == (id_, 2, "exporting", "failed")
        assert 95 < seen.seconds < 200
        assert seen.holder == dead.owner
        (freed,) = ground.lock.clear_stale().cleared
        with ground.lock.hold(freed, "exporting", final="exported"), pytest.raises(DocumentLockLost):
            dead.finish("exported")
        assert ground.read(id_, "state", "version") == ("exported", 3)

    def test_renewed_or_finished_meanwhile(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """The update itself looks again: what was found stale, and is not any more, stays."""
        renewed, finished, left = (stuck(plain) for _ in range(3))
        send, calls = Sender.send, []

        def change_first(sender: Sender, command: Any, *left: float) -> Any:
            calls.append(command)
            if len(calls) == 2:  # the first one has found them
                plain.change(renewed, time=datetime.now(UTC))
                plain.change(finished, state="exported", holder=None)
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", change_first)
        swept = plain.lock.clear_stale()
        assert (swept.found, swept.count, [seen.id for seen in swept.cleared]) == (3, 1, [left])
        assert plain.read(renewed, "holder", "state") == ("dead", "exporting")
        assert plain.read(finished, "state") == "exported"

    def test_which(self, ground: Ground) -> None:
        """Of one holder, for so long, with these ids, so many."""
        old, mine, young = stuck(ground, 500), stuck(ground, holder="me"), stuck(ground)
        assert [seen.id for seen in ground.lock.stale().owned_by("me")] == [mine]
        assert [seen.id for seen in ground.lock.stale(older_than=300)] == [old]
        assert [seen.id for seen in ground.lock.stale()[:1]] == [old]
        assert ground.lock.clear_stale([young]).count == 1
        assert ground.lock.clear_stale([]).count == 0
        assert ground.lock.clear_stale(older_than=300).count == 1
        assert ground.lock.clear_stale(owner="me").count == 1

    def test_batches(self, plain: Ground) -> None:
        """All of them, so many at a time."""
        for _ in range(25):
            stuck(plain)
        swept = plain.lock.clear_stale(batch=10)
        assert swept.count == len(swept.cleared) == 25

    def test_data_from_before(self, ground: Ground) -> None:
        """A holder without a time is given one by the first sweep, and is stale when that is over; once."""
        id_ = ground.add(4, holder="old", state="exporting")
        assert not ground.lock.stale()
        assert ground.lock.clear_stale() == Swept(dated=1)
        assert ground.lock.clear_stale() == Swept()
        assert ground.read(id_, "holder", "state") == ("old", "exporting")
        ground.change(id_, time=ago(61))
        assert ground.lock.clear_stale().count == 1

    @pytest.mark.parametrize(
        "values", [{"time": "long ago"}, {"version": "4"}, {"version": 4.5}, {"holder": 5}, {"holder": ["a"]}], ids=str
    )
    def test_damaged(self, plain: Ground, values: dict[str, Any]) -> None:
        """It is reported, left as it is, and stops no other."""
        bad, good = stuck(plain), stuck(plain)
        plain.change(bad, **values)
        before = plain.raw(bad)
        assert [seen.id for seen in plain.lock.stale()] == [good]
        assert [(seen.id, bool(seen.damage)) for seen in plain.lock.damaged()] == [(bad, True)]
        swept = plain.lock.clear_stale()
        assert [seen.id for seen in swept.cleared] == [good]
        assert [seen.id for seen in swept.damaged] == [bad]
        assert plain.raw(bad) == before

    def test_a_list_of_states(self, plain: Ground) -> None:
        """A plain query would find it."""
        id_ = stuck(plain)
        plain.change(id_, state=["exporting"])
        assert plain.lock.clear_stale().count == 0

    def test_one_that_is_refused(self, plain: Ground) -> None:
        """F83: a document that a validator refuses is named, in every run, and stops none of the others."""
        ids = [stuck(plain, 100 + number, price=number) for number in range(3)]
        undated = plain.add(4, holder="old", state="exporting", price=0)
        database, name = plain.collection.database, plain.collection.name
        database.command("collMod", name, validator={"price": {"$gt": 0}}, validationLevel="strict")
        swept = plain.lock.clear_stale(batch=2)
        assert sorted(seen.id for seen in swept.cleared) == sorted(ids[1:])
        assert sorted(seen.id for seen in swept.damaged) == sorted([ids[0], undated])
        assert "DocumentValidationFailure" in swept.damaged[0].damage
        assert (swept.found, swept.count, swept.dated) == (3, 2, 0)
        again = plain.lock.clear_stale()
        assert (again.count, len(again.damaged)) == (0, 2)

    def test_unheld(self, ground: Ground) -> None:
        """Pending, and held by nobody: imported, or of old code. Found if asked for, unless its time is not over."""
        without, empty = ground.add(4, state="exporting"), ground.add(4, state="withdrawing", holder="")
        old, young = stuck(ground, holder=None), stuck(ground, 5, holder=None)
        assert not ground.lock.stale()
        assert ground.lock.clear_stale() == Swept()
        assert {seen.id for seen in ground.lock.stale(unheld=True)} == {without, empty, old}
        swept = ground.lock.clear_stale(unheld=True)
        assert swept.count == 3
        assert [ground.read(id_, "state") for id_ in (without, empty, young)] == [
            "failed",
            "withdraw_failed",
            "exporting",
        ]

    @pytest.mark.parametrize("age", [-1, True, "5", float("nan")])
    def test_wrong_age(self, plain: Ground, age: Any) -> None:
        """Refused: a negative one would sweep what is not stale."""
        id_ = stuck(plain, 40)
        for function in (plain.lock.stale, plain.lock.clear_stale):
            with pytest.raises((TypeError, ValueError), match="older_than"):
                function(older_than=age)
        assert plain.read(id_, "state") == "exporting"

    def test_async(self, ground: Ground) -> None:
        """The twins."""
        id_ = stuck(ground)

        async def both() -> tuple[Any, Any]:
            return [seen async for seen in ground.lock.stale()], await ground.lock.aclear_stale()

        found, swept = asyncio.run(both())
        assert [seen.id for seen in found] == [seen.id for seen in swept.cleared] == [id_]


class TestIndex:
    """A sweep without an index reads the whole collection; a check says so."""

    @pytest.mark.parametrize(
        ("keys", "options", "enough"),
        [
            (["exportStatus"], {}, True),
            (["exportStatus", "lockTimestamp"], {}, True),
            (["lockTimestamp"], {}, True),
            (["price", "exportStatus"], {}, False),
            (["exportStatus"], {"partialFilterExpression": {"price": 5}}, False),
            (["exportStatus"], {"hidden": True}, False),
        ],
    )
    def test_index(self, plain: Ground, keys: list[str], options: Any, enough: bool) -> None:
        """It begins with the state or the time, and has all documents."""
        plain.collection.insert_one({})
        assert not plain.lock.has_index()
        plain.collection.create_index([(key, 1) for key in keys], **options)
        assert plain.lock.has_index() == enough

    def test_check(self, plain: Ground, locks: Locks) -> None:
        """W105, by name and with its cure, for models and for collections; nothing where nobody answers."""
        from django_mongolock.checks import check_documents

        plain.collection.insert_one({})
        found = check_documents(app_configs=None, databases=["mongo"])
        assert [(one.id, "'test'" in one.msg) for one in found] == [("mongolock.W105", True)]
        assert "lockTimestamp" in str(found[0].hint)
        plain.collection.create_index("exportStatus")
        assert check_documents(app_configs=None, databases=["mongo"]) == []
        assert check_documents(app_configs=None, databases=["default"]) == []
        assert check_documents(app_configs=None, databases=None) == []

    def test_check_of_a_model(self, make: Callable[..., Ground], locks: Locks) -> None:
        """The index of Meta.indexes is found; without it the check warns."""
        ground = make("model")
        assert ground.lock.has_index()
        ground.collection.drop_index("ad_status")
        try:
            assert not ground.lock.has_index()
        finally:
            ground.collection.create_index([("exportStatus", 1), ("lockTimestamp", 1)], name="ad_status")


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("clear_stale_locks", *arguments, stdout=out)
    return out.getvalue()


def run_json(*arguments: str) -> dict[str, Any]:
    """What the command says of the documents, by lock."""
    said = json.loads(run("--json", *arguments))
    return {found["lock"]: found for found in said["documents"]}


class TestCommand:
    """clear_stale_locks goes through every declared DocumentLock."""

    def test_clears(self, plain: Ground, locks: Locks) -> None:
        """With the named locks, in one run."""
        locks.stale("k")
        id_ = stuck(plain)
        text = run("--no-input")
        assert "Cleared 1 of 1 stale locks." in text
        assert "Cleared 1 of 1 stale documents of test." in text
        assert plain.read(id_, "state") == "failed"
        assert "documents" not in run("--no-input")

    def test_dry_run(self, ground: Ground, locks: Locks) -> None:
        """Says what would be done, and does nothing."""
        id_ = stuck(ground)
        before = ground.raw(id_)
        text = run("--dry-run")
        assert "Stale documents of test: 1. Nothing was cleared." in text
        assert f"{id_}  exporting → failed  held by dead" in text
        assert ground.raw(id_) == before

    def test_json(self, plain: Ground, locks: Locks) -> None:
        """One object; every declared lock is in it."""
        id_, bad = stuck(plain), stuck(plain, version="x")
        said = run_json("--no-input")
        assert sorted(said) == ["ad exports", "test"]
        found = said["test"]
        assert (found["found"], found["cleared"], found["dated"], found["error"]) == (1, 1, 0, None)
        assert [(one["id"], one["failed_state"], one["version"]) for one in found["stale"]] == [(id_, "failed", 4)]
        assert [one["id"] for one in found["damaged"]] == [bad]

    def test_unheld(self, plain: Ground, locks: Locks) -> None:
        """--unheld includes those that are pending and have no holder."""
        id_ = plain.add(4, state="exporting")
        assert "Nothing" not in run("--dry-run", "--document-lock", "test")
        assert f"{id_}  exporting → failed  without a holder" in run("--dry-run", "--document-lock", "test", "--unheld")
        assert "Cleared 1 of 1 stale documents of test." in run("--no-input", "--document-lock", "test", "--unheld")

    def test_chosen(self, plain: Ground, locks: Locks) -> None:
        """By lock, holder and age; a pattern of keys means named locks only."""
        locks.stale("k")
        stuck(plain)
        assert run_json("--dry-run", "--key", "*") == {}
        assert run_json("--dry-run", "--owner", "else")["test"]["found"] == 0
        assert run_json("--dry-run", "--older-than", "1h")["test"]["found"] == 0
        assert run_json("--dry-run", "--database", "mongo").keys() == {"ad exports"}
        said = json.loads(run("--json", "--dry-run", "--document-lock", "test"))
        assert (said["found"], len(said["documents"])) == (0, 1)
        with pytest.raises(CommandError, match="no document lock 'x' was declared: there are ad exports, test"):
            run("--no-input", "--document-lock", "x")

    @pytest.mark.parametrize("answer", ["y", "n"])
    def test_asks(self, plain: Ground, locks: Locks, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
        """A person is shown the documents, too, before anything is done."""
        id_ = stuck(plain)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda question: answer)
        text = run()
        assert "exporting → failed" in text
        assert plain.read(id_, "state") == ("failed" if answer == "y" else "exporting")

    def test_one_that_is_away(self, plain: Ground, locks: Locks, forget: None) -> None:
        """It stops no other, and the exit code tells."""
        away: MongoClient[Document] = MongoClient(NOBODY)
        DocumentLock[Document](
            away["x"]["y"], **USUAL, pending=PENDING, final=FINAL, stale_after=1, name="away", timeout=0.2
        )
        id_ = stuck(plain)
        with pytest.raises(CommandError, match="away: MongoDB did not answer") as caught:
            run("--no-input")
        assert "hunter2" not in str(caught.value)
        assert plain.read(id_, "state") == "failed"
        away.close()


ADDRESS = "/admin/django_mongolock/lock/documents/"
MAY = ("clear_document_lock", "view_lock")


class TestAdmin:
    """The page of all document locks, and the action of a model's own admin."""

    def test_page(self, make: Callable[..., Ground]) -> None:
        """It shows what is stale, and frees it."""
        ground = make("model")
        id_ = stuck(ground, holder="<dead>")
        client = browser(*MAY)
        assert reverse("admin:django_mongolock_lock_documents") == ADDRESS
        page = client.get(ADDRESS).content.decode()
        assert str(id_) in page
        assert "&lt;dead&gt;" in page
        assert "◐</span> stale" in page
        answer = client.post(ADDRESS, {"lock": "test"}, follow=True).content.decode()
        assert "1 stale document of “test” was released." in answer
        assert ground.read(id_, "state", "holder") == ("failed", None)
        assert ADDRESS in client.get("/admin/django_mongolock/lock/").content.decode()

    def test_json(self, plain: Ground) -> None:
        """The same for programs."""
        id_ = stuck(plain)
        client = browser(*MAY)
        said = client.get(ADDRESS, HTTP_ACCEPT="application/json").json()
        assert [one["id"] for found in said["documents"] for one in found["stale"]] == [id_]
        said = client.post(ADDRESS, {"lock": "test"}, HTTP_ACCEPT="application/json").json()
        assert (said["cleared"], said["stale"][0]["id"]) == (1, id_)

    def test_permission(self, plain: Ground) -> None:
        """Who may see locks sees the documents; releasing the stale takes a permission for that, or force release."""
        id_ = stuck(plain)
        client = browser("view_lock")
        assert str(id_) in client.get(ADDRESS).content.decode()
        assert client.post(ADDRESS, {"lock": "test"}).status_code == 403
        assert browser().get(ADDRESS).status_code == 403
        assert plain.read(id_, "state") == "exporting"
        browser("force_release_lock", "view_lock").post(ADDRESS, {"lock": "test"})
        assert plain.read(id_, "state") == "failed"

    def test_wrong_requests(self, plain: Ground) -> None:
        """No such lock; no such method."""
        client = browser(*MAY)
        assert client.post(ADDRESS, {"lock": "x"}).status_code == 400
        assert client.put(ADDRESS).status_code == 405

    def test_all_away(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where none can be looked at, the page says so as every other does: with status 503."""

        def fail(*arguments: Any, **options: Any) -> None:
            raise LockBackendFailed("it is away")

        stuck(plain)
        for lock in declared():
            monkeypatch.setattr(lock, "_context", fail)
        client = browser(*MAY)
        page, said = client.get(ADDRESS), client.get(ADDRESS, HTTP_ACCEPT="application/json")
        assert (page.status_code, said.status_code) == (503, 503)
        assert "The locks cannot be shown now" in page.content.decode()
        assert {row["error"] for row in said.json()["documents"]} == {str(LockBackendFailed("it is away"))}

    def test_away(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lock that cannot be looked at hides no other."""

        def fail(*arguments: Any, **options: Any) -> None:
            raise LockBackendFailed("it is away")

        stuck(plain)
        monkeypatch.setattr(ad_exports, "_context", fail)
        page = browser(*MAY).get(ADDRESS).content.decode()
        assert "it is away" in page
        assert "◐</span> stale" in page

    def test_action(self, make: Callable[..., Ground]) -> None:
        """Of the selected documents, those that are stale; who may change ads may not do it for that."""
        ground = make("model")
        rest = {"price": 1, "user_id": "7", "title": "x"}
        ads = [Ad.objects.create(**rest) for _ in range(3)]
        for ad, seconds in zip(ads, (100, 100, 5), strict=True):
            ground.change(ad.pk, holder="dead", state="exporting", time=ago(seconds))
        change = {"action": "clear_stale_documents", "_selected_action": [str(ads[0].pk), str(ads[2].pk)]}
        browser("view_ad", "change_ad").post("/admin/shop/ad/", change)
        assert ground.read(ads[0].pk, "state") == "exporting"
        answer = browser("view_ad", "change_ad", *MAY).post("/admin/shop/ad/", change, follow=True)
        assert "1 stale document of “ad exports” was released." in answer.content.decode()
        assert [ground.read(ad.pk, "state") for ad in ads] == ["failed", "exporting", "exporting"]
