"""The admin of the locks at 3 a.m.: pages, actions, permissions, and robustness."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin import AdminSite, site
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client, RequestFactory
from django.urls import NoReverseMatch, path, reverse
from django.utils.timezone import localtime

from django_mongolock.admin import listing
from django_mongolock.admin.dashboard import LockDashboardAdmin
from django_mongolock.admin.lock_admin import LockAdmin
from django_mongolock.exceptions import LockBackendFailed, printable
from django_mongolock.inspection import named_locks, operations, queries
from django_mongolock.inspection.display import quote_key, unquote_key
from django_mongolock.models import Lock, LockQuerySet
from django_mongolock.models.lock_model import LockDashboard
from tests.editing.staff import text_of
from tests.support.lock_documents import DAMAGE, HOSTILE_KEYS, TOKEN, Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.support.programs import python
from tests.test_commands import run

pytestmark = WITH_MONGO

LIST = "/admin/django_mongolock/lock/"
DASHBOARD = "/admin/django_mongolock/lockdashboard/"
RELEASE = f"{LIST}force-release/"
NAMES = ("view_lock", "force_release_lock")


def page_of(key: str) -> str:
    return reverse("admin:django_mongolock_lock_change", args=[quote_key(key)])


def browser(*permissions: str, **fields: Any) -> Client:
    user = User.objects.create(**{"username": f"user{User.objects.count()}", "is_staff": True, **fields})
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(enforce_csrf_checks=False)
    client.force_login(user)
    return client


@pytest.fixture
def admin() -> Client:
    return browser(*NAMES)


def rows(response: Any) -> list[str]:
    """Return the keys that a list shows, in order."""
    return [lock.key for lock in response.context["cl"].result_list]


def select(client: Client, action: str, *keys: str, query: str = "?state=all", **fields: Any) -> Any:
    """Choose locks in the list and an action."""
    return client.post(LIST + query, {"action": action, "index": 0, "_selected_action": keys, **fields})


def fields_of(response: Any) -> dict[str, list[str]]:
    """Return the fields that the form of a page sends if nothing is typed."""
    form = response.content.decode().split('id="content-main"')[1]
    fields: dict[str, list[str]] = {}
    for tag in re.findall(r"<input[^>]*>", form):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        if name and value and not ('type="checkbox"' in tag and "checked" not in tag):
            fields.setdefault(html.unescape(name[1]), []).append(html.unescape(value[1]))
    return fields


def confirm(client: Client, page: Any, url: str = RELEASE) -> Any:
    """Say yes on the page that asks."""
    return client.post(url, {**fields_of(page), "reason": "it hangs"}, follow=True)


def notes(response: Any) -> str:
    return " | ".join(str(message) for message in response.context["messages"])


class TestList:
    """The list shows the holders, the times held and left, and the waiters."""

    @pytest.fixture(autouse=True)
    def some(self, locks: Locks) -> None:
        locks.add(
            "order:5",
            [entry(1, left=595, label="nightly", place="task shop.tasks.export 7d0", user="anna", owner="job-1")],
            [waiter(2), waiter(3), waiter(4, left=-5)],
        )
        locks.add("catalog", [entry(n, mode="shared", host=f"web-{n}", left=900, held_for=90) for n in range(2, 7)])
        locks.stale("left:behind")
        locks.free("free:1")

    def test_columns(self, admin: Client) -> None:
        """The row of a held lock shows all of its facts, but no grant and no session."""
        response = admin.get(LIST)
        text = text_of(response)
        for word in ("order:5", "● works", "catalog"):
            assert word in text
        (who,) = re.findall(r"nightly .*?id 7d0", text)
        assert (
            who == "nightly web-1 · pid 4001 · MainThread · task shop.tasks.export · user anna · owner job-1 · id 7d0"
        )
        assert f'title="{localtime(entry()["acquired_at"]):%Y-%m-%d %H:%M:}'[:20] in response.content.decode()
        assert re.search(r"held for 1 min 1\d s lease left 9 min 5\d s waiting 2 longest wait 1 min 1\d s", text)
        assert "and 4 more" in text
        assert "secret" not in response.content.decode()
        assert str(TOKEN + 1) not in response.content.decode()

    def test_nothing_is_shown_twice(self, admin: Client, locks: Locks) -> None:
        """A Celery task is label, place and owner at once. The name and the id of the task are shown once each."""
        locks.add("once", [entry(9, label="shop.tasks.bill", place="task shop.tasks.bill 7d0f-1", owner="7d0f-1")])
        text = text_of(admin.get(f"{LIST}?q=once"))
        assert "shop.tasks.bill web-1 · pid 4009 · MainThread · id 7d0f-1" in text
        assert (text.count("shop.tasks.bill"), text.count("7d0f-1")) == (1, 1)

    @pytest.mark.parametrize(
        ("query", "keys"),
        [
            ("", ["catalog", "order:5"]),
            ("?state=waited", ["order:5"]),
            ("?state=stale", ["left:behind"]),
            ("?state=free", ["free:1"]),
            ("?state=all", ["catalog", "free:1", "left:behind", "order:5"]),
            ("?o=-1&state=all", ["order:5", "left:behind", "free:1", "catalog"]),
            ("?o=5", ["order:5", "catalog"]),
            ("?o=4", ["catalog", "order:5"]),
            ("?o=-6", ["catalog", "order:5"]),
            ("?o=7", ["order:5", "catalog"]),
            ("?o=7&state=all", ["catalog", "free:1", "left:behind", "order:5"]),
            ("?o=99.x.3", ["catalog", "order:5"]),
        ],
    )
    def test_filters_and_order(self, admin: Client, query: str, keys: list[str]) -> None:
        """Held locks are shown first, with the longest hold at the top. Each column sorts, except in the list of free
        locks, because there may be a million of those."""
        assert rows(admin.get(LIST + query)) == keys

    @pytest.mark.parametrize("column", ["since", "left", "waiting", "waited", "key_link"])
    def test_an_order_is_a_field_or_an_expression(self, admin: Client, column: str) -> None:
        """Each column sorts by a field or an expression of querysets, in the order of the list. Django 6.1 checks this
        (F141)."""
        by = getattr(LockAdmin, column).admin_order_field
        found = Lock.objects.held().order_by(by)
        listed = rows(admin.get(f"{LIST}?o={LockAdmin.list_display.index(column) + 1}"))
        assert [lock.key for lock in found] == listed

    @pytest.mark.parametrize("state", ["", "held", "waited", "kept", "stale", "free", "all"])
    def test_the_default_order_is_one_of_querysets(self, state: str) -> None:
        """The default order is a field or an expression of querysets, for each state (F141)."""
        request = RequestFactory().get(LIST, {"state": state})
        order = LockAdmin(Lock, site).get_ordering(request)
        assert {lock.key for lock in Lock.objects.order_by(*order)} == {"catalog", "order:5", "left:behind", "free:1"}

    @pytest.mark.parametrize("query", ["", "?state=waited", "?state=stale", "?state=all"])
    def test_fewer_columns(self, admin: Client, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
        """A project's own admin may leave out the column by which the list is sorted."""
        monkeypatch.setattr(LockAdmin, "list_display", ("state", "who"))
        assert rows(admin.get(LIST + query))

    def test_order_of_equals(self, admin: Client, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lock with several holders is as old as its first one. Equal locks are in the order of their keys, so that
        no page repeats another. Beyond the number of locks that are sorted, the locks with the first ends of leases are
        taken."""
        locks.collection.delete_many({})
        locks.add("two", [entry(1, mode="shared", held_for=5), entry(2, mode="shared", held_for=500)])
        same, end = entry(3, held_for=100), now() + timedelta(seconds=900)
        for number, key in enumerate("abc"):
            locks.add(key, [{**same, "until": end - timedelta(seconds=number)}])
        assert rows(admin.get(LIST)) == ["two", "a", "b", "c"]
        monkeypatch.setattr(queries, "MAX_SORTED", 2)
        assert rows(admin.get(LIST)) == ["two", "c"]

    @pytest.mark.parametrize(
        ("text", "keys"),
        [
            ("order", ["order:5"]),
            ("ORDER:", []),
            ("er:*", []),
            ("order:??", []),
            ("job-1", ["order:5"]),
            ("nightly", ["order:5"]),
            ("web-3", ["catalog"]),
            (".*", []),
            ("  order  ", ["order:5"]),
            ("x" * 2_000, []),
            ("\ud800", []),
        ],
    )
    def test_search(self, admin: Client, text: str, keys: list[str]) -> None:
        """F56: A search is the start of a key, a pattern for the whole key, or a whole word of a holder. Regular
        expressions are not used."""
        query = urlencode({"q": text}, errors="replace")
        assert rows(admin.get(f"{LIST}?{query}")) == keys

    def test_search_finds_every_state(self, admin: Client, locks: Locks) -> None:
        locks.free("look:free")
        locks.stale("look:stale")
        locks.held("look:held")
        assert sorted(rows(admin.get(f"{LIST}?q=look:"))) == ["look:free", "look:held", "look:stale"]
        assert rows(admin.get(f"{LIST}?q=look:&state=stale")) == ["look:stale"]
        assert rows(admin.get(f"{LIST}?q=look:&state=held")) == ["look:held"]
        assert "look:free" not in rows(admin.get(f"{LIST}?q=%20"))

    @pytest.mark.parametrize("query", ["?key__regex=(a%2B)%2B$", "?holders__host=web-1", "?key__contains=x", "?pk=1"])
    def test_no_lookups_from_the_address(self, admin: Client, query: str) -> None:
        """A lookup in the address cannot make the server evaluate a slow expression."""
        assert admin.get(LIST + query).status_code == 400

    def test_the_longest_wait_first(self, admin: Client, locks: Locks) -> None:
        """Waits are sorted by the living waiters. A waiter that died in the queue counts for nothing."""
        locks.add("older", [entry(1)], [waiter(2, left=-5, held_for=400), waiter(3, held_for=50)])
        locks.add("oldest", [entry(1)], [waiter(2, held_for=20), waiter(3, held_for=300)])
        response = admin.get(f"{LIST}?state=waited")
        assert rows(response) == ["oldest", "order:5", "older"]
        assert re.search(
            r"longest wait 5 min \d s .* longest wait 1 min 1\d s .* longest wait 5\d s", text_of(response)
        )


class TestNext:
    """The next step of an operator: ask, force, look at the process, or nothing."""

    def test_links_ask_first(self, admin: Client, locks: Locks) -> None:
        """The page of a lock links to the question and back. Nothing changes before the question is answered."""
        locks.held("order/5&6", left=33)
        before = locks.read("order/5&6")
        page = admin.get(page_of("order/5&6"))
        (address,) = re.findall(r'href="([^"]*force-release/[^"]*)"', page.content.decode())
        asked = admin.get(html.unescape(address))
        assert "Force release?" in text_of(asked)
        assert html.escape(page_of("order/5&6")) in asked.content.decode()
        assert locks.read("order/5&6") == before
        done = confirm(admin, asked)
        assert "1 lock was taken" in notes(done)
        assert locks.read("order/5&6")["holders"] == []
        assert "none of these locks is held now" in notes(admin.get(html.unescape(address), follow=True))


class TestKept:
    """A lock that is only kept for a minimum hold is not held, because nobody is at work."""

    @pytest.fixture(autouse=True)
    def some(self, locks: Locks) -> None:
        locks.held("at:work")
        done = now() - timedelta(seconds=700)
        locks.add("once", [entry(2, left=9_000, held_for=800, label="bill", released=done)])
        locks.add("over", [entry(3, left=-5, released=done)])
        locks.add("both", [entry(4, left=500, mode="shared", released=done), entry(5, mode="shared", label="reads")])

    def test_list_and_page(self, admin: Client) -> None:
        """Kept locks have a list of their own. The page shows the end of the work, and no pid that may be dead."""
        assert rows(admin.get(LIST)) == ["at:work", "both"] or rows(admin.get(LIST)) == ["both", "at:work"]
        response = admin.get(f"{LIST}?state=kept")
        assert rows(response) == ["once"]
        for text in (text_of(response), text_of(admin.get(page_of("once")))):
            assert "◇ kept" in text
            assert re.search(r"bill done 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC on web-1", text)
            assert "4002" not in text
        assert re.search(
            r"once ◇ kept Its work is done, .* If you do nothing: free in 2 h .* bill .* held for – lease left 2 h",
            text_of(response),
        )
        assert "kept until" in text
        assert "Ask to release" not in text
        assert "The lock is free" not in text
        assert re.search(r"both ● works Renewed .* reads and 1 more web-1 · pid 4005", text_of(admin.get(LIST)))

    def test_the_job_runs_again(self, admin: Client, locks: Locks) -> None:
        """The question names the job that will run again. A request for its release finds no holder."""
        asked = text_of(select(admin, "force_release", "once"))
        assert "The job will run again." in asked
        assert "The holder's work is not stopped" not in asked
        listed = select(admin, "ask_to_release", "once", follow=True).client.get(LIST)
        assert "none of these locks is held now" in notes(listed)
        both = text_of(select(admin, "ask_to_release", "once", "at:work"))
        assert "Skipped because its work is done, and no holder can be asked: once" in both
        confirm(admin, select(admin, "force_release", "once"))
        assert locks.read("once")["holders"] == []

    def test_over(self, admin: Client, locks: Locks) -> None:
        """When its minimum hold is over, the lock is free on every page and in the list of the command."""
        locks.add("past", [entry(1, left=-5, held_for=100, released=now() - timedelta(seconds=60))])
        assert "past ○ free – held for – lease left – waiting 0" in text_of(admin.get(f"{LIST}?state=free"))
        page = text_of(admin.get(page_of("past")))
        assert "Held by (0) The lock is free." in page
        assert "mean time held 2.5 s" in page
        assert re.search(r"past free; last granted 1 min 4\d s ago", text_of(admin.get(DASHBOARD)))
        assert re.search(r"past +free +- +- +- +0", run("list_locks", "--all")[0])


class TestEmpty:
    """A list without locks says why, and where to look."""

    @pytest.mark.long
    def test_nothing_found(self, locks: Locks, admin: Client) -> None:
        """A search in held locks offers a search in all. A search in all offers to look inside of keys."""
        locks.free("x")
        assert "Search all locks" not in text_of(admin.get(f"{LIST}?q=%22%3E%3Cx"))
        assert "Search inside keys too" in text_of(admin.get(f"{LIST}?q=%22%3E%3Cx"))
        assert "Search all locks" in text_of(admin.get(f"{LIST}?state=held&q=x"))
        response = admin.get(f"{LIST}?state=held&q=%22%3E%3Cx")
        assert "?state=all&amp;q=%22%3E%3Cx" in response.content.decode()


class TestPage:
    def test_held(self, locks: Locks, admin: Client) -> None:
        """The page shows the holders, the waiters in their order, and the counts."""
        locks.add(
            "k", [entry(1, mode="semaphore", capacity=3, more_permits=1)], [waiter(7, host="b"), waiter(8, host="a")]
        )
        text = text_of(admin.get(page_of("k")))
        assert "Held by (1)" in text
        assert "2 of 3 permits" in text
        assert re.search(r"1 unknown b · pid 4007 .* 2 unknown a · pid 4008", text)
        for fact in (
            "acquisitions 41",
            "after a wait 7",
            "mean wait of these 1.2 s",
            "mean time held 2.5 s",
            "longest wait 4.1 s",
            "longest time held 1 min 31 s",
        ):
            assert fact in text
        assert f"last fencing token {TOKEN + 50}" in text
        assert "secret" not in text

    def test_purged(self, locks: Locks, admin: Client) -> None:
        """The page of a lock that is gone leads back to the list, with a message."""
        response = admin.get(page_of("gone"), follow=True)
        assert "There is no lock “gone”" in notes(response)

    @pytest.mark.long
    def test_hostile_keys(self, locks: Locks, admin: Client) -> None:
        """Every key has a page of its own, is shown (marks by their codes), can be forced, and has a history."""
        keys = ["", *HOSTILE_KEYS]  # only another program writes the first one
        locks.held(*keys)
        listed = admin.get(LIST).content.decode()
        for number, key in enumerate(keys):
            address = page_of(key)
            assert f'href="{html.escape(address)}"' in listed
            assert unquote_key(quote_key(key)) == key
            page = admin.get(address) if number % 3 == 0 else None
            assert page is None or page.context["lock"].key == key
            for content in (listed, page.content.decode() if page else listed):
                assert html.escape(printable(key)) in content
                assert key not in content or html.escape(key) == key
        confirm(admin, select(admin, "force_release", *keys))
        assert {entry_.object_id for entry_ in LogEntry.objects.all()} == {*keys}
        assert admin.get(page_of("").replace("/change/", "/history/")).status_code == 302
        history = page_of(HOSTILE_KEYS[0]).replace("/change/", "/history/")
        assert "Forced its release" in text_of(admin.get(history))

    def test_browser_leaves_addresses_alone(self) -> None:
        """No part of an address looks like a way up to a browser."""
        for key in HOSTILE_KEYS:
            assert not {".", ".."} & set(page_of(key).split("/"))

    @pytest.mark.long
    def test_huge(self, locks: Locks, admin: Client) -> None:
        """The page shows the first hundred of thousands of waiters, and says so."""
        locks.add("k", [entry(1)], [waiter(n) for n in range(3_000)])
        text = text_of(admin.get(page_of("k")))
        assert "first come, first served (3000)" in text
        assert (text.count("· pid 40"), text.count("The first 100 are shown.")) == (1 + 100, 1)


class TestRights:
    """The view permission is for looking, force_release for taking. No user edits."""

    @pytest.fixture(autouse=True)
    def one(self, locks: Locks) -> None:
        locks.held("k")

    def test_no_button_without_its_permission(self, locks: Locks) -> None:
        """A user who may only look sees no action and no button. A user who may ask cannot force."""
        looker = browser("view_lock")
        locks.stale("stale")
        assert b"force_release" not in looker.get(LIST).content
        for key, action in (("k", b"Force release"), ("stale", b"clear_stale")):
            assert action not in looker.get(page_of(key)).content
        shown = {"lock": json.dumps(["locks", "k", [TOKEN + 1]]), "reason": "x"}
        assert browser("view_lock", "ask_release_lock").post(RELEASE, shown).status_code == 403

    def test_no_editing(self, locks: Locks) -> None:
        """A superuser cannot add, edit or delete either. These pages do not exist, and a POST is refused."""
        root = browser(is_superuser=True)
        before = locks.read("k")
        for page in ("add/", "k/delete/"):
            assert root.get(LIST + page).status_code == root.post(LIST + page).status_code == 404
        assert root.post(page_of("k"), {"token": 1}).status_code == 403
        assert select(root, "delete_selected", "k", post="yes").status_code in (200, 302)
        assert root.post(LIST, {"_save": "x", "form-0-token": 1}).status_code in (200, 302)
        with pytest.raises(NoReverseMatch):
            reverse("admin:django_mongolock_lock_delete", args=["k"])
        assert locks.read("k") == before
        for page in (LIST, page_of("k")):
            assert not re.search(
                r"addlink|deletelink\"|/add/\"", root.get(page).content.decode().split('id="content"')[1]
            )


class TestForceRelease:
    """A forced release is confirmed, exact, and logged."""

    def test_one(self, locks: Locks, admin: Client) -> None:
        """Only the answer to the question takes the lock, for the waiter. The admin reports and logs it."""
        locks.add("k", [entry(1)], [waiter(2)])
        asked = select(admin, "force_release", "k")
        assert "secret" not in asked.content.decode()
        assert locks.read("k")["holders"][0]["token"] == TOKEN + 1
        assert notes(confirm(admin, asked)) == "1 lock was taken from its holder."
        assert locks.read("k")["holders"][0]["grant"] == "secret-grant.2"
        entry_ = LogEntry.objects.get()
        assert (entry_.object_id, entry_.user_id) == ("k", int(admin.session["_auth_user_id"]))
        assert entry_.get_admin_url() == page_of("k")

    def test_what_is_done_is_written_down(self, locks: Locks, admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is read between a release and its entry in the log, because a read could fail."""
        locks.held("k")
        asked = select(admin, "force_release", "k")
        monkeypatch.setattr(LockQuerySet, "db", property(lambda _self: 1 / 0))
        assert admin.post(RELEASE, {**fields_of(asked), "reason": "x"}).status_code == 302
        assert LogEntry.objects.get().object_id == "k"

    def test_many(self, locks: Locks, admin: Client) -> None:
        """Several locks can be released at once. Locks that are free or damaged are left out, and the page says so."""
        locks.held("a", "b")
        locks.add("shared", [entry(n, mode="shared") for n in (5, 6)])
        locks.free("free")
        locks.add("bad", [entry(9)], change={"token": 1.5})
        locks.stale("left")
        asked = select(admin, "force_release", "a", "b", "shared", "free", "bad", "left", "gone")
        for said in ("it is free now: free", "its document is damaged: bad", "process that asks gets it: left"):
            assert re.search(f"Skipped because [^:]*{said}", text_of(asked)), said
        assert "These 3 locks will be taken" in text_of(asked)
        assert "3 locks were taken" in notes(confirm(admin, asked))
        assert locks.read("shared")["holders"] == []
        assert LogEntry.objects.count() == 3

    @pytest.mark.long
    def test_all_of_thousands(self, locks: Locks, admin: Client) -> None:
        """ "Select all" is bounded, because nobody reads a page of thousands."""
        locks.held(*(f"k{number:03d}" for number in range(150)))
        asked = select(admin, "force_release", "k000", query="", select_across=1)
        assert "These 100 locks" in text_of(asked)
        assert "Only the first 100" in notes(asked)
        assert "100 locks were taken" in notes(confirm(admin, asked))

    def test_back_to_the_same_list(self, locks: Locks, admin: Client) -> None:
        """Afterwards the list has the same filters as before."""
        locks.held("k")
        body = select(admin, "force_release", "k", query="?state=all&q=k").content.decode()
        assert 'name="filters" value="state=all&amp;q=k"' in body


class TestClearStale:
    """Stale locks are cleared at once, after another check by the server."""

    def test_clears(self, locks: Locks, admin: Client) -> None:
        """Stale locks are cleared, and their waiters get them. Other locks stay, and the page says so."""
        locks.stale("a", "b")
        locks.held("held")
        locks.collection.update_one({"_id": "b"}, {"$set": {"waiters": [waiter(7)]}})
        response = select(admin, "clear_stale", "a", "b", "held", follow=True)
        assert notes(admin.get(LIST)) == "2 stale locks were cleared. | 1 lock was skipped because it is not stale."
        assert response.status_code == 302
        assert locks.read("a")["holders"] == []
        assert locks.read("b")["holders"][0]["grant"] == "secret-grant.7"
        assert locks.read("held")["holders"][0]["token"] == TOKEN + 1
        assert {entry_.object_id for entry_ in LogEntry.objects.all()} == {"a", "b"}

    def test_half_done(self, locks: Locks, admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the server goes away meanwhile, the effects so far are logged, and the user learns of both."""
        locks.stale("a", "b", "c")
        clear = operations.clear_stale

        def go_away(store: Any, keys: list[str], **options: Any) -> Any:
            if keys == ["b"]:
                raise LockBackendFailed("it is away")
            return clear(store, keys, **options)

        monkeypatch.setattr(operations, "clear_stale", go_away)
        response = select(admin, "clear_stale", "a", "b", "c")
        assert "1 stale lock was cleared." in notes(admin.get(response["Location"]))
        assert LogEntry.objects.get().object_id == "a"

    def test_from_its_page(self, locks: Locks, admin: Client) -> None:
        """Clearing a lock from its page leads back to that page."""
        locks.stale("a")
        form = fields_of(admin.get(page_of("a")))
        response = admin.post(f"{LIST}?state=all", {**form, "action": "clear_stale"})
        assert response["Location"] == page_of("a")


class TestDamage:
    """Damaged documents are shown as damaged. The other locks are not affected."""

    def test_shown(self, locks: Locks, admin: Client) -> None:
        """The list and the page describe the damage."""
        locks.held("good")
        for name, (change, _) in DAMAGE.items():
            locks.add(name, [entry(2)], [waiter(3)], change=change)
        listed = admin.get(f"{LIST}?state=all")
        assert rows(listed) == sorted([*DAMAGE, "good"])
        assert "● works" in text_of(listed)
        for name, (_, word) in DAMAGE.items():
            for text in (text_of(listed), text_of(admin.get(page_of(name)))):
                assert "▲ damaged" in text
                assert word in text

    def test_foreign(self, locks: Locks, admin: Client) -> None:
        """Keys that are no text are shown, without a link."""
        locks.held("good")
        for key in (7, b"x", {"a": "<b>"}):
            locks.add(key, [entry(2)])
        listed = admin.get(LIST)
        assert len(rows(listed)) == 4
        assert listed.content.decode().count('class="mongolock-key"') == 1
        assert b"<b>" not in listed.content


class TestSpeed:
    """Two commands a page, on an index, however many documents there are."""

    @pytest.fixture(autouse=True)
    def many(self, locks: Locks) -> None:
        locks.renew_indexes()
        locks.many(free=10_000, held=300)

    @pytest.mark.long
    @pytest.mark.parametrize(
        "query",
        ["", "?p=2", "?state=waited", "?state=stale", "?state=free", "?state=all", "?q=held:00*"],
    )
    def test_commands(self, admin: Client, commands: Commands, locks: Locks, query: str) -> None:
        """The page is one command. A count follows if there are more locks than that, and a check for any lock if
        there are none. The list of held locks counts the stale ones. A search adds a check for such a key. None of the
        commands reads more than the held locks or a page."""
        admin.get(LIST + query)
        assert commands.names() in (
            ["aggregate"],
            ["aggregate", "aggregate"],
            ["aggregate", "count"],
            ["aggregate"] * 3,
        )
        for sent in commands.sent:
            if "aggregate" in sent:
                assert locks.explain(sent)["totalDocsExamined"] <= 301

    @pytest.mark.long
    def test_counts_no_further_than_needed(
        self, admin: Client, commands: Commands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Above the cap the list says "more than", because the server stops counting there."""
        monkeypatch.setattr(listing, "CAP", 250)
        admin.get(f"{LIST}?state=free")
        assert {"$limit": 251} in commands.sent[1]["pipeline"]
        response = admin.get(f"{LIST}?state=all")
        assert "more than 250 such locks" in text_of(response)
        assert response.context["cl"].result_count == 250
        assert admin.get(f"{LIST}?state=all&p=3").status_code == 200
        assert admin.get(f"{LIST}?state=all&p=4").status_code == 302

    @pytest.mark.long
    def test_clear_stale_locks(self, commands: Commands, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """The command finds stale locks by an index, and clears them in batches. No other lock is read."""
        monkeypatch.setattr(named_locks, "BATCH", 20)
        locks.stale(*(f"stale:{number}" for number in range(50)))
        run("clear_stale_locks", "--no-input")
        updates = [sent for sent in commands.sent if "update" in sent]
        assert len(updates) == 3
        for sent in updates:
            (update,) = sent["updates"]
            assert update["hint"] == "_id_"
            assert max(len(each["_id"]["$in"]) for each in update["q"]["$and"] if "_id" in each) <= 20
        locks.stale(*(f"stale again:{number}" for number in range(50)))
        (found,) = [sent for sent in commands.sent if "aggregate" in sent]
        statistics = locks.explain(found)
        assert statistics["totalDocsExamined"] <= 50 + 300
        assert statistics["totalKeysExamined"] <= 50 + 300 + 1


def test_permissions_come_with_migrate(locks: Locks) -> None:
    """The default database gets the permissions of the lock model, though the model lives elsewhere."""
    found = Permission.objects.filter(content_type__app_label="django_mongolock", content_type__model="lock")
    own = {"ask_release_lock", "clear_document_lock", "take_over_edit_lock", "view_lock_status"}
    assert set(found.values_list("codename", flat=True)) == {*NAMES, *own}


ops = AdminSite("ops")
ops.register(Lock, LockAdmin)
ops.register(LockDashboard, LockDashboardAdmin)
urlpatterns = [path("admin/", site.urls), path("ops/", ops.urls)]


@pytest.mark.urls(__name__)
def test_another_site(locks: Locks, history: Any) -> None:
    """On a site other than Django's own, each link leads to a page of that site, and pages that it lacks are not
    linked."""
    locks.add("k", [entry(1, held_for=5_000)], [waiter(2, held_for=4_000)])
    history.insert_one({"key": "k", "event": "granted", "at": now()})
    client = browser(is_superuser=True)
    start = "/ops/django_mongolock/lock"
    for page in ("/", "dashboard/", "/k/change/", "/force-release/?key=k", "/others/"):
        content = client.get(start + page).content.decode()
        assert f'"{start}/' in content
        assert not re.search('(href|action)="/admin/', content), page


WITHOUT_ADMIN = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_mongolock", *(f"django_mongolock.{app}" for app in ("editing", "history", "versions"))],
    DATABASES={"default": {"ENGINE": "django_mongodb_backend", "NAME": "x"}},
    MONGOLOCK={"DATABASE": "default", "HISTORY": 1},
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
)
django.setup()
from django.core.management import call_command
from django.template import engines
assert engines["django"].from_string("{% load mongolock %}{{ 1 }}").render() == "1"
call_command("check")
"""


@pytest.mark.long
def test_projects_without_the_admin() -> None:
    """Locks, edit locks and their history need neither the admin nor templates."""
    python("-c", WITHOUT_ADMIN)
