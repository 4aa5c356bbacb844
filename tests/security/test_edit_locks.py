"""Edit locks at their addresses. A user who may not change an object writes nothing, and no redirect leaves the
site."""

import itertools
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import include, path
from pytest_django import Settings

from django_mongolock.editing import EditLock, edit_key
from django_mongolock.editing.edit_lock import Person
from testproject.shop.models import Order
from tests.editing import site
from tests.editing.conftest import _site  # noqa: F401 - its fixture
from tests.editing.staff import fields_of, holders, staff, state_of, tell
from tests.security.surfaces import EDITED
from tests.security.test_any_bytes import ACTIONS, METHODS
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import browser

pytestmark = WITH_MONGO

PAGES = ["change", "delete", "history"]


@pytest.fixture
def order(locks: Locks) -> Order:
    return Order.objects.create(buyer=User.objects.create(username="buyer"), item="bike", price=100)


def page_of(order: Order, page: str = "change") -> str:
    return f"/admin/shop/order/{order.pk}/{page}/"


def without_rights() -> list[Client]:
    """Clients that may not change an order."""
    return [
        Client(),
        browser("change_order", is_staff=False),
        browser(),
        browser("view_order"),
        browser("take_over_edit_lock", "view_order"),
        browser("view_lock", "force_release_lock", "ask_release_lock"),
        browser("add_order", "view_order"),
    ]


def everything(locks: Locks) -> list[dict[str, Any]]:
    return list(locks.collection.find({}))


class TestWithoutTheRight:
    """F73: Nothing is written, by any action and method, whoever else is editing."""

    @pytest.mark.long
    @pytest.mark.parametrize("is_edited", [False, True])
    def test_nothing_is_written(self, locks: Locks, order: Order, *, is_edited: bool) -> None:
        """Nothing is written to the lock of an existing object, or to that of a missing one."""
        token = ""
        if is_edited:
            staff("anna").get(page_of(order))
            token = str(holders(order)[0]["token"])
        before = everything(locks)
        assert len(before) == is_edited
        form = {"edit_lock_tab": "tab", "version_read": "x", "edit_lock_take_over": token, "idle": "9" * 9}
        missing = Order(pk=order.pk + 1_000)
        for client in without_rights():
            for method, action in itertools.product(METHODS, ACTIONS):
                for page in (page_of(order), page_of(missing)):
                    response = getattr(client, method)(f"{page}?edit-lock={action}&edit-tab=tab", form)
                    assert response.status_code < 500
            for page in PAGES:
                assert client.post(page_of(order, page), form).status_code < 500
            client.post("/admin/shop/order/", {"action": "delete_selected", "_selected_action": [order.pk]})
        assert everything(locks) == before

    @pytest.mark.long
    def test_keys_of_any_kind(self, locks: Locks) -> None:
        """Two hundred requests with addresses that are no primary keys make no document."""
        client = browser()
        for number in range(200):
            client.post(f"/admin/shop/order/{number * 'x'}/change/?edit-lock=leave", {"edit_lock_tab": str(number)})
        assert everything(locks) == []


class TestVisitors:
    """Visitors without a login. A session is made for the holder of a lock, and for no one else."""

    @pytest.mark.long
    @pytest.mark.parametrize("page", ["own", "async"])
    def test_a_reader_has_no_session(self, locks: Locks, order: Order, page: str) -> None:
        """A visitor of a page that another one edits gets no session and no cookie. The same holds for a HEAD, a
        prefetch, an image on another site, and requests of the page's script without a lock."""
        address = EDITED[page].format(order.pk)
        headers = ({"Sec-Fetch-Dest": "image"}, {"Sec-Purpose": "prefetch"}, {"Purpose": "prefetch"})
        for header in headers:
            assert "sessionid" not in Client().get(address, headers=header).cookies
        assert "sessionid" not in Client().head(address).cookies
        assert everything(locks) == []
        staff("anna").get(address)
        before = Session.objects.count()
        for method, action in itertools.product(("get", "head", "post"), ACTIONS):
            visitor = Client()
            form = {"edit_lock_tab": "tab", "idle": "9" * 9} if action else {}
            getattr(visitor, method)(f"{address}?edit-lock={action}", form)
            assert "sessionid" not in visitor.cookies, (method, action)
        assert Session.objects.count() == before


