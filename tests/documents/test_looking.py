"""Held documents in lists, commands, admin and dashboard, the sweep, and forced releases."""

from __future__ import annotations

import io
import json
import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from bson import ObjectId
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connections
from pymongo import MongoClient

from django_mongolock import LockBackendFailed
from django_mongolock.documents import DocumentLock, declared, kind, steps
from django_mongolock.documents.kind import DocumentKind
from django_mongolock.exceptions import DocumentLockLost
from django_mongolock.inspection.kinds import Choice, Swept
from django_mongolock.management.checks import check_kinds
from testproject.shop.models import Ad, ad_exports
from tests.documents.conftest import FINAL, PENDING, USUAL, Document, Ground, new_ids
from tests.documents.models import Advert
from tests.support.lock_documents import Locks, entry
from tests.support.lock_fixtures import NOBODY, WITH_MONGO
from tests.support.programs import said_by as run
from tests.test_admin import DASHBOARD, browser

pytestmark = WITH_MONGO
ADDRESS = "/admin/django_mongolock/lock/others/"
FORCE = "/admin/django_mongolock/lock/force-release/"
MAY_CLEAR = ("clear_document_lock", "view_lock")
MAY = ("view_lock", "force_release_lock")


def stuck(ground: Ground, seconds: float = 100, **values: Any) -> Any:
    """Add a document that has been held for *seconds*, by the server's clock. The tests run on the same clock."""
    time = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=seconds)
    return ground.add(**{"version": 4, "holder": "dead", "state": "exporting", "time": time, **values})


#: Documents that no sweep takes.
LEFT: list[dict[str, Any]] = [
    {"seconds": 30},
    {"seconds": -1_000},
    *({"holder": holder} for holder in (None, "")),
    *({"state": state} for state in ("exported", "failed")),
]


def ids(found: Any) -> list[Any]:
    return [seen.id for seen in found]


def fail(*arguments: Any, **options: Any) -> None:
    raise LockBackendFailed("it is away")


@pytest.fixture
def shop(db: None, mongo: MongoClient[Document]) -> Ground:
    """Return the ads of the demo, because they have an admin."""
    raw = mongo[str(connections["mongo"].settings_dict["NAME"])]["shop_ad"]
    return Ground(ad_exports, raw, USUAL, new_ids(ObjectId))


