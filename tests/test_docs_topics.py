"""The examples of the quickstart and of the pages on views, requests, Celery, commands, rows and owners are run."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.db import SessionStore
from django.core.management import call_command
from django.db import connection
from django.http import HttpRequest
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.module_loading import import_string
from ninja.testing import TestAsyncClient, TestClient
from rest_framework.test import APIRequestFactory, force_authenticate

from django_mongolock import SKIPPED
from testproject.celery import app as shop
from tests.support.looking import held_elsewhere, holders

pytestmark = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str) -> list[Any]:
    """The Python examples of a page, compiled so that an error names the page and its line."""
    text = (DOCS / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [compile("\n" * text[: match.start(1)].count("\n") + match[1], page, "exec") for match in found]


def run(page: str, *skip: int) -> dict[str, Any]:
    """Run the examples of a page after another; return what they have defined."""
    names: dict[str, Any] = {"__name__": f"docs_{uuid.uuid4().hex}"}
    for number, code in enumerate(blocks(page)):
        if number not in skip:
            exec(code, names)  # noqa: S102 - our own pages
    return names


@pytest.fixture
def app() -> Iterator[Celery]:
    """The Celery application that shared tasks belong to, with a broker in memory; afterwards they are the shop's."""
    app = Celery("docs", broker="memory://", backend="cache+memory://")
    app.set_current()
    app.set_default()
    yield app
    shop.set_current()
    shop.set_default()


def test_celery(app: Celery) -> None:
    """docs/howto/celery.md"""
    names = run("howto/celery.md")
    assert names["export_ad"]("x") == "exported x"
    assert [names["charge"].apply((5,)).get() for _ in range(2)] == ["charged", "was charged"]
    assert names["rebuild"].apply(("a",)).get() > 0
    assert (names["nightly"](), names["nightly"]()) == ("ran", SKIPPED)
    assert [names["report"](tenant) for tenant in "aba"] == ["a", "b", SKIPPED]
    (schedule,) = names["CELERY_BEAT_SCHEDULE"].values()
    assert app.tasks[schedule["task"]].apply(kwargs=schedule["kwargs"]).get() == {"found": 0, "cleared": 0}


def test_quickstart(app: Celery) -> None:
    """docs/tutorial/quickstart.md: its settings, a view, a task, a block."""
    settings, examples = blocks("tutorial/quickstart.md")
    project: dict[str, Any] = {"os": os, "DATABASES": {}, "INSTALLED_APPS": []}
    exec(settings, project)  # noqa: S102
    assert project["MONGOLOCK"]["DATABASE"] in project["DATABASES"]
    names: dict[str, Any] = {"__name__": f"docs_{uuid.uuid4().hex}"}
    exec(examples, names)  # noqa: S102
    request = RequestFactory().get("/")
    assert names["pay"](request, 5).content == b"order 5 is paid"
    assert names["ship"].apply((5,)).get() == "order 5 is shipped"
    assert names["cancel"](5) == "order 5 is cancelled"
    with held_elsewhere("order:5"):
        assert names["pay"](request, 5).status_code == 423


def answers(names: dict[str, Any]) -> dict[str, int]:
    """The status that each view of docs/howto/views.md gives for order 5."""
    get, post = RequestFactory().get("/"), APIRequestFactory().post("/")
    ninja = TestClient(names["api"])
    return {
        "function": async_to_sync(names["pay"])(AsyncRequestFactory().get("/"), order_id=5).status_code,
        "class": names["OrderView"].as_view()(get, order_id=5).status_code,
        "method": names["CartView"].as_view()(RequestFactory().post("/"), cart_id=5).status_code,
        "inside": async_to_sync(names["refund"])(AsyncRequestFactory().get("/"), order_id=5).status_code,
        "api_view": names["pay_by_api"](post, order_id=5).status_code,
        "viewset": names["OrderSet"].as_view({"post": "update"})(post, pk=5).status_code,
        "ninja": ninja.post("/orders/5/pay").status_code,
        "ninja, async": async_to_sync(TestAsyncClient(names["api"]).post)("/orders/5/ship").status_code,
        "ninja, inside": ninja.post("/orders/5/refund").status_code,
    }


