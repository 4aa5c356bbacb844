"""Requesting and forcing releases, in the admin and by command, with the warnings, the effects, and the records."""

from __future__ import annotations

import getpass
import json
import os
import time
from typing import Any
from unittest.mock import Mock

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError
from django.test import Client

from django_mongolock import mongo_lock
from django_mongolock.history.models import LockEvent
from django_mongolock.models import Lock
from django_mongolock.signals import lock_forced, lock_release_requested
from tests.editing.staff import text_of
from tests.support.lock_documents import TOKEN, Locks, entry, waiter
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.support.looking import heard
from tests.support.waiting import eventually
from tests.test_admin import LIST, NAMES, RELEASE, browser, fields_of, notes, page_of, select
from tests.test_commands import run

pytestmark = WITH_MONGO
ASK = f"{LIST}ask-to-release/"
EVENTS = "/admin/mongolock_history/lockevent/"
ACTIONS = {"force_release": RELEASE, "ask_to_release": ASK}


@pytest.fixture
def admin() -> Client:
    """May look, ask and force."""
    return browser(*NAMES, "ask_release_lock", "view_lockevent")


def message(key: str) -> str:
    return str(LogEntry.objects.get(object_id=key).get_change_message())


class TestThePage:
    """The page shows the effect, the holders and their times before anything happens."""

    @pytest.mark.parametrize("action", ACTIONS)
    def test_says_who_and_since_when(self, locks: Locks, admin: Client, action: str) -> None:
        """Both pages show the holder and the queue, and send to an address of their own."""
        locks.add("k", [entry(1, label="nightly", user="anna")], [waiter(2), waiter(3)])
        before = locks.read("k")
        page = select(admin, action, "k")
        text = text_of(page)
        for word in ("nightly", "web-1 · pid 4001 · MainThread · user anna", "1 min 1", str(TOKEN + 1), "2 waiters"):
            assert word in text
        assert f'action="{ACTIONS[action]}"' in page.content.decode()
        assert ("The lock is not taken away" in text) == (action == "ask_to_release")
        assert ("will be taken from its holder" in text) == (action == "force_release")
        assert locks.read("k") == before

    @pytest.mark.parametrize("action", ACTIONS)
    def test_no_holder_chosen(self, locks: Locks, admin: Client, action: str) -> None:
        """If no holder is selected, nothing is done, and the page says so."""
        locks.add("k", [entry(n, mode="shared") for n in (1, 2)])
        response = admin.post(ACTIONS[action], {"reason": "x"}, follow=True)
        assert notes(response) == "No holder was selected. Nothing was changed."
        assert len(locks.read("k")["holders"]) == 2


class TestTheReason:
    """A forced release needs a reason. The reason is recorded, and the holder and the signal get it."""

    def test_force_needs_one(self, locks: Locks, admin: Client) -> None:
        """Without a reason the same page is shown again, and nothing is done."""
        locks.held("k")
        page = select(admin, "force_release", "k")
        for reason in ("", "   ", "x" * 201):
            again = admin.post(RELEASE, {**fields_of(page), "reason": reason})
            assert "errorlist" in again.content.decode()
            assert fields_of(again)["lock"] == fields_of(page)["lock"]
        assert locks.read("k")["holders"]
        assert not LogEntry.objects.exists()

    def test_again_only_for_those_who_were_shown(self, locks: Locks, admin: Client) -> None:
        """The holder changed meanwhile. The repeated page does not turn to another holder."""
        locks.held("a")
        locks.add("b", [entry(n, mode="shared") for n in (1, 2)])
        page = select(admin, "force_release", "a", "b")
        locks.collection.update_one({"_id": "a"}, {"$set": {"holders": [entry(99)]}})
        locks.collection.update_one({"_id": "b"}, {"$push": {"holders": entry(98, mode="shared")}})
        again = admin.post(RELEASE, {**fields_of(page), "reason": ""})
        assert fields_of(again)["lock"] == [
            json.dumps(["locks", "b", [TOKEN + 1]]),
            json.dumps(["locks", "b", [TOKEN + 2]]),
        ]
        locks.collection.delete_many({})
        gone = admin.post(RELEASE, {**fields_of(page), "reason": ""}, follow=True)
        assert "2 locks were not changed because their holders have changed" in notes(gone)

    def test_it_is_kept(self, locks: Locks, admin: Client) -> None:
        """The reason is kept in the log of the admin, and passed to the receivers of the signal."""
        locks.held("k")
        with heard(lock_forced) as told:
            page = select(admin, "force_release", "k")
            admin.post(RELEASE, {**fields_of(page), "reason": " web-3 hangs \u202e"})
        assert message("k").startswith(
            f"Forced its release; it was held by unknown, fencing token {TOKEN + 1}. Reason: web-3 hangs"
        )
        (facts,) = told
        assert (facts["key"], facts["by"]) == ("k", LogEntry.objects.get().user.get_username())
        assert facts["reason"].startswith("web-3 hangs")

    def test_the_holder_learns_it(self, locks: Locks, admin: Client) -> None:
        """The holder learns the requester, the place and the reason. Without a reason, the holder learns the other
        two."""
        locks.held("a", "b")
        page = select(admin, "ask_to_release", "a", "b")
        done = admin.post(ASK, {**fields_of(page), "reason": "we deploy"}, follow=True)
        name = LogEntry.objects.first().user.get_username()  # type: ignore[union-attr]
        assert locks.read("a")["holders"][0]["release_requested_by"] == f"{name}, in the admin: we deploy"
        assert "The holders of 2 locks were asked" in notes(done)
        asked = f"Asked for its release; it is held by unknown, fencing token {TOKEN + 1}."
        assert message("a") == f"{asked} Reason: we deploy"
        locks.held("c")
        admin.post(ASK, fields_of(select(admin, "ask_to_release", "c")))
        assert locks.read("c")["holders"][0]["release_requested_by"] == f"{name}, in the admin"
        assert message("c") == asked


