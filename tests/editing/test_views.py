"""Views with an edit lock, as a class with `EditLockViewMixin` and as a coroutine with `Editing`, and unusual
admins."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import pytest
from django.contrib import admin
from django.contrib.auth.models import AnonymousUser, User
from django.db import OperationalError, connections
from django.http import HttpRequest
from django.test import Client, RequestFactory
from pytest_django import Settings

from django_mongolock.editing import Editing
from django_mongolock.editing import checks as edit_checks
from django_mongolock.editing.admin import EditLockMixin
from django_mongolock.exceptions import VersionConflict
from testproject.shop.models import Order
from tests.editing.conftest import set_locks
from tests.editing.site import OrderAdmin, OrderEdit, OrderRows
from tests.editing.staff import TAKES, Tab, holders, state_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_checks import ids

pytestmark = WITH_MONGO


@pytest.mark.parametrize("kind", ["own", "async"])
class TestOwnViews:
    """Views as classes and as coroutines, with the same tests."""

    @pytest.fixture
    def address(self, order: Order, kind: str) -> str:
        return f"/{kind}/{order.pk}/"

    def test_two_people(self, order: Order, address: str) -> None:
        """The second user reads while the first one edits. After the first save, the second may edit."""
        anna, ben = Tab("anna", address), Tab("ben", address)
        assert anna.state == "mine"
        assert "This is being edited by anna." in ben.text
        assert "Save" not in ben.text
        assert anna.send(item="car").status_code == 302
        assert Order.objects.get().item == "car"
        assert holders(order) == []

    def test_lost(self, order: Order, address: str) -> None:
        """Nothing is saved. An untouched field takes the stored value. The second send saves."""
        anna = Tab("anna", address)
        Order.objects.update(item="boat", price=7)
        anna.send(item="car")
        assert anna.state == "refused"
        assert "Changed meanwhile: Item, Price." in anna.text
        assert Order.objects.get().item == "boat"
        assert (anna.fields["item"], anna.fields["price"]) == ("car", "7.00")
        assert anna.send().status_code == 302
        saved = Order.objects.get()
        assert (saved.item, int(saved.price), holders(order)) == ("car", 7, [])

    def test_script(self, address: str) -> None:
        """The script of the page sends beats, leaves, takes again and takes over. A form is compared by its own
        fields."""
        anna, boss = Tab("anna", address), Tab("boss", address, TAKES)
        assert anna.tell("beat")["state"] == "mine"
        looked = boss.tell("read")
        assert (looked["state"], looked["mayTakeOver"]) == ("busy", True)
        boss.take_over(looked["token"])
        assert boss.state == "mine"
        assert anna.tell("beat")["state"] == "busy"
        boss.tell("leave")
        told = anna.tell("take")
        assert (told["state"], "changed meanwhile" in told["text"]) == ("mine", False)


def test_an_editor_without_a_login(order: Order) -> None:
    """A session identifies an editor. The lock works without a session, too."""
    first, second = (Tab(Client(), f"/own/{order.pk}/") for _ in range(2))
    assert first.state == "mine"
    assert "This is being edited by someone else." in second.text
    assert first.tell("beat")["state"] == "mine"
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    assert Editing.open(request, "anything").held


def test_anything_that_has_a_name(locks: Locks) -> None:
    """An edit lock works for anything with a name, such as a page of settings."""
    request = RequestFactory().get("/")
    request.user = User.objects.create(username="anna")
    editing = Editing.open(request, "settings")
    assert (editing.held, editing.readonly, editing.state) == (True, False, "mine")
    assert holders("settings")
    editing.done()
    assert holders("settings") == []


@pytest.mark.parametrize("page", ["change", "delete"])
def test_released_after_the_commit(order: Order, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """The lock is released after the commit, also under ATOMIC_REQUESTS. The next user sees the saved or deleted
    object."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    database: Any = connections["default"]
    key, left, commit, anna = f"shop.order:{order.pk}", list[int](), database._commit, Tab("anna", order)
    delete = anna.client.get(anna.address.replace("change", "delete"))["Location"]

    def look() -> None:
        left.append(len(holders(key)))
        commit()

    monkeypatch.setattr(database, "_commit", look)
    anna.client.post(delete, {"post": "yes"}) if page == "delete" else anna.send(item="car")
    assert (left[0], holders(key)) == (1, [])


