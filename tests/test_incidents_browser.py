"""An incident in a real browser: somebody asks for a lock, or takes it, and the process that holds it hears of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_core_python import sync_playwright
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connections
from pymongo import MongoClient
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from django_mongolock.backends.base import close_backends
from django_mongolock.engine.indexes import ensure_indexes
from django_mongolock.models import LockEvent
from tests.support.browsing import MIDDLEWARE, browser, opened
from tests.support.lock_documents import Document, Locks, clock, entry, waiter
from tests.support.waiting import eventually
from tests.test_admin import LIST, page_of

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True, databases=["default", "mongo"])]
#: Where to put pictures of the pages, for people; nowhere if it is not set.
PICTURES = os.environ.get("INCIDENT_PICTURES", "")
TOLD: dict[str, dict[str, Any]] = {
    "granted": {"waited_ms": 1_200},
    "asked": {"by": "bert", "reason": "we deploy at 3"},
    "forced": {"by": "anna", "reason": "the worker on web-3 hangs since 2:40", "held_ms": 4_500_000},
    "lost": {"held_ms": 4_508_000, "reason": "it was taken away, or its lease ended on the server"},
    "deadlock": {"reason": "host web-1 pid 4711, for 3.2 s"},
    "released": {"held_ms": 31},
}
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 420)]


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    """One browser for all tests of this module."""
    with browser() as found:
        yield found


@pytest.fixture
def locks(mongo: MongoClient[Document], settings: Settings) -> Iterator[Locks]:
    """The locks of the live server, which keeps a history; empty."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "HISTORY": 1}
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, MIDDLEWARE]
    database = mongo[str(connections["mongo"].settings_dict["NAME"])]
    database["mongolock_locks"].delete_many({})
    database["mongolock_locks_history"].drop()
    ensure_indexes(database["mongolock_locks"])
    yield Locks(database["mongolock_locks"], clock(mongo))
    close_backends()
    database["mongolock_locks_history"].drop()


@pytest.fixture
def anna(transactional_db: None) -> User:
    """On call."""
    return User.objects.create_superuser("anna", password="x")


@pytest.fixture
def site(live_server: LiveServer, settings: Settings) -> str:
    settings.ALLOWED_HOSTS = ["*"]
    return str(live_server.url)