class TestWhoIsMeant:
    """Only the shown and chosen holders are affected."""

    @pytest.mark.long
    @pytest.mark.parametrize("action", ACTIONS)
    def test_one_of_several(self, locks: Locks, admin: Client, action: str) -> None:
        """Single holders of a lock can be chosen."""
        locks.add("k", [entry(n, mode="semaphore", capacity=3) for n in (1, 2, 3)])
        page = select(admin, action, "k")
        fields = fields_of(page)
        assert fields["lock"] == [json.dumps(["locks", "k", [TOKEN + n]]) for n in (1, 2, 3)]
        admin.post(ACTIONS[action], {**fields, "lock": fields["lock"][1:2], "reason": "x"})
        found = locks.read("k")["holders"]
        if action == "force_release":
            assert [holder["token"] for holder in found] == [TOKEN + 1, TOKEN + 3]
        else:
            assert ["release_requested_by" in holder for holder in found] == [False, True, False]
        assert str(TOKEN + 2) in message("k")
        assert str(TOKEN + 3) not in message("k")


class TestTheHistory:
    """The events of a lock are on its page, and in a list of all events."""

    @pytest.mark.long
    def test_list(self, history: Any, admin: Client, commands: Commands) -> None:
        """The list has the latest first, can be filtered by kind, by the start of a key and by a pattern, and needs two
        commands at most."""
        for key in ("order:1", "order:2", "ad:1"):
            with mongo_lock(key):
                pass
        assert eventually(lambda: LockEvent.objects.count() == 6)
        commands.sent.clear()
        assert not admin.get(EVENTS).context["cl"].result_list  # nothing went wrong
        commands.sent.clear()
        response = admin.get(f"{EVENTS}?event=all")
        assert commands.names() == ["aggregate"]
        keys = [event.key for event in response.context["cl"].result_list]
        assert keys == ["ad:1"] * 2 + ["order:2"] * 2 + ["order:1"] * 2
        html = response.content.decode()
        assert all(f'title="token {event.token}"' in html for event in response.context["cl"].result_list)
        for query, count in (
            ("?q=order", 4),
            ("?q=order:1", 2),
            ("?q=*:1", 4),
            ("?q=rder", 0),
            ("?event=granted", 3),
            ("?event=granted&q=order", 2),
            ("?event=forced", 0),
            ("?event=all&q=%00", 6),  # Django takes this for no search
        ):
            assert len(admin.get(EVENTS + query).context["cl"].result_list) == count, query
        assert admin.get(f"{EVENTS}?p=2").status_code == 302
        assert admin.get(f"{EVENTS}?key__regex=x").status_code == 400
        assert page_of("order:1") in response.content.decode()