class TestRelease:
    """A user can release only a lock of his own."""

    def test_it_makes_no_document(self, locks: Locks, order: Order) -> None:
        """F73: A release of a lock that was never taken leaves nothing behind, even if the user may take it."""
        for number in range(50):
            status = EditLock(edit_key(order), Person(str(number)), f"tab{number}").release()
            assert status.free
        anna = staff("anna")
        for tab in ("a", "b", "c"):
            assert tell(anna, page_of(order), "leave", {"edit_lock_tab": tab}).json()["state"] == "free"
        order.delete()
        assert tell(anna, page_of(Order(pk=order.pk or 1)), "leave", {"edit_lock_tab": "a"}).status_code == 200
        assert everything(locks) == []

    @pytest.mark.long
    def test_it_leaves_the_lock_of_another_alone(self, locks: Locks, order: Order) -> None:
        """No tombstone and no count is written. A document cannot be filled from outside."""
        anna, ben = staff("anna"), staff("ben")
        anna.get(page_of(order))
        before = everything(locks)
        for number in range(300):
            answer = tell(ben, page_of(order), "leave", {"edit_lock_tab": str(number)})
            assert answer.json()["state"] == "busy"
        assert everything(locks) == before

    def test_of_an_object_that_was_deleted(self, locks: Locks, order: Order) -> None:
        anna = staff("anna")
        page, address = anna.get(page_of(order)), page_of(order)
        key = edit_key(order)
        assert locks.read(key)["holders"]
        order.delete()
        assert tell(anna, address, "beat", fields_of(page)).json()["state"] == "gone"
        assert locks.read(key)["holders"] == []


class TestOpening:
    """A link, an image or a frame of another site takes no lock."""

    @pytest.mark.parametrize("page", ["/admin/shop/order/{}/change/", "/own/{}/", "/async/{}/"])
    @pytest.mark.parametrize(
        ("headers", "takes"),
        [
            ({}, True),
            ({"Sec-Fetch-Dest": "document"}, True),
            *(({"Sec-Fetch-Dest": kind}, False) for kind in ("image", "iframe", "script", "empty", "x\x7f", "")),
            ({"Sec-Fetch-Dest": "document", "Sec-Purpose": "prefetch;prerender"}, False),
            ({"Purpose": "prefetch"}, False),
        ],
    )
    def test_get(self, locks: Locks, order: Order, page: str, headers: dict[str, str], takes: bool) -> None:
        """A GET takes the lock if the browser opens the page, or sends no header about its purpose."""
        response = staff("anna").get(page.format(order.pk), headers=headers)
        assert response.status_code == 200
        assert bool(holders(order)) == takes
        assert state_of(response) == ("mine" if takes else "free")

    def test_the_script_is_no_page(self, order: Order) -> None:
        anna = staff("anna")
        page = anna.get(page_of(order))
        address = f"{page_of(order)}?edit-lock=beat"
        answer = anna.post(address, fields_of(page), headers={"Accept": "application/json", "Sec-Fetch-Dest": "empty"})
        assert answer.json()["state"] == "mine"


urlpatterns = [
    path("", include("tests.editing.site")),
    path("<path:anything>/own/<int:pk>/", lambda request, pk, anything: site.OrderEdit.as_view()(request, pk=pk)),
]


class TestRedirects:
    """No redirect leaves the site, whatever the path."""

    @pytest.mark.parametrize("start", ["//evil.example", "///evil.example", "/\\evil.example", "//evil.example//x"])
    def test_taking_over(self, order: Order, settings: Settings, start: str) -> None:
        """A path that begins with two slashes would be taken for the name of a host."""
        settings.ROOT_URLCONF = __name__
        client = staff("anna", "take_over_edit_lock")
        response = client.post(f"http://testserver{start}/own/{order.pk}/?edit-lock=take-over&x=1")
        if response.status_code == 302:
            assert not response["Location"].startswith(("//", "/\\", "http"))
        else:
            assert response.status_code in (400, 404)