@pytest.mark.long
def test_views() -> None:
    """docs/howto/views.md: each answers, and each says that the order is locked."""
    names = run("howto/views.md")
    assert set(answers(names).values()) == {200}
    with held_elsewhere("order:5"), held_elsewhere("cart:5"):
        assert set(answers(names).values()) == {423}
    assert names["CartView"].as_view()(RequestFactory().get("/"), cart_id=5).status_code == 200
    assert import_string(names["REST_FRAMEWORK"]["EXCEPTION_HANDLER"])


def test_idempotency(app: Celery) -> None:
    """docs/howto/idempotency.md: what is sent again gets the first response, with its mark."""
    names = run("howto/idempotency.md")
    key, user = {"Idempotency-Key": uuid.uuid4().hex}, User.objects.create(username="anna")
    ninja = TestAsyncClient(names["api"])

    def post(view: Any, make: Any = RequestFactory, **headers: str) -> Any:
        request = make().post("/", headers=headers or key)
        request.user = user
        if make is APIRequestFactory:
            force_authenticate(request, user)
        return view(request)

    for send in (
        lambda: post(names["charge"]),
        lambda: post(names["webhook"], **{"Webhook-Id": uuid.uuid5(uuid.NAMESPACE_URL, str(key)).hex}),
        lambda: post(names["charge_by_api"], APIRequestFactory, **{"Idempotency-Key": f"{key}by_api"[-40:]}),
        lambda: post(names["ChargeSet"].as_view({"post": "create"}), APIRequestFactory, **{"Idempotency-Key": "set"}),
        lambda: async_to_sync(ninja.post)("/charges", headers={**key, "Authorization": "Bearer anna"}),
    ):
        first, again = send(), send()
        assert (first.status_code, first.content) == (again.status_code, again.content)
        assert "Idempotent-Replayed" not in first.headers
        assert again.headers["Idempotent-Replayed"] == "true"
    assert [names["charge_order"].apply((5,)).get() for _ in "12"] == [{"charge": "ch_5"}] * 2


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/howto/commands.md"""
    command = run("howto/commands.md")["Command"]
    call_command(command(), "books")
    with held_elsewhere("import:books"):
        call_command(command(), "books")
    assert capsys.readouterr().out.startswith("imported books\nSkipped: lock 'import:books'")


def test_rows() -> None:
    """docs/howto/rows.md"""
    page = blocks("howto/rows.md")
    names: dict[str, Any] = {"__name__": "docs_rows"}
    exec(page[0], names)  # noqa: S102
    parcel = names["Parcel"]
    with connection.schema_editor() as editor:
        editor.create_model(parcel)
    parcel.objects.create(pk=5)
    User.objects.create(username="anna")
    for code in page[1:]:
        exec(code, names)  # noqa: S102
    assert parcel.objects.get().weight == 1
    with connection.schema_editor() as editor:
        editor.delete_model(parcel)


def test_owners() -> None:
    """docs/howto/owners.md"""
    request = HttpRequest()
    request.session, request.user = SessionStore(), AnonymousUser()
    names = run("howto/owners.md")
    assert names["export"](request) == "exported"
    assert holders("export") == []

    booked: list[tuple[int, int]] = []
    names["book"] = lambda pk, token: booked.append((pk, token))
    other = HttpRequest()
    other.session, other.user = SessionStore(), AnonymousUser()
    begin, pay = names["begin"], names["pay"]
    assert [begin(request, 5).status_code, begin(request, 5).status_code, begin(other, 5).status_code] == [
        200,
        200,
        423,
    ]
    assert [pay(other, 5).status_code, pay(request, 5).status_code, pay(request, 5).status_code] == [409, 200, 409]
    assert [pk for pk, _token in booked] == [5]