@contextmanager
def holder(locks: Locks, key: str) -> Iterator[Callable[[], str]]:
    """A process that holds the lock; call it for the next line that it says."""
    command = [sys.executable, "-m", "tests.incident_holder", locks.collection.database.name, key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("holds: ")
        try:
            yield process.stdout.readline
        finally:
            process.kill()


def axe(page: Any) -> list[str]:
    """What axe has against a page: the rule, and where."""
    script = Path(sync_playwright.__file__).with_name("axe.min.js").read_text()
    # By the debugger's protocol: the page's own policy forbids scripts, as it should.
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": script})
    found = session.send(
        "Runtime.evaluate",
        {"expression": "axe.run().then(r => r.violations)", "awaitPromise": True, "returnByValue": True},
    )
    return [
        f"{violation['id']}: {node['html'][:200]} {node['failureSummary']}"
        for violation in found["result"]["value"]
        for node in violation["nodes"]
    ]


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/{name}.png", full_page=True)


def test_force_release_is_seen_by_the_holder(locks: Locks, anna: User, site: str, running: Any) -> None:
    """From the list by mouse: the page says who holds it; a reason is needed; the holder learns of it within its lease;
    the page of the lock tells what happened, by whom and why."""
    with holder(locks, "import:books") as next_line, opened(running, site, anna) as page:
        page.goto(LIST)
        page.check("input[name=_selected_action]")
        page.select_option("select[name=action]", "force_release")
        page.click("button[name=index]")
        assert "the nightly import" in page.inner_text("#content")
        assert page.inner_text("h1") == "Force release?"
        page.click("input.mongolock-danger")  # the browser itself asks for the reason
        assert page.url.endswith(LIST)
        assert not LogEntry.objects.exists()
        page.fill("input[name=reason]", "it hangs since 2:40")
        page.click("input.mongolock-danger")
        assert "1 lock was taken from its holder." in page.inner_text(".messagelist")
        assert next_line() == "lost: True\n"
        assert "Reason: it hangs since 2:40" in LogEntry.objects.get().get_change_message()
        kinds = ["forced", "granted", "lost"]
        assert eventually(lambda: sorted(LockEvent.objects.values_list("event", flat=True)) == kinds)
        page.goto(page_of("import:books"))
        assert "by anna · it hangs since 2:40" in page.inner_text("#content")
        assert page.complaints == []


def test_a_request_is_granted_by_the_holder(locks: Locks, anna: User, site: str, running: Any) -> None:
    """From the page of the lock with the keyboard alone: the holder is told who asks and why, and releases it."""
    with holder(locks, "import:books") as next_line, opened(running, site, anna) as page:
        page.goto(page_of("import:books"))
        page.focus(".mongolock-next a[href*=ask-to-release]")
        page.keyboard.press("Enter")
        page.wait_for_selector("input[name=reason]")
        assert page.inner_text("h1") == "Ask to release?"
        page.focus("input[name=reason]")
        page.keyboard.type("we deploy at 3")
        page.keyboard.press("Enter")
        page.wait_for_selector(".messagelist")
        assert "The holder of 1 lock was asked" in page.inner_text(".messagelist")
        assert next_line() == "asked: anna, in the admin: we deploy at 3\n"
        assert next_line() == "released: True\n"
        assert page.url.endswith(page_of("import:books"))
        page.reload()
        assert "The lock is free." in page.inner_text("#content")
        assert page.complaints == []


@pytest.mark.parametrize("window", LOOKS, ids=str)
def test_looks(locks: Locks, anna: User, site: str, running: Any, window: tuple[Any, int]) -> None:
    """Light and dark, wide and narrow: axe has nothing against any of the pages, and none is wider than the window."""
    facts: dict[str, Any] = {"place": "task shop.tasks.export_ad 7d0", "user": "anna", "owner": "job-1"}
    locks.add("order:5", [entry(1, label="nightly", **facts)], [waiter(2, place="POST /orders/5/pay"), waiter(3)])
    locks.add("catalog", [entry(n, mode="shared", host=f"web-{n}") for n in (1, 2, 3)])
    locks.held("import:" + "very-long-" * 12)
    moment = entry()["acquired_at"]
    stored = {**facts, "host": "web-3", "pid": 4711, "thread": "MainThread", "token": 1763676000001, "key": "order:5"}
    history = locks.collection.database["mongolock_locks_history"]
    history.insert_many({**stored, "event": event, "at": moment, **more} for event, more in TOLD.items())
    wrong: dict[str, list[str]] = {}
    scheme, width = window
    with opened(running, site, anna, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:

        def look(name: str) -> None:
            picture(page, f"{name}-{scheme}-{width}")
            found = axe(page)
            if page.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1"):
                found.append("it is wider than the window")
            if found:
                wrong[name] = found

        page.goto(page_of("order:5"))
        look("detail")
        page.click(".mongolock-next a[href*=force-release]")
        page.wait_for_selector("input[name=reason]")
        look("force")
        page.eval_on_selector("form[action$='force-release/']", "form => { form.noValidate = true }")
        page.click("input.mongolock-danger")
        page.wait_for_selector(".errorlist")
        look("force-without-reason")
        page.goto(page_of("catalog"))
        page.click(".mongolock-next a[href*=ask-to-release]")
        page.wait_for_selector("input[name=reason]")
        look("ask")
        page.goto("/admin/django_mongolock/lockevent/")
        look("events")
        page.goto("/admin/django_mongolock/lockevent/?q=zzz")
        look("events-empty")
        page.goto(LIST)
        look("list")
        page.goto(f"{LIST}?q=zzz")
        look("list-nothing-found")
        assert page.complaints == []
    assert wrong == {}