@pytest.fixture
def away(forget: None, settings: Any) -> Any:
    """A document lock whose MongoDB does not answer."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "COMMAND_TIMEOUT": 0.5}
    client: MongoClient[Document] = MongoClient(NOBODY)
    yield DocumentLock[Document](client["x"]["y"], **USUAL, pending=PENDING, final=FINAL, stale_after=1, name="away")
    client.close()


class TestLists:
    """Held, stale and damaged documents, by the server's clock."""

    def test_by_state(self, ground: Ground) -> None:
        """The states are told apart, and the longest hold comes first. Ended work is in no list."""
        stale, held = stuck(ground), stuck(ground, 5)
        untimed = ground.add(1, holder="old", state="exporting")
        damaged, odd = stuck(ground, holder=5), stuck(ground, 3, state="new")
        for values in ({"holder": None}, {"holder": ""}, {"state": "exported"}, {"state": "failed"}):
            stuck(ground, **values)
        found = {state: ground.lock.snapshots(state) for state in ("all", "held", "stale", "damaged")}
        assert ids(found["all"]) == [untimed, stale, held, odd, damaged]
        assert ids(found["held"]) == [untimed, held, odd]
        assert (ids(found["stale"]), ids(found["damaged"])) == ([stale], [damaged])
        states = [seen.state.value for seen in found["all"]]
        assert states == ["held", "stale", "held", "held", "damaged"]

    def test_as_a_condition(self, ground: Ground) -> None:
        """The conditions work in a queryset of the model, with other conditions, and in `find` of a collection."""
        stale, held, free = stuck(ground), stuck(ground, 5), ground.add(1)
        is_held, is_stale = ground.lock.held(), ground.lock.stale()
        if ground.lock.model is None:
            found = [[each["_id"] for each in ground.collection.find(which)] for which in (is_held, is_stale)]
        else:
            rows: Any = Advert._default_manager.using("mongo")
            found = [[row.pk for row in rows.filter(which)] for which in (is_held, is_stale)]
            assert rows.exclude(is_held).filter(price=5, pk=free).exists()
            assert not rows.filter(is_held, price=6).exists()
        assert found == [[held], [stale]]

    def test_what_is_seen(self, ground: Ground) -> None:
        """A snapshot has the holder, the work, the failed state, the start, and the seconds until it is stale."""
        held = ground.lock.acquire((ground.add(3), 3), "withdrawing", owner="flow 7")
        (seen,) = ground.lock.snapshots()
        assert (seen.id, seen.version, seen.holder) == (held.id, held.version, "flow 7")
        assert (seen.work, seen.failed, seen.since) == ("withdrawing", "withdraw_failed", held.since)
        assert seen.left is not None
        assert 0 <= seen.seconds < 30 < seen.left <= 60
        held.fail()
        assert ground.lock.snapshots() == []
        stuck(ground, -1_000)  # of the future, by another server's clock
        (seen,) = ground.lock.snapshots("held")
        assert (seen.seconds, seen.as_json()["left_seconds"]) == (0.0, 60.0)

    def test_which(self, ground: Ground) -> None:
        """Lists and sweeps can be limited to one owner, to a least hold, to ids, and to a number."""
        old, mine, young = stuck(ground, 500), stuck(ground, holder="me"), stuck(ground)
        see = ground.lock.snapshots
        assert ids(see("stale", owner="me")) == ids(see(ids=[mine])) == [mine]
        assert ids(see("stale", older_than=300)) == ids(see(limit=1)) == [old]
        assert see(ids=[]) == see(owner="x") == []
        sweeps = [ground.lock.clear_stale(ids_, **which).count for ids_, which in (
            ([young], {}), ([], {}), (None, {"older_than": 300}), (None, {"owner": "me"}), (None, {}))]  # fmt: skip
        assert sweeps == [1, 0, 1, 1, 0]

    @pytest.mark.parametrize("age", [-1, True, "5", float("nan")])
    def test_wrong(self, plain: Ground, age: Any) -> None:
        """A negative age would sweep fresh documents."""
        for function in (plain.lock.snapshots, plain.lock.clear_stale):
            with pytest.raises((TypeError, ValueError), match="older_than"):
                function(older_than=age)
        with pytest.raises(ValueError, match="state is"):
            plain.lock.snapshots("exporting")


