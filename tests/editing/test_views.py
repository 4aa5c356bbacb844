"""Views with an edit lock: a class with `EditLockViewMixin`, a coroutine with `Editing`. And unusual admins."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction
from django.http import HttpRequest
from django.test import Client, RequestFactory
from pytest_django import Settings

from django_mongolock.editing import Editing
from django_mongolock.editing import checks as edit_checks
from django_mongolock.editing.admin import EditLockMixin
from testproject.shop.models import Order
from tests.editing.conftest import set_locks
from tests.editing.site import OrderAdmin, OrderRows
from tests.editing.staff import TAKES, Tab, holders, state_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_checks import ids

pytestmark = WITH_MONGO


@pytest.mark.parametrize("kind", ["own", "async"])
class TestOwnViews:
    """Both kinds do the same."""

    @pytest.fixture
    def address(self, order: Order, kind: str) -> str:
        return f"/{kind}/{order.pk}/"

    def test_two_people(self, order: Order, address: str) -> None:
        """The second reads; the first saves; then the second may."""
        anna, ben = Tab("anna", address), Tab("ben", address)
        assert anna.state == "mine"
        assert "This is being edited by anna." in ben.text
        assert "Save" not in ben.text
        assert anna.send(item="car").status_code == 302
        assert Order.objects.get().item == "car"
        assert holders(order) == []

    def test_lost(self, address: str) -> None:
        """Nothing is saved; what was left alone takes theirs; sent again, it is saved."""
        anna = Tab("anna", address)
        Order.objects.update(item="boat", price=7)
        anna.send(item="car")
        assert anna.state == "refused"
        assert "Changed meanwhile: Item, Price." in anna.text
        assert Order.objects.get().item == "boat"
        assert (anna.fields["item"], anna.fields["price"]) == ("car", "7.00")
        assert anna.send().status_code == 302
        saved = Order.objects.get()
        assert (saved.item, int(saved.price)) == ("car", 7)

    def test_script(self, address: str) -> None:
        """Beats, leaving, taking again, taking over."""
        anna, boss = Tab("anna", address), Tab("boss", address, TAKES)
        assert anna.tell("beat")["state"] == "mine"
        looked = boss.tell("read")
        assert (looked["state"], looked["mayTakeOver"]) == ("busy", True)
        boss.take_over(looked["token"])
        assert boss.state == "mine"
        assert anna.tell("beat")["state"] == "busy"
        boss.tell("leave")
        assert anna.tell("take")["state"] == "mine"


def test_an_editor_without_a_login(order: Order) -> None:
    """A session identifies an editor; without one, the lock exists all the same."""
    first, second = (Tab(Client(), f"/own/{order.pk}/") for _ in range(2))
    assert first.state == "mine"
    assert "This is being edited by someone else." in second.text
    assert first.tell("beat")["state"] == "mine"
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    assert Editing.open(request, "anything").held


def test_anything_that_has_a_name(locks: Locks) -> None:
    """A page of settings, for one."""
    request = RequestFactory().get("/")
    request.user = User.objects.create(username="anna")
    editing = Editing.open(request, "settings")
    assert (editing.held, editing.readonly, editing.state) == (True, False, "mine")
    assert holders("settings")
    editing.done()
    assert holders("settings") == []


def test_released_after_the_commit(order: Order, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ATOMIC_REQUESTS as well: who comes next sees what was saved."""
    from django_mongolock.editing import page as edited

    monkeypatch.setattr(edited, "open_transaction", lambda using: True)
    waiting: list[Any] = []
    monkeypatch.setattr(transaction, "on_commit", lambda call, using: waiting.append(call))
    Tab("anna", order).send(item="car")
    assert len(holders(order)) == 1
    for call in waiting:
        call()
    assert holders(order) == []


class Stubborn(OrderAdmin):
    """Has its own idea of permissions, and its own template."""

    change_form_template = "editing/custom.html"

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True


def test_an_admin_that_overrides_permissions_and_template(order: Order) -> None:
    """Its page is read only as any other, and has its own template around."""
    view = Stubborn(Order, admin.site).changeform_view
    pages = []
    for name in ("anna", "ben"):
        request = RequestFactory().get(f"/{order.pk}/")
        request.user = User.objects.create(username=name, is_superuser=True, is_staff=True)
        response = view(request, str(order.pk))
        response.render()
        pages.append(response)
    assert [state_of(page) for page in pages] == ["mine", "busy"]
    assert all("<p>of the project</p>" in page.content.decode() for page in pages)
    assert ['name="item"' in page.content.decode() for page in pages] == [True, False]


def test_on_an_inline() -> None:
    """It goes on the admin, and says so."""
    with pytest.raises(TypeError, match="goes on the ModelAdmin; its inlines are locked with it"):
        type("Wrong", (EditLockMixin, OrderRows), {})


class TestChecks:
    """What `manage.py check` says."""

    @pytest.mark.parametrize(
        ("values", "found"),
        [({}, []), ({"EDIT_LEASE": 5, "EDIT_BEAT": 3}, ["E084"]), ({"EDIT_LEASE": 60, "EDIT_BEAT": 3}, ["W080"])],
        ids=str,
    )
    def test_times(self, settings: Settings, values: dict[str, Any], found: list[str]) -> None:
        """A lease that is too short for the beats, or for a tab in the background."""
        set_locks(settings, **values)
        assert ids(edit_checks.check_edit_locks(app_configs=None)) == found

    def test_no_sessions(self, settings: Settings) -> None:
        """There is none to log out of."""
        settings.MIDDLEWARE = [path for path in settings.MIDDLEWARE if "Session" not in path]
        assert ids(edit_checks.check_edit_locks(app_configs=None)) == ["W081"]

    def test_unused(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who has no edit locks is told nothing of them."""
        set_locks(settings, EDIT_LEASE=5, EDIT_BEAT=3)
        monkeypatch.setattr("django.contrib.admin.sites.all_sites", [])
        assert edit_checks.check_edit_locks(app_configs=None) == []


def test_nothing_inline(order: Order) -> None:
    """The panel needs no exception in a content security policy."""
    page = Tab("anna", f"/own/{order.pk}/").html
    assert not re.search(r'<script(?![^>]*src=)|\sstyle=|\son[a-z]+="|<style|javascript:', page)


def test_without_users(order: Order, rf: RequestFactory) -> None:
    """A project without users has edit locks, too: what another one edits is not taken over."""
    first, second = rf.get("/"), rf.get("/")
    assert Editing.open(first, order).held
    editing = Editing.open(second, order)
    assert not editing.may_take_over
    assert not editing.held
