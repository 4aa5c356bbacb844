"""An incident in a real browser: somebody asks for a lock, or takes it, and the process that holds it hears of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
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
from tests.support.lock_documents import Document, Locks, clock
from tests.support.waiting import eventually
from tests.test_admin import LIST, page_of

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True, databases=["default", "mongo"])]


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
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
