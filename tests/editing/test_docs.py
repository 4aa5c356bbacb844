"""The examples of docs/howto/edit-locks.md are run, in the project of the tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings as project
from django.contrib import admin
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.urls import path
from pytest_django import Settings

from django_mongolock.conf import LockSettings
from testproject.shop.models import Order
from tests.editing.site import OrderForm
from tests.editing.staff import fields_of, holders, staff, state_of, text_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "howto/edit-locks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def order(locks: Locks) -> Order:
    return Order.objects.create(buyer=User.objects.create(username="buyer"), item="bike", price=100)


@pytest.fixture
def names(order: Order, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python examples define. The views have addresses, and the template of the page."""
    names: dict[str, Any] = {"__name__": "docs_edit_locks", "Order": Order, "OrderForm": OrderForm, "order": order}
    assert len(blocks("python")) == 4
    for code in blocks("python"):
        exec(compile(code, "edit-locks.md", "exec"), names)  # noqa: S102 - our own page
    (html,) = blocks("html")
    templates: Any = project.TEMPLATES
    (engine,) = templates
    found = {"order.html": html, "shop/order_form.html": html}
    loaders: list[Any] = [
        ("django.template.loaders.locmem.Loader", found),
        "django.template.loaders.app_directories.Loader",
    ]
    options: dict[str, Any] = {"context_processors": engine["OPTIONS"]["context_processors"], "loaders": loaders}
    settings.TEMPLATES = [{**dict(engine), "DIRS": [], "APP_DIRS": False, "OPTIONS": options}]
    urls: Any = ModuleType("docs_edit_locks_urls")
    urls.urlpatterns = [
        path("class/<int:pk>/", names["OrderEdit"].as_view()),
        path("function/<int:pk>/", names["edit_order"]),
        path("orders/", lambda request: HttpResponse("orders")),
    ]
    monkeypatch.setitem(sys.modules, urls.__name__, urls)
    settings.ROOT_URLCONF = urls.__name__
    return names


@pytest.mark.parametrize("kind", ["class", "function"])
def test_views(names: dict[str, Any], order: Order, kind: str) -> None:
    """howto/edit-locks.md"""
    names["lock"].release()
    address = f"/{kind}/{order.pk}/"
    anna, ben = staff("anna"), staff("ben")
    page = anna.get(address)
    assert state_of(page) == "mine"
    other = ben.get(address)
    assert "This is being edited by anna." in text_of(other)
    assert "Save" not in text_of(other)
    sent = fields_of(page) | {"item": "car"}
    Order.objects.update(price=7)
    page = anna.post(address, sent)
    assert "Price 7.00 100.00 someone else; you had not changed it" in text_of(page)
    assert anna.post(address, fields_of(page)).status_code == 302
    assert (Order.objects.get().item, int(Order.objects.get().price)) == ("car", 7)
    assert holders(order) == []


def test_lock(names: dict[str, Any], order: Order) -> None:
    """The example of the lock itself has it; and the admin is one that can be registered."""
    assert names["status"].held
    assert [holder["user"] for holder in holders(order)] == ["anna"]
    assert names["OrderAdmin"](Order, admin.site).check() == []


def test_settings() -> None:
    """The table has every setting with its default."""
    table = dict(re.findall(r"^\| `(EDIT_\w+)` \| `?([\w.]+)`? \|", PAGE, re.MULTILINE))
    values = {name: getattr(LockSettings(), name) for name in LockSettings.__dataclass_fields__ if name[:5] == "EDIT_"}
    assert table == {name: f"{value:g}" if type(value) is float else str(value) for name, value in values.items()}
