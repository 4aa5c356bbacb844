"""Texts of others on every page and in the output of every command, and any bytes at every address."""

import base64
import html
import json
import logging
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
from bson import json_util
from django.contrib.admin.models import LogEntry
from django.contrib.auth.hashers import make_password
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st
from pymongo.collection import Collection
from pytest_django import Settings

from django_mongolock.backends import mongo_store
from django_mongolock.engine.logs import INFO, log
from django_mongolock.exceptions import DocumentHeld, LockBackendFailed, LockNotAcquired, LockReentry, printable
from django_mongolock.inspection.queries import find_deadlocks
from testproject.shop.models import Ad
from tests.security.surfaces import (
    ACTIONS,
    COMMANDS,
    MIXINS,
    PAGES,
    addresses,
    known_actions,
    known_commands,
    known_mixins,
    known_pages,
    operator,
    said,
)  # fmt: skip
from tests.support.lock_documents import DAMAGE, TOKEN, Document, Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import LIST, fields_of

STATUS = f"{LIST}status/"
#: An element, and the end of any attribute.
HTML = "<i x=1>'\""
#: Characters that reverse or hide text, erase a terminal, end a line, or are no character.
EVIL = f"a\u202eb\u2066c\u200fd\x1b[2Je\x9bf\u2028g\x07h{HTML}"
#: The part of that text which a key may have.
EVIL_KEY = f"k\u202e\u2066\u200fevil{HTML}"
FACTS = ("label", "owner", "user", "place", "host", "thread")


def test_no_surface_is_missing() -> None:
    """The lists name all pages, actions and commands. A new one must be attacked as well."""
    assert set(PAGES) == known_pages()
    assert set(COMMANDS) == known_commands()
    assert known_actions() == ACTIONS
    assert known_mixins() == MIXINS