class TestSweep:
    """clear_stale sets a pending state to its failed state, without a holder."""

    def test_frees(self, ground: Ground) -> None:
        """Each pending state gets its own failed state and a new version. A shorter hold, a free document and ended
        work stay."""
        left = [stuck(ground, **values) for values in LEFT]
        before = [ground.raw(id_) for id_ in left]
        first, second = stuck(ground), stuck(ground, 200, state="withdrawing")
        swept = ground.lock.clear_stale(batch=1)
        assert (swept.count, swept.found, swept.dated, swept.damaged) == (2, 2, 0, [])
        assert ids(swept.cleared) == [second, first]  # held for longest first
        assert ground.read(first, "state", "holder", "time", "version") == ("failed", None, None, 5)
        assert ground.read(second, "state", "holder") == ("withdraw_failed", None)
        assert ground.lock.clear_stale() == Swept()
        assert [ground.raw(id_) for id_ in left] == before

    def test_the_retry_takes_it_from_there(self, ground: Ground) -> None:
        """A retry job can use the freed document. The old holder, if it lives, writes nothing."""
        dead = ground.lock.acquire((ground.add(1), 1), "exporting")
        ground.age(dead.id, 100)
        (freed,) = ground.lock.clear_stale().cleared
        assert (freed.id, freed.version, freed.work, freed.failed) == (dead.id, 3, "exporting", "failed")
        assert freed.holder == dead.owner
        with ground.lock.hold(freed, "exporting", final="exported"), pytest.raises(DocumentLockLost):
            dead.finish("exported")
        assert ground.read(dead.id, "state", "version") == ("exported", 5)

    def test_renewed_or_finished_meanwhile(self, plain: Ground, strike: Any) -> None:
        """The update checks again. A document that was found stale and is not any more stays."""
        renewed, finished, left = (stuck(plain) for _ in range(3))

        def change(number: int) -> None:
            if number == 2:  # the first one has found them
                plain.change(renewed, time=datetime.now(UTC))
                plain.change(finished, state="exported", holder=None)

        strike(plain, before=change)
        swept = plain.lock.clear_stale()
        assert (swept.found, swept.count, ids(swept.cleared)) == (3, 1, [left])
        assert plain.read(renewed, "holder", "state") == ("dead", "exporting")
        assert plain.read(finished, "state") == "exported"

    def test_data_from_before(self, ground: Ground) -> None:
        """The first sweep gives a time to a holder without one, once. The document is stale when that time is over."""
        id_ = ground.add(4, holder="old", state="exporting")
        assert ground.lock.clear_stale() == Swept(dated=1)
        assert ground.lock.clear_stale() == Swept()
        ground.age(id_, 61)
        assert ground.lock.clear_stale().count == 1
        old = ground.add(None, holder="old", state="exporting", time=datetime(2020, 1, 1, tzinfo=UTC))
        assert ids(ground.lock.clear_stale().cleared) == [old]
        assert ground.read(old, "version", "holder") == (1, None)

    @pytest.mark.parametrize(
        "values", [{"time": "long ago"}, {"version": "4"}, {"version": 4.5}, {"holder": 5}, {"holder": ["a"]}], ids=str
    )
    def test_damaged(self, plain: Ground, values: dict[str, Any]) -> None:
        """A damaged document is reported, stays as it is, and stops no other."""
        bad, good = stuck(plain), stuck(plain)
        plain.change(bad, **values)
        before = plain.raw(bad)
        swept = plain.lock.clear_stale()
        assert (ids(swept.cleared), ids(swept.damaged)) == ([good], [bad])
        assert plain.raw(bad) == before

    def test_an_id_that_is_no_key_of_a_dict(self, plain: Ground) -> None:
        """A held document of another program with an odd id is reported, and stops no other."""
        good = stuck(plain)
        plain.collection.insert_one({**plain.raw(good), "_id": {"a": 1}})
        swept = plain.lock.clear_stale()
        assert (ids(swept.cleared), ids(swept.damaged)) == ([good], ["{'a': 1}"])

    def test_one_that_is_refused(self, plain: Ground) -> None:
        """F83: A document that a validator refuses is named, in every run, and stops none of the others."""
        found = [stuck(plain, 100 + number, price=number) for number in range(3)]
        undated = plain.add(4, holder="old", state="exporting", price=0)
        database, name = plain.collection.database, plain.collection.name
        database.command("collMod", name, validator={"price": {"$gt": 0}}, validationLevel="strict")
        swept = plain.lock.clear_stale(batch=2)
        assert sorted(ids(swept.cleared)) == sorted(found[1:])
        assert sorted(ids(swept.damaged)) == sorted([found[0], undated])
        assert "DocumentValidationFailure" in swept.damaged[0].damage
        assert (swept.found, swept.count, swept.dated) == (3, 2, 0)


