"""The pages for a person on call show the next steps in order, and a true sentence."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from bson.int64 import Int64
from django.test import Client
from pymongo.collection import Collection

from django_mongolock.inspection.kinds import Counts
from testproject.demo.__main__ import terminal
from tests.editing.staff import text_of
from tests.support.lock_documents import Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import DASHBOARD, LIST, browser, page_of

pytestmark = WITH_MONGO


class TestSafeOrder:
    """F225: Every page with a release button says whether the holder lives, and what to do first."""

    @pytest.fixture
    def staff(self) -> Client:
        return browser("view_lock", "force_release_lock")

    @pytest.mark.parametrize("page", [page_of("k"), f"{LIST}force-release/?key=k"])
    def test_one_that_lives(self, locks: Locks, staff: Client, page: str) -> None:
        """The steps are to look, to stop, and to ask. To force the release comes last."""
        locks.add("k", [entry(7, left=32, held_for=75, label="import")], [waiter(2)])
        text = text_of(staff.get(page))
        assert "● works Renewed" in text
        steps = ["works Renewed", "py-spy dump --pid 4007", "kill 4007", "Ask to release…"]
        places = [text.index(step) for step in [*steps, *(["Force release…"] if "change" in page else [])]]
        assert places == sorted(places)
        assert "on web-1" in text

    @pytest.mark.parametrize("page", [page_of("k"), f"{LIST}force-release/?key=k"])
    def test_a_silent_one(self, locks: Locks, staff: Client, page: str) -> None:
        """A silent holder hears no request. The page says how long to wait, and where the process may still run."""
        locks.add("k", [entry(7, left=8, held_for=75, label="import")])
        text = text_of(staff.get(page))
        assert re.search(r"◌ silent Its holder was last heard of 2\d s ago. If you do nothing: free in \d", text)
        assert "kill 4007" in text
        assert "Ask to release" not in text

    def test_the_worst_is_named(self, locks: Locks, staff: Client) -> None:
        """The alarm names the lock that hangs for longest while others wait."""
        slow = {"longest_hold_ms": Int64(1_000), "held_ms": Int64(1_000)}
        locks.add("a", [entry(1, left=32, held_for=9_000)], change=slow)
        locks.add("b", [entry(2, left=32, held_for=3_000)], [waiter(3)], slow)
        locks.add("c", [entry(4, left=32, held_for=6_000)], [waiter(5)], slow)
        assert "3 locks hang, such as “c”" in text_of(staff.get(DASHBOARD))

    def test_tiles(self, locks: Locks, staff: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tile counts its own kind."""
        counted = (Counts("exports", held=2, stale=1),)
        monkeypatch.setattr("django_mongolock.inspection.status.count_all", lambda _: counted)
        text = text_of(staff.get(DASHBOARD))
        assert re.search(r" 0 named locks held 2 of other kinds held ", text)


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
        assert re.search(r" ago import x{60} lost:k{100} ◐ lost waited 1 min 30 s ", text_of(page))
        assert re.search(r'<time [^>]*title="20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC">', page.content.decode())
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


@pytest.mark.parametrize("query", ["state=waiting", "mode=$ne"])
def test_an_unknown_state(locks: Locks, query: str) -> None:
    """F224: A filter that does not exist gets Django's own answer."""
    response = browser("view_lock").get(f"{LIST}?{query}")
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
