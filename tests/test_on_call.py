"""The pages for a person on call show the next steps in order, and a true sentence."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from bson.int64 import Int64
from django.test import Client
from pymongo.collection import Collection
from pytest_django import Settings

from django_mongolock.inspection.kinds import Counts
from django_mongolock.inspection.overview import overview
from testproject.demo.__main__ import terminal
from tests.editing.staff import text_of
from tests.support.lock_documents import Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import said_by
from tests.test_admin import DASHBOARD, LIST, browser, fields_of, page_of

pytestmark = WITH_MONGO


class TestSafeOrder:
    """F225: Every page with a release button says whether the holder lives, and what to do first."""

    @pytest.fixture
    def staff(self) -> Client:
        return browser("view_lock", "force_release_lock")

    @pytest.mark.parametrize("page", [page_of("k"), f"{LIST}force-release/?key=k"])
    def test_one_that_lives(self, locks: Locks, staff: Client, page: str) -> None:
        """The steps are to ask, to look, and to stop. To force the release comes last."""
        locks.add("k", [entry(7, left=32, held_for=75, label="import")], [waiter(2)])
        text = text_of(staff.get(page))
        assert "● works Renewed" in text
        steps = ["works Renewed", "Ask to release…", "Asking is safe", "py-spy dump --pid 4007", "kill 4007"]
        places = [text.index(step) for step in [*steps, *(["Force release…"] if "change" in page else [])]]
        assert places == sorted(places)
        assert "on web-1" in text

    @pytest.mark.parametrize("page", [page_of("k"), f"{LIST}force-release/?key=k"])
    def test_a_silent_one(self, locks: Locks, staff: Client, page: str) -> None:
        """A silent holder hears no request. The page says how long to wait, and where the process may still run."""
        locks.add("k", [entry(7, left=8, held_for=75, label="import")])
        text = text_of(staff.get(page))
        assert re.search(r"◌ silent Last renewed 2\d s ago: .* Waiting is safest. If you do nothing: free in \d", text)
        assert "kill 4007" in text
        assert "Ask to release" not in text

    def test_the_worst_is_named(self, locks: Locks, staff: Client) -> None:
        """The alarm names the lock that hangs for longest while others wait."""
        slow = {"longest_hold_ms": Int64(1_000), "held_ms": Int64(1_000)}
        locks.add("a", [entry(1, left=32, held_for=9_000)], change=slow)
        locks.add("b", [entry(2, left=32, held_for=3_000)], [waiter(3)], slow)
        locks.add("c", [entry(4, left=32, held_for=6_000)], [waiter(5)], slow)
        assert "Hangs: “c” and 2 more. Its process lives" in text_of(staff.get(DASHBOARD))

    def test_tiles(self, locks: Locks, staff: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tile counts its own kind."""
        counted = (Counts("exports", held=2, stale=1),)
        monkeypatch.setattr("django_mongolock.inspection.status.count_all", lambda _: counted)
        text = text_of(staff.get(DASHBOARD))
        assert re.search(r" 0 named locks held 2 of other kinds held ", text)


