"""The pages of documents under locks in a real browser: for everyone, on a telephone, in the dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from tests.documents.conftest import Ground
from tests.documents.test_looking import ADDRESS, stuck
from tests.support.browsing import MIDDLEWARE, browser, opened
from tests.support.lock_documents import Locks

pytestmark = [
    pytest.mark.long,
    pytest.mark.django_db(databases=["default", "mongo"], transaction=True),
]


@pytest.fixture
def server(transactional_db: None, settings: Settings) -> Iterator[LiveServer]:
    """A site with a strict policy."""
    settings.MIDDLEWARE = [MIDDLEWARE, *settings.MIDDLEWARE]
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    server = LiveServer("127.0.0.1")
    yield server
    server.stop()


def test_pages(server: LiveServer, make: Callable[..., Ground], locks: Locks, django_user_model: Any) -> None:
    """List and question: axe finds nothing, nothing is cut off at 390 pixels, light and dark; the question is answered
    with the keyboard."""
    ground = make("model", stale_after=3_600)
    owner = "export-worker-3.example.internal/1f0e9c7d55aa42d7b1b0/4711"
    ids = [stuck(ground, seconds, holder=owner, title="a bike") for seconds in (5, 20, 4_000)]
    stuck(ground, version="x")
    user = django_user_model.objects.create_superuser("root")
    axe, found = Axe(), {}
    with browser() as running:
        for width, scheme in ((1280, "light"), (390, "dark")):
            size: Any = {"width": width, "height": 900}
            with opened(running, server.url, user, viewport=size, color_scheme=scheme) as page:

                def look(name: str, page: Any = page, at: str = f"{width} {scheme}") -> None:
                    violations = axe.run(page)["violations"]
                    found[f"{name}, {at}"] = [each["id"] for each in violations]
                    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    found[f"{name}, {at}, too wide"] = [wide] if wide > 0 else []

                page.goto(f"{ADDRESS}?owner={owner}&lock=test")
                look("list")
                page.locator("input[name=lock]").first.check()
                page.focus("button[value=selected]")
                page.keyboard.press("Enter")
                page.wait_for_selector("input[name=reason]")
                look("question")
                if scheme == "dark":
                    page.fill("input[name=reason]", "web-3 is gone")
                    page.keyboard.press("Enter")
                    page.wait_for_selector(".messagelist .success")
                assert page.complaints == []
    assert {name: what for name, what in found.items() if what} == {}
    assert [ground.read(id_, "state") for id_ in ids].count("failed") == 1