def shown(text: str) -> set[str]:
    """The characters that hide or reverse others."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\n\t\r"}


def seen(page: str) -> str:
    """Return the text of a page that a person sees, including attributes that are shown or read out."""
    attributes = re.findall(r'\b(?:title|aria-label|data-label|alt|placeholder)="([^"]*)"', page)
    return html.unescape(" ".join([re.sub(r"<[^>]*>", " ", page), *attributes]))


@pytest.fixture
def evil(locks: Locks, history: Collection[Document]) -> Locks:
    """Add a held, a stale and a free lock, a damaged one, a deadlock, and a history, with hostile text in every
    field."""
    facts: dict[str, Any] = dict.fromkeys(FACTS, EVIL)
    one, two = {**facts, "worker": "one"}, {**facts, "worker": "two"}
    last = {**entry(9), **facts}
    locks.add(EVIL_KEY, [entry(1, **one)], [waiter(2, **two)], {"last_holder": last})
    locks.add(f"other {EVIL_KEY}", [entry(3, **two)], [waiter(4, **one)])
    locks.add(f"stale {EVIL_KEY}", [entry(5, left=-60, **facts)])
    locks.add(f"free {EVIL_KEY}", change={"last_holder": last})
    locks.add(f"damaged {EVIL_KEY}", [entry(6, **facts)], change={"token": EVIL, "holders": EVIL})
    for name, (change, _) in DAMAGE.items():
        locks.add(f"{name} {EVIL_KEY}", [entry(7, **facts)], change=change)
    history.insert_one({"key": EVIL_KEY, "event": EVIL, "at": now(), "by": EVIL, "reason": EVIL, **facts})
    return locks


@WITH_MONGO
class TestShown:
    """Direction marks and control characters are shown by their codes, and HTML as text."""

    @pytest.mark.long
    def test_pages(self, evil: Locks) -> None:
        """Every page is clean, including pages that ask for a confirmation."""
        client = operator()
        pages = {f"{name} {address}": client.get(address) for name, address in addresses(EVIL_KEY)}
        for prefix in ("stale", "free", "damaged"):
            pages |= {address: client.get(address) for _, address in addresses(f"{prefix} {EVIL_KEY}")}
        for action in sorted(ACTIONS):
            form = {"action": action, "index": 0, "_selected_action": [EVIL_KEY, f"other {EVIL_KEY}"]}
            pages[action] = client.post(f"{LIST}?state=all", form, follow=True)
        pages["forced"] = client.post(
            f"{LIST}force-release/", {"lock": json.dumps(["locks", EVIL_KEY, [7]]), "reason": EVIL}, follow=True
        )
        pages["index"] = client.get("/admin/")
        for name, page in pages.items():
            assert page.status_code < 500, name
            found = shown(seen(page.content.decode()))
            assert not found, (name, sorted(map(ascii, found)))
            assert page["Content-Type"] == "application/json" or HTML[:3] not in page.content.decode(), name
        assert "k\\u202e\\u2066\\u200fevil" in seen(pages[f"lock_changelist {LIST}"].content.decode())

    def test_forms_still_work(self, evil: Locks) -> None:
        """Hidden fields keep their values, and such a lock can be released."""
        client = operator()
        form = {"action": "force_release", "index": 0, "_selected_action": [f"other {EVIL_KEY}"]}
        page = client.post(f"{LIST}?state=all", form)
        assert client.post(f"{LIST}force-release/", {**fields_of(page), "reason": "x"}).status_code == 302
        assert not any(holder["token"] == TOKEN + 3 for holder in evil.read(f"other {EVIL_KEY}")["holders"])

    @pytest.mark.parametrize("name", COMMANDS)
    def test_commands(self, evil: Locks, name: str, capfd: pytest.CaptureFixture[str]) -> None:
        """Every command prints something about the lock, and neither its output nor its errors show the text raw."""
        texts = [said(name, *(each.format(key=EVIL_KEY, owner=EVIL) for each in words)) for words in COMMANDS[name]]
        text = "".join([*texts, *capfd.readouterr()])  # also the messages about started programs
        found = shown(text)
        assert not found, sorted(map(ascii, found))
        assert "evil" in text

    def test_errors(self, evil: Locks) -> None:
        (cycle,) = find_deadlocks(mongo_store())
        errors = [LockNotAcquired(EVIL, holder=EVIL), LockReentry(EVIL), LockBackendFailed(EVIL, EVIL), cycle,
                  DocumentHeld("ads", EVIL, EVIL, EVIL)]  # fmt: skip
        for error in errors:
            assert not shown(str(error))
            assert "\\u202e" in str(error)


@WITH_MONGO
class TestAnotherSite:
    """No page and no command shows or changes locks of another site in the same collection."""

    @pytest.fixture
    def theirs(self, locks: Locks, history: Collection[Document], settings: Settings) -> Iterator[None]:
        """Locks of another site, in all states, with names that are nowhere else."""
        mine: dict[str, Any] = {"label": "visible", "owner": "visible"}
        facts: dict[str, Any] = dict.fromkeys(FACTS, "theirs-only")
        locks.add("mine:1", [entry(1, **mine)], [waiter(2, **mine)])
        locks.add("theirs-only:1", [entry(3, **facts)], [waiter(4, **facts)], {"last_holder": {**entry(9), **facts}})
        locks.add("theirs-only:2", [entry(5, left=-60, **facts)])
        locks.add("theirs-only:3", [entry(6, **facts)], change=next(iter(DAMAGE.values()))[0])
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "mine:"}
        history.insert_one({"key": "theirs-only:1", "event": "lost", "at": now(), **facts})
        before = list(locks.collection.find({"_id": {"$regex": "^theirs"}}).sort("_id"))
        yield
        assert list(locks.collection.find({"_id": {"$regex": "^theirs"}}).sort("_id")) == before

    @pytest.mark.witness
    def test_pages(self, theirs: None) -> None:
        """Every page, also at the addresses of their keys, with actions and forms, hides the other site."""
        client = operator()
        for number in (1, 2, 3):
            for _, address in addresses(f"theirs-only:{number}"):
                self.compare(client.get(address, follow=True).content.decode(), number)
            form = json.dumps(["locks", f"theirs-only:{number}", [TOKEN + 3, TOKEN + 5, TOKEN + 6]])
            for name in ("lock_force_release", "lock_ask_to_release"):
                posted = client.post(PAGES[name][0], {"lock": form, "reason": "x"}, follow=True)
                self.compare(posted.content.decode(), number)
            for action in ACTIONS:
                sent = {"action": action, "index": 0, "_selected_action": [f"theirs-only:{number}"]}
                self.compare(client.post(f"{LIST}?state=all", sent, follow=True).content.decode(), number)
        assert "visible" in client.get(LIST).content.decode()

    @staticmethod
    def compare(page: str, number: int) -> None:
        """Assert that a page repeats at most the requested key."""
        assert "theirs-only" not in page.replace(f"theirs-only:{number}", "")

    @pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"run_locked", "run_leader"}))
    def test_commands(self, theirs: None, name: str) -> None:
        """Every command hides the other site, except the one that runs a program under a key of its own."""
        asked = r"mine:(no such )?theirs-only:1|theirs-only:1\*|\"theirs-only\"|'theirs-only'"
        for words in COMMANDS[name]:
            text = said(name, *(each.format(key="theirs-only:1", owner="theirs-only") for each in words))
            assert "theirs-only" not in re.sub(asked, "", text)


class TestLogs:
    """A value cannot pass for a field or for a line."""

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("order:5", "order:5"),
            (5, "5"),
            (None, "None"),
            ("a token=99", '"a token=99"'),
            ('a" token=99 b="', r'"a\" token=99 b=\""'),
            ("a\\", r'"a\\"'),
            ("a=b", '"a=b"'),
            ("a\nlock lost key=b", r'"a\u000alock lost key=b"'),
            ("\u202e", r'"\u202e"'),
            ("é", '"é"'),
        ],
    )
    def test_quotes(self, caplog: pytest.LogCaptureFixture, value: object, text: str) -> None:
        """A single word needs no quotes. The field of the record keeps the value."""
        caplog.set_level(logging.INFO, "django_mongolock")
        log(INFO, "lock lost", key=value, token=17)
        assert caplog.messages == [f"lock lost key={text} token=17"]
        assert caplog.records[0].__dict__["lock_key"] == value

    def test_what_is_empty_is_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        """The line is for people. The record keeps the field."""
        caplog.set_level(logging.INFO, "django_mongolock")
        log(INFO, "lock lost", key="k", template="")
        assert caplog.messages == ["lock lost key=k"]
        assert caplog.records[0].__dict__["lock_template"] == ""


@given(st.text())
def test_printable(text: str) -> None:
    assert not shown(printable(text))
    assert printable(text) == text or not text.isprintable()


@pytest.mark.long
@WITH_MONGO
def test_no_second_place_for_guesses(locks: Locks) -> None:
    """No password is checked here. The login page is the only place to guess passwords."""
    operator("view_lock_status", username="monitor", password=make_password("right"))
    sent = "Basic " + base64.b64encode(b"monitor:right").decode()
    response = Client().get(STATUS, headers={"Authorization": sent})
    assert response.status_code == 403
    assert "WWW-Authenticate" not in response


#: The name of a holder of a document.
EVIL_NAME = "a\u202eb\x1b[2J<i x=1>"


@WITH_MONGO
@pytest.mark.parametrize("action", ["clear_stale_documents", "force_release_documents"])
def test_what_the_log_of_the_admin_shows(locks: Locks, action: str) -> None:
    """The name of a holder may come from any program. `printable` cleans the name for the history of an object and the
    list of recent actions, both pages of Django."""
    ad = Ad.objects.create(
        user_id="u", title="bike", price=5, export_status="exporting", locked_by=EVIL_NAME,
        lock_timestamp=timezone.now().replace(year=2020),
    )  # fmt: skip
    client = operator(is_superuser=True)
    page = client.post("/admin/shop/ad/", {"action": action, "_selected_action": str(ad.pk), "index": "0"}, follow=True)
    if action == "force_release_documents":
        assert "\u202e" not in page.content.decode()
        shown = json_util.dumps(["ad exports", ad.pk, EVIL_NAME])
        client.post(f"{LIST}force-release/", {"lock": shown, "reason": "why \u202e"})
    entry = LogEntry.objects.get(object_id=str(ad.pk))
    assert "a\\u202eb\\u001b[2J" in entry.change_message
    assert entry.change_message.isprintable()
    assert "<i x" not in client.get(f"/admin/shop/ad/{ad.pk}/history/").content.decode()