@pytest.mark.parametrize("own", [False, True])
def test_a_conflict_each_time(order: Order, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """The typed text is shown again, however often another writer is faster."""
    anna = Tab("anna", f"/own/{order.pk}/" if own else order)
    error = OperationalError(1213, "Deadlock found") if own else VersionConflict("shop.Order", order.pk, 1)
    monkeypatch.setattr(Order, "save", Mock(side_effect=error))
    anna.send(item="car")
    assert (anna.state, anna.fields["item"]) == ("refused", "car")


@pytest.mark.parametrize("late", [False, True])
def test_deleted_meanwhile(order: Order, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """If the object is deleted, even during the save, the typed text is shown at each send, and nothing stays
    locked."""
    anna, key, save = Tab("anna", f"/own/{order.pk}/"), f"shop.order:{order.pk}", Editing.run
    if late:
        monkeypatch.setattr(Editing, "run", lambda *args: (order.delete(), save(*args))[1])
    else:
        order.delete()
    for _ in range(2):
        anna.send(item="car")
        assert (anna.state, anna.fields["item"], holders(key)) == ("refused", "car", [])
    assert anna.tell("beat")["state"] == "gone"


def test_what_the_request_has_read_before(locks: Locks) -> None:
    """The form compares with the stored object, not with an earlier read such as `request.user`. An untouched field
    keeps the stored value."""
    anna = Tab("anna", "/user/")
    User.objects.update(first_name="other", last_name="theirs")
    anna.send(first_name="mine")
    assert (anna.state, anna.fields["last_name"]) == ("refused", "theirs")
    assert anna.send().status_code == 302
    assert User.objects.values_list("first_name", "last_name").get() == ("mine", "theirs")


def test_a_view_that_shows_the_form_again(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """form_valid() shows the form again. Nothing was saved, and the page keeps the lock."""
    monkeypatch.setattr(OrderEdit, "form_valid", OrderEdit.form_invalid)
    anna = Tab("anna", f"/own/{order.pk}/")
    anna.send(item="car")
    assert (anna.state, len(holders(order))) == ("mine", 1)


class Stubborn(OrderAdmin):
    """An admin with its own permissions and its own template."""

    change_form_template = "editing/custom.html"

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True


def test_an_admin_that_overrides_permissions_and_template(order: Order) -> None:
    """The page is read-only like any other, inside its own template."""
    view: Any = Stubborn(Order, admin.site).changeform_view
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
    """The mixin refuses an inline, and says that it goes on the admin."""
    with pytest.raises(TypeError, match="goes on the ModelAdmin; its inlines are locked with it"):
        type("Wrong", (EditLockMixin, OrderRows), {})


class TestChecks:
    """The messages of `manage.py check`."""

    @pytest.mark.parametrize(
        ("values", "found"),
        [({}, []), ({"EDIT_LEASE": 5, "EDIT_BEAT": 3}, ["E084"]), ({"EDIT_LEASE": 60, "EDIT_BEAT": 3}, ["W080"])],
        ids=str,
    )
    def test_times(self, settings: Settings, values: dict[str, Any], found: list[str]) -> None:
        """A lease that is too short for the beats, or for a tab in the background, is reported."""
        set_locks(settings, **values)
        assert ids(edit_checks.check_edit_locks(app_configs=None)) == found

    def test_unused(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        """A project without edit locks gets no message about them."""
        set_locks(settings, EDIT_LEASE=5, EDIT_BEAT=3)
        monkeypatch.setattr("django.contrib.admin.sites.all_sites", [])
        assert edit_checks.check_edit_locks(app_configs=None) == []


def test_nothing_inline(order: Order) -> None:
    """The panel needs no exception in a content security policy."""
    page = Tab("anna", f"/own/{order.pk}/").html
    assert not re.search(r'<script(?![^>]*src=)|\sstyle=|\son[a-z]+="|<style|javascript:', page)


def test_without_users(order: Order, rf: RequestFactory) -> None:
    """A project without users has edit locks, too. The object of another editor is not taken over."""
    first, second = rf.get("/"), rf.get("/")
    assert Editing.open(first, order).held
    editing = Editing.open(second, order)
    assert not editing.may_take_over
    assert not editing.held
