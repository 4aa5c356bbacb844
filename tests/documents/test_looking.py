"""Who is at which document now: as querysets, in the commands, in the admin and on the dashboard; and force release."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from bson import ObjectId
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from pymongo import MongoClient

from django_mongolock import DocumentLock, DocumentLockLost, LockBackendFailed
from django_mongolock.documents.sender import Sender
from testproject.shop.models import Ad
from tests.documents.conftest import FINAL, PENDING, USUAL, Document, Ground
from tests.documents.test_sweeping import ADDRESS, ago, stuck
from tests.support.lock_documents import Locks, entry
from tests.support.lock_fixtures import NOBODY, WITH_MONGO
from tests.test_admin import browser

pytestmark = WITH_MONGO
FORCE = f"{ADDRESS}force-release/"
DASHBOARD = "/admin/django_mongolock/lock/dashboard/"


def ids(found: Any) -> list[Any]:
    return [seen.id for seen in found]


class TestQuerySet:
    """`held()`, `stale()` and their kin: lazy, chainable, by the server's clock."""

    def test_by_state(self, ground: Ground) -> None:
        """Held, stale and damaged are told apart; the one held for longest comes first; ended work is in no list."""
        stale, held = stuck(ground), stuck(ground, 5)
        untimed = ground.add(1, holder="old", state="exporting")
        damaged = stuck(ground, holder=5)
        for values in ({"holder": None}, {"state": "exported"}, {"state": "new"}):
            stuck(ground, **values)
        lock = ground.lock
        assert ids(lock.at_work()) == [untimed, stale, held]
        assert ids(lock.held()) == [untimed, held]
        assert ids(lock.stale()) == [stale]
        assert ids(lock.damaged()) == [damaged]
        states = [[seen.lock_state.value for seen in found] for found in (lock.at_work(), lock.damaged())]
        assert states == [["held", "stale", "held"], ["damaged"]]

    def test_what_is_seen(self, ground: Ground) -> None:
        """Holder, work, the failed state, since when, and how long until it is stale; the holder's own token."""
        held = ground.lock.acquire((ground.add(3), 3), "withdrawing", owner="flow 7")
        (seen,) = ground.lock.held()
        assert (seen.id, seen.version, seen.holder) == (held.id, held.version, "flow 7")
        assert (seen.state, seen.failed, seen.since) == ("withdrawing", "withdraw_failed", held.since)
        assert seen.left is not None
        assert 0 <= seen.seconds < 30 < seen.left <= 60
        held.fail()
        assert ground.lock.at_work().count() == 0

    def test_chains(self, ground: Ground) -> None:
        """Owner, state, ids and age may be combined in any order; each step leaves the former as it is."""
        mine, old = stuck(ground, 5, holder="me"), stuck(ground, 500, holder="me", state="withdrawing")
        stuck(ground, 5)
        base = ground.lock.owned_by("me")
        assert ids(base) == [old, mine]
        assert ids(base.held()) == ids(ground.lock.held().owned_by("me")) == [mine]
        assert ids(base.stale(older_than=300)) == [old]
        assert ids(base.stale(older_than=3_000)) == []
        assert ids(base.in_state("exporting")) == ids(base.with_ids([mine])) == [mine]
        assert ids(base.with_ids([])) == []
        assert ids(base) == [old, mine]

    def test_slices(self, plain: Ground) -> None:
        """They are read by the server, and counted; what a slice cannot mean is refused."""
        found = [stuck(plain, 100 - number) for number in range(5)]
        lock = plain.lock
        assert ids(lock.at_work()[:2]) == found[:2]
        assert ids(lock.at_work()[1:3]) == found[1:3]
        assert (lock.at_work()[0].id, lock.at_work()[3:].count(), len(lock.at_work()[:0])) == (found[0], 2, 0)
        first = lock.at_work().first()
        assert first is not None
        assert first.id == found[0]
        assert lock.at_work().owned_by("x").first() is None
        for wrong in (slice(-1, None), slice(2, 1), slice(None, None, 2)):
            with pytest.raises(ValueError, match="a slice of documents"):
                lock.at_work()[wrong]
        with pytest.raises(TypeError, match="filter the documents before"):
            lock.at_work()[:2].owned_by("me")

    def test_lazy(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is sent until it is needed, and then once."""
        calls: list[object] = []
        send = Sender.send

        def count(*given: Any) -> Any:
            calls.append(given)
            return send(*given)

        monkeypatch.setattr(Sender, "send", count)
        found = plain.lock.held().owned_by("x")
        assert calls == []
        assert (bool(found), len(found), list(found)) == (False, 0, [])
        assert len(calls) == 1

    def test_wrong(self, plain: Ground) -> None:
        """A negative age, also of a sweep, and a state that is not pending are refused at once."""
        with pytest.raises(ValueError, match="older_than"):
            plain.lock.stale(older_than=-5)
        with pytest.raises(ValueError, match="older_than"):
            plain.lock.clear_stale(older_than=-5)
        with pytest.raises(ValueError, match="'exported' was not declared as a pending state"):
            plain.lock.held().in_state("exported")

    def test_async(self, ground: Ground) -> None:
        """The same for coroutines: iteration, count, first, force release."""
        id_ = stuck(ground, 5, holder="me")

        async def all_of_it() -> list[Any]:
            found = ground.lock.held()
            first = await found.afirst()
            assert first is not None
            return [[seen.id async for seen in found], await found.acount(), first.id, await found.aforce_release()]

        assert asyncio.run(all_of_it()) == [[id_], 1, id_, 1]
        assert ground.read(id_, "state", "holder") == ("failed", None)


class TestForceRelease:
    """A document is taken from its holder before it is stale."""

    def test_all_of_an_owner(self, ground: Ground) -> None:
        """Each document gets the failed state of its work; those of others stay. What the holder writes is refused."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting", owner="dead flow")
        second, other = stuck(ground, 5, holder="dead flow", state="withdrawing"), stuck(ground, 5)
        assert ground.lock.owned_by("dead flow").force_release(by="anna", reason="web-3 is gone") == 2
        assert ground.read(held.id, "state", "holder", "time") == ("failed", None, None)
        assert ground.read(second, "state") == "withdraw_failed"
        assert ground.read(other, "state", "holder") == ("exporting", "dead")
        with pytest.raises(DocumentLockLost):
            held.finish("exported")
        assert ground.lock.owned_by("dead flow").force_release() == 0

    @pytest.mark.long
    def test_only_as_shown(self, ground: Ground) -> None:
        """A document that has another holder by now, is finished, or is damaged, is left as it is."""
        changed, finished, damaged, same = (stuck(ground, 5) for _ in range(4))
        shown = list(ground.lock.at_work())
        ground.change(changed, holder="another")
        ground.change(finished, state="exported", holder=None)
        ground.change(damaged, version="x")
        assert ids(ground.lock.force_release(shown)) == [same]
        assert ground.read(changed, "holder", "state") == ("another", "exporting")
        assert ground.read(finished, "state") == "exported"
        assert ground.read(damaged, "state") == "exporting"

    def test_async_as_shown(self, plain: Ground) -> None:
        """See above."""
        id_ = stuck(plain, 5)
        shown = list(plain.lock.at_work())
        assert ids(asyncio.run(plain.lock.aforce_release(shown))) == [id_]

    def test_lost_answer(self, plain: Ground, failpoint: Callable[..., None]) -> None:
        """If the answer to the update is lost, the documents that it released are counted all the same."""
        id_ = stuck(plain, 5)
        shown = list(plain.lock.at_work())
        failpoint("update", times=1, writeConcernError={"code": 64, "errmsg": "waiting for replication timed out"})
        assert ids(plain.lock.force_release(shown)) == [id_]

    def test_log(self, plain: Ground, caplog: pytest.LogCaptureFixture) -> None:
        """Each is logged, with its former holder, who did it and why."""
        id_ = stuck(plain, 5)
        with caplog.at_level("INFO", "django_mongolock"):
            plain.lock.at_work().force_release(by="anna", reason="it hangs")
        (line,) = [record.getMessage() for record in caplog.records if "forced" in record.getMessage()]
        assert re.findall(r"document=(\S+).* holder=dead by=anna reason=(.*)", line) == [(id_, '"it hangs"')]

    def test_batches(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of them, so many at a time."""
        monkeypatch.setattr("django_mongolock.documents.forcing.FORCE_BATCH", 2)
        found = [stuck(plain, 5) for _ in range(5)]
        assert plain.lock.at_work().force_release() == 5
        assert {plain.read(id_, "state") for id_ in found} == {"failed"}


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A terminal; what it answers to the questions, and then the questions."""
    answers: list[str] = []

    def ask(question: str) -> str:
        answers.append(question)
        return answers.pop(0)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    return answers


class TestListLocks:
    """list_locks lists documents after the named locks."""

    @pytest.mark.long
    def test_table(self, plain: Ground, locks: Locks) -> None:
        """Held ones by default; all or the stale if asked for; none for a pattern of keys or for waiters."""
        held, stale, damaged = stuck(plain, 5, holder="flow\x1b[2J"), stuck(plain), stuck(plain, version="x")
        text = run("list_locks")
        assert "Documents of test:" in text
        assert re.search(rf"{held} +held +exporting +flow\\u001b\[2J +\d", text)
        assert stale not in text
        assert re.search(rf"{stale} +stale +exporting +dead +1 min", run("list_locks", "--stale"))
        text = run("list_locks", "--all", "--wide")
        assert all(each in text for each in (held, stale, damaged, "is str, not a whole number"))
        assert all("Documents" not in run("list_locks", *more) for more in (["--key", "*"], ["--waiting"]))

    @pytest.mark.long
    def test_chosen(self, plain: Ground, locks: Locks) -> None:
        """One document lock, one owner, so many."""
        found = [stuck(plain, 9 - number, holder="me") for number in range(3)]
        stuck(plain, 5)
        text = run("list_locks", "--document-lock", "test", "--owner", "me", "--limit", "2")
        assert [each in text for each in found] == [True, True, False]
        assert "… and more: see --limit." in text
        assert "dead" not in text
        assert "There are no such locks" not in text
        with pytest.raises(CommandError, match="no document lock 'x'"):
            run("list_locks", "--document-lock", "x")

    def test_json(self, make: Callable[..., Ground], locks: Locks) -> None:
        """Each document lock with its documents, as on the page."""
        ground = make("model")
        id_ = stuck(ground, 5)
        listed = json.loads(run("list_locks", "--json"))
        (found,) = [each for each in listed["documents"] if each["lock"] == "test"]
        (row,) = found["documents"]
        assert (row["id"], row["holder"], row["lock_state"], row["state"]) == (str(id_), "dead", "held", "exporting")
        assert 0 < row["left_seconds"] < 60
        assert (found["more"], found["error"]) == (False, None)

    @pytest.mark.long
    def test_away(self, plain: Ground, locks: Locks, forget: None) -> None:
        """A document lock that cannot be read hides no other, and the exit code is 1."""
        away: MongoClient[Document] = MongoClient(NOBODY)
        options: Any = {**USUAL, "pending": PENDING, "final": FINAL, "stale_after": 1}
        DocumentLock[Document](away["x"]["y"], **options, name="away", timeout=0.2)
        id_, out = stuck(plain, 5), io.StringIO()
        with pytest.raises(CommandError, match="away: MongoDB did not answer"):
            call_command("list_locks", stdout=out)
        assert id_ in out.getvalue()
        away.close()


class TestReleaseLock:
    """release_lock takes documents, too."""

    @pytest.mark.long
    @pytest.mark.parametrize("answer", ["y", "n"])
    def test_one(self, ground: Ground, locks: Locks, terminal: list[str], answer: str) -> None:
        """After a question that shows the holder."""
        id_ = stuck(ground, 5)
        terminal.append(answer)
        if answer == "y":
            text = run("release_lock", str(id_), "--document-lock", "test")
            assert re.search(rf"{id_} +held +exporting +dead", text)
            assert "1 of 1 documents of test were taken" in text
        else:
            with pytest.raises(CommandError, match="nothing was released"):
                run("release_lock", str(id_), "--document-lock", "test")
        assert terminal == ["Take these from their holder? [y/N] "]
        assert ground.read(id_, "state") == ("failed" if answer == "y" else "exporting")

    @pytest.mark.long
    @pytest.mark.parametrize("id_", [5, -5, "5", ObjectId(), "x y"])
    def test_ids(self, plain: Ground, locks: Locks, id_: object) -> None:
        """An id is written as it is listed, whatever its type; if that could mean two documents, both stay."""
        plain.collection.insert_one({"_id": id_, "lockedBy": "dead", "exportStatus": "exporting", "documentVersion": 1})
        run("release_lock", "--document-lock", "test", "--no-input", "--", str(id_))
        assert plain.read(id_, "state") == "failed"

    @pytest.mark.long
    def test_ambiguous(self, plain: Ground, locks: Locks) -> None:
        """See above."""
        held = {"lockedBy": "dead", "exportStatus": "exporting", "documentVersion": 1}
        plain.collection.insert_many([{"_id": 5, **held}, {"_id": "5", **held}])
        with pytest.raises(CommandError, match=r"several documents of test have the id 5 \((int, str|str, int)\)"):
            run("release_lock", "5", "--document-lock", "test", "--no-input")
        assert plain.lock.at_work().count() == 2

    def test_of_an_owner(self, plain: Ground, locks: Locks, terminal: list[str]) -> None:
        """All documents and all named locks, after one question that shows them; with --document-lock, only its."""
        mine, other = stuck(plain, 5, holder="flow 7"), stuck(plain, 5)
        locks.add("k", holders=[entry(owner="flow 7")])
        locks.add("other", holders=[entry()])
        terminal.append("y")
        text = run("release_lock", "--owner", "flow 7", "--reason", "it is dead")
        assert "1 of 1 documents of test were taken" in text
        assert "1 of 1 locks were taken" in text
        assert re.search(r"^k +held", text, re.MULTILINE)
        assert (plain.read(mine, "state"), plain.read(other, "state")) == ("failed", "exporting")
        assert (locks.read("k")["holders"], len(locks.read("other")["holders"])) == ([], 1)

        locks.add("l", holders=[entry(owner="dead")])
        run("release_lock", "--owner", "dead", "--document-lock", "test", "--no-input")
        assert plain.read(other, "state") == "failed"
        assert len(locks.read("l")["holders"]) == 1

    @pytest.mark.parametrize(
        ("arguments", "says", "code"),
        [
            ([], "name either the KEY of a lock, or --owner", 2),
            (["k", "--owner", "x"], "name either the KEY of a lock, or --owner", 2),
            (["k", "--document-lock", "test", "--ask"], "--ask and --token are for the KEY", 2),
            (["--owner", "x", "--token", "5"], "--ask and --token are for the KEY", 2),
            (["k", "--document-lock", "test", "--document-lock", "x"], "of one --document-lock", 2),
            (["k", "--document-lock", "x"], "no document lock 'x' was declared", 2),
            (["k", "--document-lock", "test"], "no document 'k' of test is held now", 3),
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

    def test_without_a_terminal(self, plain: Ground, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is done without a confirmation."""
        monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
        id_ = stuck(plain, 5)
        with pytest.raises(CommandError, match="use --no-input"):
            run("release_lock", "--owner", "dead")
        assert plain.read(id_, "state") == "exporting"


MAY = ("view_lock", "force_release_lock")


def shown(page: str) -> list[str]:
    """What the forms of a page submit as documents."""
    return [unescape(value) for value in re.findall(r'name="document" value="([^"]*)"', page)]


class TestAdmin:
    """The page lists who is at which document, and forces a release after a question."""

    @pytest.mark.long
    def test_list(self, make: Callable[..., Ground]) -> None:
        """Held, stale and damaged documents by word; filters by state, lock and holder; hostile text is escaped."""
        ground = make("model")
        held, stale = stuck(ground, 5, holder="<b>flow"), stuck(ground, holder="other")
        damaged = stuck(ground, holder=5)
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
        assert listed("?lock=ad+exports&owner=other") == [False, True, False]
        assert listed("?lock=nothing") == [False, False, False]
        assert "There is no such document lock." in client.get(f"{ADDRESS}?lock=nothing").content.decode()
        assert "Force the release" not in page

    @pytest.mark.long
    def test_links(self, make: Callable[..., Ground]) -> None:
        """A document leads to its own page in the admin, for those who may see it."""
        id_ = stuck(make("model"), 5)
        address = f'href="/admin/shop/ad/{id_}/change/"'
        assert address in browser("view_lock", "view_ad").get(ADDRESS).content.decode()
        assert address not in browser("view_lock").get(ADDRESS).content.decode()

    @pytest.mark.long
    def test_many(self, plain: Ground) -> None:
        """So many of each lock, and more of them if one lock is shown."""
        for number in range(25):
            stuck(plain, number)
        client = browser("view_lock")
        assert client.get(ADDRESS).content.decode().count('data-label="document"') == 20
        page = client.get(f"{ADDRESS}?lock=test").content.decode()
        assert page.count('data-label="document"') == 25
        assert "… and more" not in page

    @pytest.mark.long
    def test_force(self, make: Callable[..., Ground]) -> None:
        """The question shows what will happen and wants a reason; then only what was shown is taken, and logged."""
        ground = make("model")
        ad = Ad.objects.create(price=1, user_id="7", title="a bike")
        for id_ in (ad.pk, changed := stuck(ground)):
            ground.change(id_, holder="flow 7", state="exporting", time=datetime.now(UTC))
        client = browser(*MAY)
        boxes = shown(client.get(f"{ADDRESS}?lock=test").content.decode())
        page = client.post(ADDRESS, {"force": "selected", "document": boxes}).content.decode()
        assert "These 2 documents will be taken" in page
        assert "exporting → failed" in page
        assert sorted(shown(page)) == sorted(boxes)
        page = client.post(FORCE, {"document": boxes, "reason": ""}).content.decode()
        assert "This field is required" in page
        assert ground.read(ad.pk, "state") == "exporting"
        ground.change(changed, holder="another")
        answer = client.post(FORCE, {"document": boxes, "reason": "web-3 is gone"}, follow=True).content.decode()
        assert "1 document was taken from its holder." in answer
        assert "1 document was not changed because it has another holder now, or none." in answer
        assert ground.read(ad.pk, "state", "holder") == ("failed", None)
        assert ground.read(changed, "holder") == "another"
        logged = LogEntry.objects.get()
        assert (logged.object_id, logged.object_repr) == (str(ad.pk), "a bike")
        assert "it was held by flow 7. Reason: web-3 is gone" in logged.change_message

    def test_all_of_a_holder(self, plain: Ground) -> None:
        """The search for a holder offers to take all its documents; of other holders none."""
        mine = [stuck(plain, 5, holder="flow 7") for _ in range(3)]
        stuck(plain, 5)
        client = browser(*MAY)
        assert "all documents of this holder" in client.get(f"{ADDRESS}?owner=flow+7").content.decode()
        page = client.post(ADDRESS, {"force": "owner", "owner": "flow 7"}).content.decode()
        assert "These 3 documents will be taken" in page
        client.post(FORCE, {"document": shown(page), "reason": "x"})
        assert {plain.read(id_, "state") for id_ in mine} == {"failed"}
        assert plain.lock.at_work().count() == 1

    @pytest.mark.parametrize("force", ["selected", "owner"])
    def test_nothing_to_force(self, plain: Ground, force: str) -> None:
        """Nothing selected, or an owner who holds nothing: the page says so."""
        answer = browser(*MAY).post(ADDRESS, {"force": force, "owner": "x"}, follow=True)
        assert re.search(r"Nothing was changed|holds no document now", answer.content.decode())

    def test_permission(self, plain: Ground) -> None:
        """To force takes the permission that named locks have for it, at both steps."""
        id_ = stuck(plain, 5)
        box = shown(browser(*MAY).get(ADDRESS).content.decode())
        for client in (browser("view_lock", "clear_document_lock"), browser("view_lock")):
            assert client.post(ADDRESS, {"force": "selected", "document": box}).status_code == 403
            assert client.post(FORCE, {"document": box, "reason": "x"}).status_code == 403
        assert browser(*MAY).get(FORCE).status_code == 405
        assert plain.read(id_, "state") == "exporting"

    @pytest.mark.parametrize(
        "value", ["", "5", "[]", '["x", "5", "me"]', '["test", "{", "me"]', '["test", "[1]", "me"]', '["test", "5", 5]']
    )
    def test_forged(self, plain: Ground, value: str) -> None:
        """What no form of ours has is refused."""
        assert browser(*MAY).post(FORCE, {"document": value, "reason": "x"}).status_code == 400

    def test_action(self, make: Callable[..., Ground]) -> None:
        """The admin of the model has the same, behind the same question."""
        ground = make("model")
        ads = [Ad.objects.create(price=1, user_id="7", title="x") for _ in range(2)]
        ground.change(ads[0].pk, holder="flow 7", state="exporting", time=datetime.now(UTC))
        action = {"action": "force_release_documents", "_selected_action": [str(ad.pk) for ad in ads]}
        client = browser("view_ad", "change_ad", *MAY)
        page = client.post("/admin/shop/ad/", action).content.decode()
        assert "This document will be taken from its holder" in page
        client.post(FORCE, {"document": shown(page), "reason": "x"})
        assert ground.read(ads[0].pk, "state") == "failed"
        answer = client.post("/admin/shop/ad/", action, follow=True).content.decode()
        assert "None of the selected documents is held now." in answer
        browser("view_ad", "change_ad", "view_lock").post("/admin/shop/ad/", action)


class TestDashboard:
    """The dashboard and its JSON count documents, too."""

    @pytest.mark.long
    def test_counts(self, plain: Ground, locks: Locks) -> None:
        """Held, stale, damaged, the longest hold; stale and damaged ones are problems."""
        stuck(plain, 5), stuck(plain, 300), stuck(plain, 400, holder=None), stuck(plain, version="x")
        plain.add(1, holder="old", state="exporting")
        client = browser("view_lock", "view_lock_status", is_superuser=True)
        status = client.get("/admin/django_mongolock/lock/status/").json()
        (found,) = [each for each in status["documents"] if each["lock"] == "test"]
        assert 300 <= found.pop("longest_held_seconds") < 400
        assert found == {"lock": "test", "held": 2, "stale": 1, "damaged": 1, "more": False, "error": None}
        problems = [(each["alarm"], each["amount"], each["about"]) for each in status["problems"]]
        assert problems == [("stale_documents", 1, "test"), ("damaged_documents", 1, "test")]
        page = client.get(DASHBOARD).content.decode()
        assert "1 document of “test” is stale: the flow that held it has died or hangs." in page
        assert f'href="{ADDRESS}?state=stale&amp;lock=test"' in page

    @pytest.mark.long
    def test_away(self, plain: Ground, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A document lock that cannot be read is a problem, and hides nothing else."""

        def fail() -> None:
            raise LockBackendFailed("it is away")

        monkeypatch.setattr(plain.lock, "_sender", fail)
        client = browser(is_superuser=True)
        page = client.get(DASHBOARD).content.decode()
        assert "Documents cannot be read: test: " in page
        assert "ad exports" in page

    def test_one_command(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each lock is counted by one command, up to a bound."""
        from django_mongolock.documents import counts

        monkeypatch.setattr(counts, "MAX_COUNTED", 3)
        for _ in range(5):
            stuck(plain, 5)
        found = counts._count(plain.lock)
        assert (found.held, found.more) == (3, True)


def test_age_of_a_fresh_one(plain: Ground) -> None:
    """A time of the future, from another server's clock, is no negative age anywhere."""
    stuck(plain, -1_000)
    (seen,) = plain.lock.held()
    assert (seen.seconds, seen.as_json()["left_seconds"]) == (0.0, 60.0)
    assert ago(0) < datetime.now(UTC)