class TestObstacle:
    """F248: If the holder of a lock waits for another lock itself, every surface says so, and leads there."""

    SAID = (
        r"“nightly report” has itself waited 1 min \d+ s for “catalog:import”, held by “import of the catalog”. Look "
    )

    @pytest.fixture
    def staff(self, locks: Locks) -> Client:
        report: dict[str, Any] = {"label": "nightly report", "worker": "w1"}
        locks.add("catalog:import", [entry(1, left=32, held_for=90, label="import of the catalog", worker="w0")],
                  [waiter(2, held_for=75, **report)])  # fmt: skip
        locks.add("report:nightly", [entry(2, left=32, **report)], [waiter(3, held_for=70, worker="w3", label="till")])
        return browser("view_lock", "force_release_lock", "view_lock_status")

    @pytest.mark.parametrize(
        "page",
        [
            page_of("report:nightly"),
            f"{LIST}force-release/?key=report:nightly",
            f"{LIST}ask-to-release/?key=report:nightly",
            DASHBOARD,
            LIST,
        ],
    )
    def test_pages(self, staff: Client, page: str) -> None:
        """The sentence stands once on each page. A link leads to the other lock."""
        response = staff.get(page)
        assert len(re.findall(self.SAID, text_of(response))) == 1
        assert f'href="{page_of("catalog:import")}"' in response.content.decode()

    def test_a_reason_is_missing(self, staff: Client) -> None:
        """The page that asks again says the same."""
        asked = staff.get(f"{LIST}force-release/?key=report:nightly")
        assert re.search(self.SAID, text_of(staff.post(f"{LIST}force-release/", fields_of(asked))))

    def test_programs(self, staff: Client) -> None:
        """The command prints the sentence. Its JSON and that of the status name the other lock."""
        assert re.search(self.SAID, said_by("list_locks", "--wide"))
        listed = json.loads(said_by("list_locks", "--json"))["kinds"][0]["locks"]
        waits = {row["key"]: row["holder_waits_for"] for row in listed}
        assert waits == {"catalog:import": None, "report:nightly": "catalog:import"}
        held = {row["key"]: row["holder_waits_for"] for row in staff.get(f"{LIST}status/").json()["held"]}
        assert held == waits

    def test_worth_a_look(self, staff: Client, locks: Locks) -> None:
        """A lock whose holder waits does not stand under "No problems"."""
        locks.collection.update_many({}, {"$set": {"waiters.0.since": now()}})
        text = text_of(staff.get(DASHBOARD))
        assert "Worth a look report:nightly ● works , waits for catalog:import" in text
        assert "No problems" not in text

    def test_the_alarm_names_the_cause(self, staff: Client, locks: Locks) -> None:
        """Of two locks that hang, the alarm names the one whose holder does not wait."""
        slow = {"longest_hold_ms": Int64(1_000), "held_ms": Int64(1_000)}
        locks.collection.update_many({}, {"$set": slow})
        locks.collection.update_one(
            {"_id": "report:nightly"}, {"$set": {"holders.0.acquired_at": now() - timedelta(hours=2)}}
        )
        assert "Hangs: “catalog:import” and 1 more. Its process lives" in text_of(staff.get(DASHBOARD))

    def test_others(self, staff: Client, locks: Locks, settings: Settings) -> None:
        """A lock with another prefix is not named, nor is one whose place in the queue has ended, nor a key that is no
        text."""
        locks.add(7, [entry(9, left=32)], [waiter(2, worker="w1")])
        locks.collection.update_one(
            {"_id": "catalog:import"}, {"$set": {"waiters.0.until": now() - timedelta(seconds=1)}}
        )
        assert "itself" not in text_of(staff.get(page_of("report:nightly")))
        locks.collection.update_one(
            {"_id": "catalog:import"}, {"$set": {"waiters.0.until": now() + timedelta(hours=1)}}
        )
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "report:"}
        assert "catalog" not in text_of(staff.get(page_of("report:nightly")))


class TestConfirmation:
    """The confirmation names the consequences with names and numbers."""

    def test_next(self, locks: Locks) -> None:
        """F249: The page names the next holder, and the seconds until the present one learns of its loss."""
        locks.add("k", [entry(1, left=32)], [waiter(2, label="till 3"), waiter(3, label="till 7")])
        text = text_of(browser("view_lock", "force_release_lock").get(f"{LIST}force-release/?key=k"))
        assert "This lock will be taken from its holder:" in text
        assert "learns of the loss at its next renewal, within 10 s." in text
        assert "2 waiters. Then “till 3” gets the lock." in text

    def test_several(self, locks: Locks) -> None:
        """F249: With several holders, the first waiter waits for all of them."""
        holders = [entry(number, left=32, mode="shared") for number in (1, 2)]
        locks.add("k", holders, [waiter(3, label="till 3")])
        client = browser("view_lock", "force_release_lock")
        text = text_of(client.get(f"{LIST}force-release/?key=k"))
        assert "This lock will be taken from its 2 holders:" in text
        assert "1 waiter. When all holders have released it, “till 3” gets it." in text
        asked = text_of(client.get(f"{LIST}ask-to-release/?key=k"))
        assert "The 2 holders will learn of the request at their next renewals, within 10 s." in asked


def test_the_list_says_what_it_leaves_out(locks: Locks) -> None:
    """F249: The list of held locks counts the stale locks, and leads to them."""
    locks.held("k")
    locks.stale("a", "b")
    client = browser("view_lock")
    assert "2 stale locks are not listed here: their holders are dead or cut off. Show" in text_of(client.get(LIST))
    assert "not listed here" not in text_of(client.get(f"{LIST}?state=stale"))


@pytest.mark.parametrize("page", [LIST, DASHBOARD, page_of("k"), "/admin/mongolock_history/lockevent/"])
def test_no_crumb_stands_twice(locks: Locks, page: str) -> None:
    """F249: The last crumb is the title of the page, and no crumb repeats the one before."""
    locks.held("k")
    found = browser("view_lock", "view_lockevent").get(page).content.decode()
    (crumbs,) = re.findall(r'<div class="breadcrumbs">(.*?)</div>', found, re.DOTALL)
    names = [" ".join(name.split()) for name in re.sub(r"<[^>]*>|\s+", " ", crumbs).split("&rsaquo;")]
    assert len({*names}) == len(names)
    assert f"<title>{names[-1]} |" in " ".join(found.split())