class TestForceRelease:
    """A document is taken from its holder before it is stale."""

    def test_all_of_an_owner(self, ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
        """Each document gets the failed state of its work, and is logged. Documents of others stay, and the holder is
        refused."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting", owner="dead flow")
        second, other = stuck(ground, 5, holder="dead flow", state="withdrawing"), stuck(ground, 5)
        with caplog.at_level("WARNING", "django_mongolock"):
            shown = ground.lock.snapshots(owner="dead flow")
            taken = ground.lock.force_release(shown, by="anna", reason="it hangs")
        assert set(ids(taken)) == {held.id, second}
        assert ground.read(held.id, "state", "holder", "time") == ("failed", None, None)
        assert ground.read(second, "state") == "withdraw_failed"
        assert ground.read(other, "state", "holder") == ("exporting", "dead")
        lines = [record.getMessage() for record in caplog.records if "forced" in record.getMessage()]
        assert len(lines) == 2
        assert lines[0].endswith('holder="dead flow" by=anna reason="it hangs"')
        with pytest.raises(DocumentLockLost):
            held.finish("exported")

    def test_only_as_shown(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A document with another holder, or that has ended, or is damaged, stays. A renewed document is taken."""
        monkeypatch.setattr(steps, "BATCH", 2)
        changed, finished, damaged, same, renewed = (stuck(ground, 5) for _ in range(5))
        shown = ground.lock.snapshots()
        ground.change(changed, holder="another")
        ground.change(finished, state="exported", holder=None)
        ground.change(damaged, version="x")
        ground.change(renewed, version=9)
        assert sorted(ids(ground.lock.force_release(shown))) == sorted([same, renewed])
        assert ground.read(changed, "holder", "state") == ("another", "exporting")
        assert (ground.read(finished, "state"), ground.read(damaged, "state")) == ("exported", "exporting")


class TestChecks:
    """A check reports a sweep without an index, because it reads the whole collection."""

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
    def test_index(self, plain: Ground, locks: Locks, keys: list[str], options: Any, enough: bool) -> None:
        """W105: The index begins with the state or the time, and has all documents."""
        plain.collection.insert_one({})
        plain.collection.create_index([(key, 1) for key in keys], **options)
        found = check_kinds(app_configs=None, databases=["mongo"])
        assert [(one.id, "'test'" in one.msg) for one in found] == ([] if enough else [("mongolock.W105", True)])
        assert check_kinds(app_configs=None, databases=["default"]) == []

    def test_the_index_serves(self, plain: Ground) -> None:
        """The queries of the sweep and the lists read documents at work, not free ones."""
        plain.collection.create_index([("exportStatus", 1), ("lockTimestamp", 1)])
        for number in range(200):
            plain.add(1, state=("new", "exported", "failed")[number % 3])
        stuck(plain), stuck(plain, state="new")
        for state in ("all", "stale"):
            query = steps.query(plain.lock.rules, Choice(state))
            explain = {"explain": {"find": plain.collection.name, "filter": query}, "verbosity": "executionStats"}
            stats = plain.collection.database.command(explain)["executionStats"]
            assert stats["totalDocsExamined"] <= 2


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Provide a terminal. The list holds its answers to the questions first, and the questions afterwards."""
    answers: list[str] = []

    def ask(question: str) -> str:
        answers.append(question)
        return answers.pop(0)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    return answers


class TestListLocks:
    """list_locks lists documents after the named locks."""

    def test_table(self, plain: Ground, locks: Locks) -> None:
        """The list shows held documents by default, and all or stale ones on request. For a pattern of keys or for
        waiters, the list is empty."""
        held, stale, damaged = stuck(plain, 5, holder="flow\x1b[2J"), stuck(plain), stuck(plain, version="x")
        text = run("list_locks")
        assert "Documents of test:" in text
        assert re.search(rf"{held} +held +flow\\u001b\[2J +\d.* exporting", text)
        assert stale not in text
        assert re.search(rf"{stale} +stale +dead +1 min .* ended \d+ s ago +exporting", run("list_locks", "--stale"))
        text = run("list_locks", "--all", "--wide")
        assert all(each in text for each in (held, stale, damaged, "is str, not a whole number"))
        assert all("Documents" not in run("list_locks", *more) for more in (["--key", "*"], ["--waiting"]))

    def test_chosen(self, plain: Ground, locks: Locks) -> None:
        """The list can be limited to one document lock, to one owner, and to a number."""
        found = [stuck(plain, 9 - number, holder="me") for number in range(3)]
        stuck(plain, 5)
        text = run("list_locks", "--kind", "test", "--owner", "me", "--limit", "2")
        assert [each in text for each in found] == [True, True, False]
        assert "… and more: see --limit." in text
        assert "dead" not in text
        assert "There are no such locks" not in text
        with pytest.raises(CommandError, match="no kind of locks is named 'x'"):
            run("list_locks", "--kind", "x")

    @pytest.mark.long
    @pytest.mark.parametrize("command", [("list_locks", "--all"), ("clear_stale_locks", "--no-input")])
    def test_away(self, plain: Ground, locks: Locks, away: Any, command: tuple[str, ...]) -> None:
        """A document lock that cannot be read hides no other, and does not stop the sweep of others. The exit code
        tells."""
        id_, out = stuck(plain), io.StringIO()
        with pytest.raises(CommandError, match="away: MongoDB did not answer") as caught:
            call_command(*command, stdout=out)
        assert "hunter2" not in str(caught.value)
        assert id_ in out.getvalue() or plain.read(id_, "state") == "failed"


class TestReleaseLock:
    """release_lock takes documents, too."""

    @pytest.mark.parametrize("answer", ["y", "n"])
    def test_one(self, ground: Ground, locks: Locks, terminal: list[str], answer: str) -> None:
        """The command takes a document after a question that shows the holder."""
        id_ = stuck(ground, 5)
        terminal.append(answer)
        if answer == "y":
            text = run("release_lock", str(id_), "--kind", "test")
            assert re.search(rf"{id_} +held +dead .* exporting → failed", text)
            assert f"{str(id_)!r} was taken from its holder." in text
        else:
            with pytest.raises(CommandError, match="nothing was released"):
                run("release_lock", str(id_), "--kind", "test")
        assert terminal == ["Take these from their holder? [y/N] "]
        assert ground.read(id_, "state") == ("failed" if answer == "y" else "exporting")

    @pytest.mark.parametrize("ids_", [[5], [-5], ["5"], [ObjectId("f" * 24)], ["x y"], [5, "5"]], ids=str)
    def test_ids(self, plain: Ground, locks: Locks, ids_: list[object]) -> None:
        """An id is written as it is listed, whatever its type. If that could mean two documents, both stay."""
        held = {"lockedBy": "dead", "exportStatus": "exporting", "documentVersion": 1}
        plain.collection.insert_many([{"_id": id_, **held} for id_ in ids_])
        several = r"several documents of test have the id 5 \((int, str|str, int)\)"
        with pytest.raises(CommandError, match=several) if len(ids_) > 1 else nullcontext():
            run("release_lock", "--kind", "test", "--no-input", "--", str(ids_[0]))
        assert {plain.read(id_, "state") for id_ in ids_} == {"exporting" if len(ids_) > 1 else "failed"}

    def test_of_an_owner(self, plain: Ground, locks: Locks, terminal: list[str]) -> None:
        """All documents and all named locks of an owner are released after one question that shows them. With --kind,
        only that kind."""
        mine, other = stuck(plain, 5, holder="flow 7"), stuck(plain, 5)
        locks.add("k", holders=[entry(owner="flow 7")])
        locks.add("other", holders=[entry()])
        terminal.append("y")
        text = run("release_lock", "--owner", "flow 7", "--reason", "it is dead")
        assert f"{str(mine)!r} was taken from its holder." in text
        assert "'k' was taken from its holder." in text
        assert re.search(r"^k +works", text, re.MULTILINE)
        assert (plain.read(mine, "state"), plain.read(other, "state")) == ("failed", "exporting")
        assert (locks.read("k")["holders"], len(locks.read("other")["holders"])) == ([], 1)

        locks.add("l", holders=[entry(owner="dead")])
        run("release_lock", "--owner", "dead", "--kind", "test", "--no-input")
        assert plain.read(other, "state") == "failed"
        assert len(locks.read("l")["holders"]) == 1

    @pytest.mark.parametrize(
        ("arguments", "says", "code"),
        [
            ([], "name either the KEY of a lock, or --owner", 2),
            (["k", "--owner", "x"], "name either the KEY of a lock, or --owner", 2),
            (["k", "--kind", "test", "--ask"], "--ask and --token are for the KEY", 2),
            (["--owner", "x", "--token", "5"], "--ask and --token are for the KEY", 2),
            (["k", "--kind", "test", "--kind", "x"], "of one --kind", 2),
            (["k", "--kind", "test"], "no held lock of the kind test has the id 'k'", 3),
            (["9" * 30, "--kind", "test"], "no held lock of the kind test has the id '999", 3),
            (["--owner", "x"], "the owner 'x' holds nothing now", 3),
            (["--owner", ""], "--owner has 1 to 256 characters", 2),
            (["", "--by", "x"], "key", 2),
            (["k", "--by", "x" * 300], "--by has 1 to 256 characters", 2),
        ],
    )
    def test_wrong(self, plain: Ground, locks: Locks, arguments: list[str], says: str, code: int) -> None:
        """Each mistake has its text and its exit code."""
        with pytest.raises(CommandError, match=says) as caught:
            run("release_lock", *arguments, "--no-input")
        assert caught.value.returncode == code


def clear(*arguments: str) -> str:
    return run("clear_stale_locks", *arguments)


def run_json(*arguments: str) -> dict[str, Any]:
    """Return the facts of the command about documents, by lock."""
    return {found["kind"]: found for found in json.loads(clear("--json", *arguments))["kinds"]}


class TestClearStaleLocks:
    """clear_stale_locks goes through every declared DocumentLock."""

    def test_json(self, plain: Ground, locks: Locks) -> None:
        """JSON is one object with every declared lock. A dry run reports its effects, and changes nothing."""
        id_, bad = stuck(plain), stuck(plain, version="x")
        before, text = plain.raw(id_), clear("--dry-run")
        assert "Stale documents of test: 1. Nothing was cleared." in text
        assert re.search(rf"{id_} +stale +dead .* exporting → failed", text)
        assert plain.raw(id_) == before
        said = run_json("--no-input")
        assert list(said) == ["locks", "ad exports", "test"]
        found = said["test"]
        assert (found["found"], found["cleared"], found["dated"], found["error"]) == (1, 1, 0, None)
        assert [(one["key"], one["failed_state"], one["version"]) for one in found["stale"]] == [(id_, "failed", 5)]
        assert [one["key"] for one in found["damaged"]] == [bad]

    def test_chosen(self, plain: Ground, locks: Locks) -> None:
        """Documents are chosen by lock, holder and age. A pattern of keys means named locks only."""
        locks.stale("k")
        stuck(plain)
        assert run_json("--dry-run", "--key", "*").keys() == {"locks"}
        assert run_json("--dry-run", "--owner", "else")["test"]["found"] == 0
        assert run_json("--dry-run", "--older-than", "1h")["test"]["found"] == 0
        assert run_json("--dry-run", "--database", "mongo").keys() == {"locks", "ad exports"}
        assert run_json("--dry-run", "--kind", "test").keys() == {"test"}
        with pytest.raises(CommandError, match="no kind of locks is named 'x': there are"):
            clear("--no-input", "--kind", "x")


def shown(page: str) -> list[str]:
    """Return the documents that the forms of a page submit."""
    return [unescape(value) for value in re.findall(r'name="lock" value="([^"]*)"', page)]


class TestPage:
    """The page lists the held documents with their holders, and forces a release after a question."""

    def test_list(self, shop: Ground) -> None:
        """Held, stale and damaged documents are named so, with filters by state, lock and holder. Hostile text is
        escaped."""
        held, stale = stuck(shop, 5, holder="<b>flow"), stuck(shop, holder="other")
        damaged = stuck(shop, holder=5)
        client = browser("view_lock")

        def listed(query: str = "") -> list[bool]:
            page = client.get(ADDRESS + query).content.decode()
            return [str(each) in page for each in (held, stale, damaged)]

        page = client.get(ADDRESS).content.decode()
        assert listed() == [True, True, True]
        assert "&lt;b&gt;flow" in page
        assert "<b>flow" not in page
        assert listed("?state=held") == [True, False, False]
        assert listed("?state=stale") == [False, True, False]
        assert listed("?state=damaged") == [False, False, True]
        assert listed("?state=nonsense") == [True, True, True]
        assert listed("?owner=other") == [False, True, False]
        assert listed("?kind=ad+exports&owner=other") == [False, True, False]
        assert listed("?kind=nothing") == [False, False, False]
        assert "There is no such kind of locks." in client.get(f"{ADDRESS}?kind=nothing").content.decode()
        assert "Force the release" not in page

    def test_links(self, shop: Ground) -> None:
        """A document links to its own page in the admin, for users who may see it."""
        id_ = stuck(shop, 5)
        address = f'href="/admin/shop/ad/{id_}/change/"'
        assert address in browser("view_lock", "view_ad").get(ADDRESS).content.decode()
        assert address not in browser("view_lock").get(ADDRESS).content.decode()

    def test_many(self, plain: Ground) -> None:
        """The page shows a limited number of each lock, and more if one lock is chosen."""
        for number in range(25):
            stuck(plain, number)
        client = browser("view_lock")
        assert client.get(ADDRESS).content.decode().count('data-label="lock"') == 20
        page = client.get(f"{ADDRESS}?kind=test").content.decode()
        assert page.count('data-label="lock"') == 25
        assert "… and more" not in page

    def test_force(self, shop: Ground) -> None:
        """The question shows the effect and wants a reason. Only the shown documents are taken, and logged."""
        ad = Ad.objects.create(price=1, user_id="7", title="a bike")
        for id_ in (ad.pk, changed := stuck(shop)):
            shop.change(id_, holder="flow 7", state="exporting", time=datetime.now(UTC))
        client = browser(*MAY)
        boxes = shown(client.get(f"{ADDRESS}?kind=ad+exports").content.decode())
        page = client.post(ADDRESS, {"force": "selected", "lock": boxes}).content.decode()
        assert "These 2 locks will be taken" in page
        assert "exporting → failed" in page
        assert sorted(shown(page)) == sorted(boxes)
        page = client.post(FORCE, {"lock": boxes, "reason": ""}).content.decode()
        assert "This field is required" in page
        assert shop.read(ad.pk, "state") == "exporting"
        shop.change(changed, holder="another")
        answer = client.post(FORCE, {"lock": boxes, "reason": "web-3 is gone"}, follow=True).content.decode()
        assert "1 lock was taken from its holder." in answer
        assert f"1 lock was not changed because its holder has changed since it was shown: {changed}" in answer
        assert shop.read(ad.pk, "state", "holder") == ("failed", None)
        assert shop.read(changed, "holder") == "another"
        logged = LogEntry.objects.get()
        assert (logged.object_id, logged.object_repr) == (str(ad.pk), str(ad.pk))
        assert "it was held by flow 7. Reason: web-3 is gone" in logged.change_message

    def test_all_of_a_holder(self, plain: Ground) -> None:
        """The search for a holder offers to take all of its documents, and none of others."""
        mine = [stuck(plain, 5, holder="flow 7") for _ in range(3)]
        stuck(plain, 5)
        client = browser(*MAY)
        assert "all locks of this holder" in client.get(f"{ADDRESS}?owner=flow+7").content.decode()
        page = client.post(ADDRESS, {"force": "owner", "owner": "flow 7"}).content.decode()
        assert "These 3 locks will be taken" in page
        client.post(FORCE, {"lock": shown(page), "reason": "x"})
        assert {plain.read(id_, "state") for id_ in mine} == {"failed"}
        assert len(plain.lock.snapshots()) == 1

    def test_permission(self, plain: Ground) -> None:
        """A user who may see locks sees the documents. Forcing needs the permission of named locks, at both steps.
        Releasing a stale document needs that permission, or its own."""
        id_ = stuck(plain)
        box = shown(browser("force_release_lock", "view_lock").get(ADDRESS).content.decode())
        for permissions, clears in (((), False), (("view_lock",), False), (MAY_CLEAR, True), (MAY, True)):
            client = browser(*permissions)
            assert client.get(ADDRESS).status_code == (200 if permissions else 403)
            if permissions != MAY:
                assert client.post(ADDRESS, {"force": "selected", "lock": box}).status_code == 403
                assert client.post(FORCE, {"lock": box, "reason": "x"}).status_code == 403
            assert plain.read(id_, "state") == "exporting"
            client.post(ADDRESS, {"kind": "test"})
            assert plain.read(id_, "state") == ("failed" if clears else "exporting")
            plain.change(id_, state="exporting", holder="dead")
            plain.age(id_, 100)
        assert browser(*MAY).get(FORCE).status_code == 405

    @pytest.mark.parametrize(
        "value",
        ["", "5", "[]", '["x", "5", "me"]', '["test", {"$oid": "x"}, "me"]', '["test", [1], "me"]', '["test", "5", 5]'],
    )
    def test_forged(self, plain: Ground, value: str) -> None:
        """A value that no form of ours has is refused."""
        assert browser(*MAY).post(FORCE, {"lock": value, "reason": "x"}).status_code == 400

    def test_action(self, shop: Ground) -> None:
        """The admin of the model has the same action, behind the same question."""
        ads = [Ad.objects.create(price=1, user_id="7", title="x") for _ in range(2)]
        shop.change(ads[0].pk, holder="flow 7", state="exporting", time=datetime.now(UTC))
        action = {"action": "force_release_documents", "_selected_action": [str(ad.pk) for ad in ads]}
        client = browser("view_ad", "change_ad", *MAY)
        page = client.post("/admin/shop/ad/", action).content.decode()
        assert "This lock will be taken from its holder" in page
        client.post(FORCE, {"lock": shown(page), "reason": "x"})
        assert shop.read(ads[0].pk, "state") == "failed"
        answer = client.post("/admin/shop/ad/", action, follow=True).content.decode()
        assert "Nothing was changed: none of these locks is held now." in answer
        browser("view_ad", "change_ad", "view_lock").post("/admin/shop/ad/", action)


class TestClearing:
    """The page of all document locks, and the action of a model's own admin."""

    def test_wrong_requests(self, plain: Ground) -> None:
        """An unknown lock and an unknown method are refused."""
        client = browser(*MAY_CLEAR)
        assert client.post(ADDRESS, {"kind": "x"}).status_code == 400
        assert client.put(ADDRESS).status_code == 405

    @pytest.mark.parametrize("every", [False, True])
    def test_away(self, plain: Ground, monkeypatch: pytest.MonkeyPatch, every: bool) -> None:
        """A lock that cannot be read hides no other. If none can, the page says so with status 503, like every page."""
        stuck(plain)
        for lock in declared() if every else [ad_exports]:
            monkeypatch.setattr(lock, "context", fail)
        client = browser(*MAY_CLEAR)
        page = client.get(ADDRESS)
        assert page.status_code == (503 if every else 200)
        text = page.content.decode()
        assert ("The locks cannot be shown now" in text, "◐</span> stale" in text) == (every, not every)
        assert "it is away" in text

    def test_action(self, shop: Ground) -> None:
        """The action clears the stale ones of the selected documents. The right to change ads is not enough."""
        rest = {"price": 1, "user_id": "7", "title": "x"}
        ads = [Ad.objects.create(**rest) for _ in range(3)]
        for ad, seconds in zip(ads, (100, 100, 5), strict=True):
            shop.change(ad.pk, holder="dead", state="exporting", time=datetime.now(UTC) - timedelta(seconds=seconds))
        change = {"action": "clear_stale_documents", "_selected_action": [str(ads[0].pk), str(ads[2].pk)]}
        browser("view_ad", "change_ad").post("/admin/shop/ad/", change)
        assert shop.read(ads[0].pk, "state") == "exporting"
        answer = browser("view_ad", "change_ad", *MAY_CLEAR).post("/admin/shop/ad/", change, follow=True)
        assert "1 stale lock of “ad exports” was released." in answer.content.decode()
        assert [shop.read(ad.pk, "state") for ad in ads] == ["failed", "exporting", "exporting"]
        assert [entry_.object_id for entry_ in LogEntry.objects.all()] == [str(ads[0].pk)]


class TestDashboard:
    """The dashboard and its JSON count documents, too."""

    def test_counts(self, plain: Ground, locks: Locks) -> None:
        """Held documents, stale ones, damaged ones and the longest hold are counted. Stale and damaged ones are
        problems."""
        stuck(plain, 5), stuck(plain, 300), stuck(plain, 400, holder=None), stuck(plain, version="x")
        plain.add(1, holder="old", state="exporting")
        client = browser("view_lock", "view_lock_status", is_superuser=True)
        status = client.get("/admin/django_mongolock/lock/status/").json()
        (found,) = [each for each in status["kinds"] if each["kind"] == "test"]
        assert 300 <= found.pop("longest_held_seconds") < 400
        assert found == {"kind": "test", "held": 2, "stale": 1, "damaged": 1, "more": False, "error": None}
        problems = [(each["alarm"], each["amount"], each["about"]) for each in status["problems"]]
        assert problems == [("stale_others", 1, "test"), ("damaged_others", 1, "test")]
        page = client.get(DASHBOARD).content.decode()
        assert "Stale locks of “test”: 1. A flow that held one has died or hangs." in page
        assert f'href="{ADDRESS}?state=stale&amp;kind=test"' in page

    def test_away(self, plain: Ground, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A document lock that cannot be read is a problem, and hides nothing else."""
        monkeypatch.setattr(plain.lock, "context", fail)
        client = browser(is_superuser=True)
        page = client.get(DASHBOARD).content.decode()
        assert "Locks of another kind cannot be read: test: " in page

    def test_one_command(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each lock is counted by one command, up to a bound."""
        monkeypatch.setattr(kind, "MAX_COUNTED", 3)
        for _ in range(5):
            stuck(plain, 5)
        found = DocumentKind(plain.lock).counts()
        assert (found.held, found.more) == (3, True)


class TestForm:
    """The form of a model's own admin."""

    def test_read_only(self, shop: Ground) -> None:
        """The lock's fields are shown, not written. A save raises the version, and the flow's next write is refused."""
        held = shop.lock.acquire(Ad.objects.create(price=1, user_id="7", title="a bike", body="x"), "exporting")
        client = browser("view_ad", "change_ad")
        address = f"/admin/shop/ad/{held.id}/change/"
        page = client.get(address).content.decode()
        assert 'name="export_status"' not in page
        assert held.owner[:24] in page
        fields = dict(re.findall(r'<input type="(?:hidden|text|number)" name="(\w+)" value="([^"]*)"', page))
        data = {**fields, "price": 7, "title": "a bike", "body": "x", "user_id": "7", "export_status": "pending"}
        assert client.post(address, data).status_code == 302
        assert shop.read(held.id, "holder", "state", "price", "version") == (held.owner, "exporting", 7, 3)
        assert held.fail()
