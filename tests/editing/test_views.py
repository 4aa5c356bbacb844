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
from tests.editing.staff import fields_of, holders, staff, state_of, tell, text_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_checks import ids

pytestmark = WITH_MONGO


@pytest.mark.parametrize("kind", ["own", "async"])
class TestOwnViews:
    """Both kinds do the same."""

    def test_two_people(self, order: Order, kind: str) -> None:
        """The second reads; the first saves; then the second may."""
        address = f"/{kind}/{order.pk}/"
        anna, ben = staff("anna"), staff("ben")
        page = anna.get(address)
        assert state_of(page) == "mine"
        other = ben.get(address)
        assert "This is being edited by anna." in text_of(other)
        assert "Save" not in text_of(other)
        assert anna.post(address, fields_of(page) | {"item": "car"}).status_code == 302
        assert Order.objects.get().item == "car"
        assert holders(order) == []

    def test_lost(self, order: Order, kind: str) -> None:
        """Nothing is saved; what was left alone takes theirs; sent again, it is saved."""
        address = f"/{kind}/{order.pk}/"
        anna = staff("anna")
        sent = fields_of(anna.get(address)) | {"item": "car"}
        Order.objects.update(item="boat", price=7)
        page = anna.post(address, sent)
        assert state_of(page) == "refused"
        assert "Changed meanwhile: Item, Price." in text_of(page)
        assert Order.objects.get().item == "boat"
        again = fields_of(page)
        assert (again["item"], again["price"]) == ("car", "7.00")
        assert anna.post(address, again).status_code == 302
        assert (Order.objects.get().item, int(Order.objects.get().price)) == ("car", 7)

    def test_script(self, order: Order, kind: str) -> None:
        """Beats, leaving, taking again, taking over."""
        address = f"/{kind}/{order.pk}/"
        anna, boss = staff("anna"), staff("boss", "take_over_edit_lock")
        sent = fields_of(anna.get(address))
        assert tell(anna, address, "beat", sent).json()["state"] == "mine"
        looked = tell(boss, address, "read", {}).json()
        assert (looked["state"], looked["mayTakeOver"]) == ("busy", True)
        page = boss.post(f"{address}?edit-lock=take-over", {"edit_lock_take_over": looked["token"]}, follow=True)
        assert state_of(page) == "mine"
        assert tell(anna, address, "beat", sent).json()["state"] == "busy"
        tell(boss, address, "leave", fields_of(page))
        assert tell(anna, address, "take", sent).json()["state"] == "mine"


def test_an_editor_without_a_login(order: Order) -> None:
    """A session identifies an editor; without one, the lock exists all the same."""
    first, second = Client(), Client()
    page = first.get(f"/own/{order.pk}/")
    assert state_of(page) == "mine"
    assert "This is being edited by someone else." in text_of(second.get(f"/own/{order.pk}/"))
    assert tell(first, f"/own/{order.pk}/", "beat", fields_of(page)).json()["state"] == "mine"
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
    anna, page = staff("anna"), f"/admin/shop/order/{order.pk}/change/"
    anna.post(page, fields_of(anna.get(page)) | {"item": "car"})
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

    def test_fine(self) -> None:
        """The defaults."""
        assert edit_checks.check_edit_locks(app_configs=None) == []

    def test_wrong(self, settings: Settings) -> None:
        """A lease that is too short for the beats, or for a tab in the background; no session to log out of."""
        set_locks(settings, EDIT_LEASE=5, EDIT_BEAT=3)
        assert ids(edit_checks.check_edit_locks(app_configs=None)) == ["E084"]
        set_locks(settings, EDIT_LEASE=60, EDIT_BEAT=3)
        assert ids(edit_checks.check_edit_locks(app_configs=None)) == ["W080"]
        set_locks(settings, EDIT_LEASE=120)
        settings.MIDDLEWARE = [path for path in settings.MIDDLEWARE if "Session" not in path]
        assert ids(edit_checks.check_edit_locks(app_configs=None)) == ["W081"]

    def test_unused(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who has no edit locks is told nothing of them."""
        set_locks(settings, EDIT_LEASE=5, EDIT_BEAT=3)
        monkeypatch.setattr("django.contrib.admin.sites.all_sites", [])
        assert edit_checks.check_edit_locks(app_configs=None) == []


def test_nothing_inline(order: Order) -> None:
    """The panel needs no exception in a content security policy."""
    page = staff("anna").get(f"/own/{order.pk}/").content.decode()
    assert not re.search(r'<script(?![^>]*src=)|\sstyle=|\son[a-z]+="|<style|javascript:', page)


def test_without_users(order: Order, rf: RequestFactory) -> None:
    """A project without users has edit locks, too: what another one edits is not taken over."""
    first, second = rf.get("/"), rf.get("/")
    assert Editing.open(first, order).held
    editing = Editing.open(second, order)
    assert not editing.may_take_over
    assert not editing.held
