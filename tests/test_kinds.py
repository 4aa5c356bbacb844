"""A kind of locks is one class. Each added kind is in every list, page, count and check.

The tests of document locks (documents/test_looking.py) show the commands and pages with another kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.core.checks import CheckMessage, Info
from django.core.exceptions import ImproperlyConfigured
from pytest_django import Settings

from django_mongolock.inspection.kinds import Choice, Counts, LockKind, Row, Swept, sources
from django_mongolock.inspection.snapshot import ShownState
from django_mongolock.management.checks import check_kinds
from tests.security.test_surfaces import seen, shown
from tests.support.lock_documents import TOKEN, Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import said_by as run
from tests.test_admin import DASHBOARD, browser
from tests.test_admin import LIST as ADMIN

pytestmark = WITH_MONGO


class Rooms:
    """Locks on meeting rooms, kept in a dictionary of this process with the person and the time of each room."""

    name, title = "rooms", "rooms"
    model = alias = None
    taken = (ShownState.HELD, ShownState.STALE)

    def __init__(self, **rooms: tuple[str, float]) -> None:
        self.rooms: dict[Any, tuple[str, float]] = {**rooms}

    def rows(self, choice: Choice, limit: int = 0) -> list[Row]:
        found = [
            Row(
                key,
                ShownState.STALE if left <= 0 else ShownState.HELD,
                holder,
                since=datetime.now(UTC),
                seconds=5.0,
                left=left,
            )
            for key, (holder, left) in self.rooms.items()
            if choice.owner in (None, holder) and (choice.ids is None or key in choice.ids)
        ]
        found = [row for row in found if choice.state in ("all", row.state.value)]
        return found[: limit or None]

    def again(self, shown: Sequence[tuple[Any, Any]]) -> list[Row]:
        holders = dict(shown)
        return [row for row in self.rows(Choice(ids=list(holders))) if row.holder == holders[row.key]]

    def ids(self, text: str) -> list[str]:
        return [text]

    def counts(self) -> Counts:
        return Counts(self.name, len(self.rows(Choice("held"))), len(self.rows(Choice("stale"))))

    def clear(self, choice: Choice, *, dry_run: bool) -> Iterator[Swept]:
        stale = self.rows(Choice("stale", choice.owner))
        done = [] if dry_run else self.force(stale, by="", reason="")
        yield Swept(stale, count=len(done), found=len(stale))

    def force(self, shown: Iterable[Row], *, by: str, reason: str) -> list[Row]:
        return [row for row in shown if self.rooms.pop(row.key, None)]

    def checks(self, databases: Sequence[str]) -> Iterator[CheckMessage]:
        yield Info("the rooms are open", id="rooms.I001")


@pytest.fixture
def rooms(locks: Locks) -> Iterator[Rooms]:
    """Return a third kind, beside a named lock and the documents of the demo."""
    locks.held("k")
    found = Rooms(blue=("anna", 60.0), green=("ben", -5.0))

    def source(using: str | None) -> list[LockKind]:
        return [found]

    sources.append(source)
    yield found
    sources.remove(source)


def of_rooms(text: str) -> Any:
    (found,) = [each for each in json.loads(text)["kinds"] if each["kind"] == "rooms"]
    return found


def test_list(rooms: Rooms) -> None:
    """The list is a table with the same columns, or JSON with the same fields."""
    text = run("list_locks")
    assert re.search(r"Rooms:\nKEY +STATE +HOLDER +HELD FOR +LEFT\nblue +held +anna +5\.0 s +1 min 0 s", text)
    assert "green" not in text
    assert re.search(r"green +stale +ben +5\.0 s +ended 5\.0 s ago", run("list_locks", "--stale"))
    found = of_rooms(run("list_locks", "--all", "--json"))
    assert [(row["key"], row["state"], row["holder"]) for row in found["locks"]] == [
        ("blue", "held", "anna"), ("green", "stale", "ben")]  # fmt: skip
    (named,) = json.loads(run("list_locks", "--json", "--kind", "locks"))["kinds"][0]["locks"]
    assert found["locks"][0].keys() - named.keys() == {"holder"}


class TestAdmin:
    def test_ids_are_no_numbers(self, rooms: Rooms, settings: Settings) -> None:
        """An id is shown as it is, also where numbers have separators."""
        settings.USE_THOUSAND_SEPARATOR = True
        rooms.rooms[12345] = ("carl", 60.0)
        client = browser("view_lock", "force_release_lock")
        page = client.get(f"{ADMIN}others/?kind=rooms").content.decode()
        assert ("12,345" in page, page.count("12345")) == (False, 3)  # the last in the value of a field
        chosen = {"force": "selected", "lock": '["rooms", 12345, "carl"]'}
        assert '<bdi class="mongolock-key">12345</bdi>' in client.post(f"{ADMIN}others/", chosen).content.decode()

    def test_foreign_text(self, rooms: Rooms) -> None:
        """Characters that hide or reverse text are shown by their codes, on the page, in the confirmation and in the
        messages."""
        rooms.rooms = {"blue\u202e": ("anna\u2066", -60.0)}
        client = browser("view_lock", "force_release_lock", "clear_document_lock")
        chosen = {"force": "selected", "lock": '["rooms", "blue\\u202e", "anna\\u2066"]'}
        pages = [client.get(f"{ADMIN}others/?kind=rooms"), client.post(f"{ADMIN}others/", chosen)]
        for text in (seen(page.content.decode()) for page in pages):
            assert not shown(text)
            assert ("blue\\u202e" in text, "anna\\u2066" in text) == (True, True)

    def test_held_only(self, locks: Locks, rooms: Rooms) -> None:
        """If only locks of other kinds are held, the dashboard does not say that no lock was acquired."""
        locks.collection.delete_many({})
        del rooms.rooms["green"]  # stale and therefore a problem
        page = browser("view_lock").get(DASHBOARD).content.decode()
        assert "<bdi>rooms</bdi>" in page
        assert "No lock was acquired recently" not in page

    def test_clear_one_owner(self, rooms: Rooms) -> None:
        """The list of one holder clears the stale locks of that holder only."""
        rooms.rooms = {"blue": ("anna", -60.0), "green": ("ben", -5.0)}
        client = browser("view_lock", "clear_document_lock")
        page = client.get(f"{ADMIN}others/?kind=rooms&owner=anna").content.decode()
        assert 'name="kind" value="rooms"><input type="hidden" name="owner" value="anna">' in page
        client.post(f"{ADMIN}others/", {"kind": "rooms", "owner": "anna", "clear": "stale"})
        assert rooms.rooms.keys() == {"green"}

    @pytest.mark.parametrize("page", [DASHBOARD, f"{ADMIN}status/", f"{ADMIN}others/"])
    def test_a_wrong_place(self, page: str, rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kind with a model outside of MongoDB hides no other, and its error is shown."""

        def fail(*arguments: Any) -> Any:
            raise ImproperlyConfigured("rooms are not in MongoDB")

        monkeypatch.setattr(Rooms, "rows", fail)
        monkeypatch.setattr(Rooms, "counts", fail)
        response = browser("view_lock", "view_lock_status").get(page)
        assert response.status_code == 200
        assert "rooms are not in MongoDB" in response.content.decode()

    def test_another_holder_since(self, rooms: Rooms) -> None:
        """If each of the selected locks has another holder by now, the page says that, and not that none is held."""
        client = browser("clear_document_lock", "force_release_lock")
        form = {"force": "selected", "lock": json.dumps(["rooms", "blue", "ben"]), "reason": "x"}
        for address in ("others", "force-release"):
            page = client.post(f"{ADMIN}{address}/", form, follow=True).content.decode()
            assert "its holder has changed since it was shown: blue" in page
            assert "none of these locks" not in page

    @pytest.mark.parametrize("method", ["rows", "force"])
    def test_a_kind_that_fails(self, method: str, rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kind that cannot be read or changed is an error in words, for the user who forces a release."""

        def fail(*arguments: Any, **options: Any) -> Any:
            raise ImproperlyConfigured("rooms are not in MongoDB")

        monkeypatch.setattr(Rooms, method, fail)
        client = browser("view_lock", "force_release_lock")
        form = {"force": "owner", "owner": "anna"}
        if method == "force":
            form = {"lock": json.dumps(["rooms", "blue", "anna"]), "reason": "x"}
        address = f"{ADMIN}{'force-release' if method == 'force' else 'others'}/"
        assert "rooms are not in MongoDB" in client.post(address, form, follow=True).content.decode()

    def test_links_keep_the_filters(self, rooms: Rooms) -> None:
        """The link of a holder adds to the filters. The link of a state changes only the state."""
        page = browser("view_lock").get(f"{ADMIN}others/?kind=rooms&state=held&owner=anna").content.decode()
        links = [unescape(each) for each in re.findall(r'href="(\?[^"]*)"', page)]
        assert "?kind=rooms&state=held&owner=anna" in links
        assert "?kind=rooms&state=stale&owner=anna" in links

    def test_a_count_that_was_cut(self, rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
        """The dashboard does not say "1000" of a count that was cut."""
        monkeypatch.setattr(Rooms, "counts", lambda self: Counts(self.name, stale=1_000, damaged=3, more=True))
        page = browser("view_lock").get(DASHBOARD).content.decode()
        assert "Stale locks of “rooms”: ≥ 1000." in page
        assert "Damaged locks of “rooms”: ≥ 3." in page

    def test_named_locks_need_their_own_right(self, rooms: Rooms, locks: Locks) -> None:
        """A user with the right to clear stale locks of other kinds neither clears nor sees named locks with the same
        forms."""
        locks.stale("stale")
        client = browser("clear_document_lock", "force_release_lock")
        named = json.dumps(["locks", "k", [TOKEN + 1]])
        assert client.post(f"{ADMIN}others/", {"kind": "locks"}).status_code == 400
        assert client.post(f"{ADMIN}others/", {"force": "selected", "lock": named}).status_code == 403
        assert client.post(f"{ADMIN}force-release/", {"lock": named, "reason": "x"}).status_code == 403
        assert locks.read("stale")["holders"]
        assert locks.read("k")["holders"]
        room = json.dumps(["rooms", "blue", "anna"])
        assert (
            browser("view_lock", "ask_release_lock").post(f"{ADMIN}ask-to-release/", {"lock": room}).status_code == 400
        )


def test_checks(rooms: Rooms) -> None:
    """The checks of a kind are among the checks of the database."""
    assert "rooms.I001" in [found.id for found in check_kinds(app_configs=None, databases=["mongo"])]