def test_one_moment(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """F249: Table and picture of the dashboard show one state of a lock, although parts of the command differ."""
    early = {"_id": "k", "released": False, "holding": 1, "more_permits": 0, "queue": {"waiting": 0}, "whole": True}
    holder = entry(1, held_for=90)
    seen = {**early, "now": now(), "expires_at": holder["until"], "holders": [holder]}
    later = {**seen, "holders": [entry(2, held_for=1)]}
    parts = [
        {"part": "held", "now": now(), "longest": [seen], "damaged": [], "sums": [{"n": 1, "kept": 0}]},
        {"part": "waits", "longest": [], "sums": []},
        {"part": "stale", "latest": [], "sums": []},
        {"part": "recent", "locks": [later]},
    ]
    store = Mock(latest=Mock(aggregate=lambda _: parts), bounded=lambda _: nullcontext())
    found = overview(store)
    assert found.recent == found.longest_held
    assert found.longest_held[0].holders[0].token == holder["token"]


class TestHistory:
    """F224: The history shows the person, the lock, the event and the duration. At first it lists only failures."""

    EVENTS = "/admin/mongolock_history/lockevent/"

    @pytest.fixture
    def told(self, locks: Locks, history: Collection[dict[str, Any]]) -> Client:
        party = {"label": "import " + "x" * 60, "host": "web-1", "pid": 7, "at": now()}
        for what in ("granted", "released", "lost", "deadlock", "asked", "forced"):
            key = f"{what}:" + "k" * 100
            history.insert_one({**party, "event": what, "key": key, "waited_ms": Int64(90_000), "token": Int64(5)})
        return browser("view_lockevent", "view_lock")

    @pytest.mark.parametrize(
        ("query", "kinds"),
        [
            ("", {"lost", "deadlock", "forced"}),
            ("?event=asked", {"asked"}),
            ("?event=all", {"granted", "released", "lost", "deadlock", "asked", "forced"}),
            ("?q=granted", {"granted"}),
        ],
    )
    def test_which(self, told: Client, query: str, kinds: set[str]) -> None:
        """A search looks at all events."""
        page = told.get(f"{self.EVENTS}{query}").content.decode()
        assert set(re.findall(r"<bdi>(\w+):k{100}</bdi>", page)) == kinds

    def test_a_line(self, told: Client) -> None:
        page = told.get(f"{self.EVENTS}?event=lost")
        clock = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        line = rf" ago {clock} import x{{60}} web-1 · pid 7 lost:k{{100}} ◐ lost waited 1 min 30 s "
        assert re.search(line, text_of(page))
        response = told.get(f"{self.EVENTS}?event=nonsense")
        assert (response.status_code, response["Location"]) == (302, f"{self.EVENTS}?e=1")

    def test_the_lanes_fit(self, told: Client, locks: Locks, history: Collection[dict[str, Any]]) -> None:
        """A history of ten minutes is drawn in a quarter of an hour, not in an hour."""
        history.delete_many({})
        history.insert_one(
            {"key": "k", "event": "released", "at": now() - timedelta(minutes=8), "held_ms": Int64(120_000)}
        )
        locks.free("k")
        assert told.get(page_of("k")).context["hour"].minutes == 15


def test_an_unknown_state(locks: Locks) -> None:
    """F224: A filter that does not exist gets Django's own answer."""
    response = browser("view_lock").get(f"{LIST}?state=waiting")
    assert (response.status_code, response["Location"]) == (302, f"{LIST}?e=1")


@pytest.mark.long
@pytest.mark.parametrize("page", [LIST, DASHBOARD, f"{LIST}force-release/?key=k"])
def test_while_mongodb_is_away(away: None, page: str) -> None:
    """F229: The message is one complete sentence."""
    text = text_of(browser("view_lock", "force_release_lock").get(page))
    assert "The locks cannot be shown now: MongoDB did not answer" in text
    assert not re.search(r"[?.!]\.(?!\d)", text)


def test_the_terminal_of_the_demo_has_the_history() -> None:
    """F229: The command that the demo prints shows the same as the pages of the demo."""
    names = ("MONGODB_URI", "MONGODB_NAME", "SQLITE_PATH", "MONGOLOCK_HISTORY")
    environment = {name: f"its {name.lower()}" for name in names}
    said = terminal(Mock(processes=Mock(env=environment)))
    assert "MONGOLOCK_HISTORY='its mongolock_history'" in said