class TestTheCommand:
    """`release_lock` records the author and the reason as well."""

    def test_one_of_several(self, locks: Locks) -> None:
        """A holder is chosen by its fencing token. `list_locks` and the admin show the token."""
        locks.add("k", [entry(n, mode="shared") for n in (1, 2)])
        run("release_lock", "k", "--no-input", "--token", str(TOKEN + 2))
        assert [holder["token"] for holder in locks.read("k")["holders"]] == [TOKEN + 1]
        with pytest.raises(CommandError, match=f"'k' is not held with fencing token {TOKEN + 2}") as refusal:
            run("release_lock", "k", "--no-input", "--token", str(TOKEN + 2))
        assert refusal.value.returncode == 3
        run("release_lock", "k", "--ask", "--token", str(TOKEN + 1))
        assert locks.read("k")["holders"][0]["release_requested_by"]

    def test_many_holders(self, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """All holders are asked, even by a user of a container without a name, and all lose the lock."""
        monkeypatch.setattr(getpass, "getuser", Mock(side_effect=KeyError("getpwuid(): uid not found")))
        locks.add("k", [entry(n, mode="shared") for n in range(12)])
        assert "12 asked" in run("release_lock", "k", "--ask")[0]
        assert {each["release_requested_by"] for each in locks.read("k")["holders"]} == {
            f"user {os.getuid()}, with release_lock"
        }
        run("release_lock", "k", "--no-input")
        assert locks.read("k")["holders"] == []

    def test_damaged(self, locks: Locks) -> None:
        """The error of a damaged document names the damage, as in other commands."""
        locks.add("k", [entry(1)], change={"token": 1.5})
        for command, code in (
            ("release_lock k --no-input", 1),
            ("run_locked k --wait 1 -- x", 69),
            ("run_leader k -- x", 69),
        ):
            with pytest.raises(CommandError, match="its field 'token' is float") as refusal:
                run(*command.split())
            assert refusal.value.returncode == code


@pytest.mark.long
def test_the_holder_is_asked_and_does_as_it_sees_fit(locks: Locks) -> None:
    """The holder learns of the request at its next renewal, once each by its lock, its callback and a signal."""
    called: list[Any] = []
    with heard(lock_release_requested) as told, mongo_lock("k", lease=1, on_release_requested=called.append) as lock:
        before = lock.release_requested
        assert before is None
        out, _ = run("release_lock", "k", "--ask", "--by", "$anna: deploying")
        assert "1 asked" in out
        assert eventually(lambda: (len(called), len(told)) == (1, 1), 3)
        assert lock.release_requested == "$anna: deploying"
        assert lock.held
        time.sleep(0.7)  # two more beats
    assert (len(called), len(told)) == (1, 1)


def test_the_orm_asks(locks: Locks) -> None:
    """One lock, or all locks of a query, can be asked. Free locks are left out."""
    locks.held("order:1", "order:2", "ad:1")
    locks.free("order:3")
    assert Lock.objects.filter(key__startswith="order:").ask_to_release("me") == 2
    assert Lock.objects.get(key="ad:1").ask_to_release("me") == 1
    assert locks.read("order:1")["holders"][0]["release_requested_by"] == "me"
    assert Lock.objects.get(key="order:3").ask_to_release("me") == 0


def test_release_lock_takes_a_lock_from_its_holder(locks: Locks, caplog: pytest.LogCaptureFixture) -> None:
    """The command needs the whole key. The holder learns of its loss, and the log names the author, with Django's
    default logging."""
    lock = mongo_lock("order:5").acquire()
    with pytest.raises(CommandError, match="--no-input"):
        run("release_lock", "order:5")
    with pytest.raises(CommandError, match="control characters"):
        run("release_lock", "order:5", "--ask", "--by", "a\nb")
    out, _ = run("release_lock", "order:5", "--no-input", "--by", "anna", "--reason", "it hangs")
    (line,) = [record for record in caplog.records if record.getMessage().startswith("release forced key=order:5 ")]
    assert (line.levelname, line.getMessage().endswith('by=anna reason="it hangs"')) == ("WARNING", True)
    assert "'order:5' was taken from its holder." in out
    with pytest.raises(CommandError, match="'order:5' is not held") as refusal:
        run("release_lock", "order:5", "--no-input")
    assert refusal.value.returncode == 3
    assert not lock.release()


def test_what_is_said_fits(locks: Locks) -> None:
    """The stored text of requester and reason is cut to its limit. A token belongs to a key, whatever its number."""
    locks.held("k")
    run("release_lock", "k", "--ask", "--by", "anna", "--reason", "x" * 256)
    assert locks.read("k")["holders"][0]["release_requested_by"] == f"anna: {'x' * 250}"
    with pytest.raises(CommandError, match="--token") as refusal:
        run("release_lock", "--owner", "o", "--token", "0")
    assert refusal.value.returncode == 2
