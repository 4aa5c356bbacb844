"""`EditLockMixin`: one tab edits, the others read; no change is lost."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from django_mongolock.backends.base import close_backends, mongo_store
from django_mongolock.editing import edit_key
from django_mongolock.inspection import operations
from testproject.rates.models import PastRate, PlainRate, Rate
from testproject.shop.models import Ad, Order
from tests.editing.conftest import set_locks
from tests.editing.staff import fields_of, holders, staff, state_of, tell, text_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO, Commands

pytestmark = WITH_MONGO


@pytest.fixture(autouse=True)
def _empty(locks: Locks) -> None:
    """No locks of another test."""


def page_of(order: Order) -> str:
    return f"/admin/shop/order/{order.pk}/change/"


class TestPage:
    """Who gets which page."""

    def test_first_comes_first(self, order: Order) -> None:
        """The first tab edits; that of another user reads, and shows who is editing, since when, last seen."""
        anna, ben = staff("anna"), staff("ben")
        page = anna.get(page_of(order))
        assert state_of(page) == "mine"
        assert fields_of(page)["item"] == "bike"
        other = ben.get(page_of(order))
        assert state_of(other) == "busy"
        assert "This is being edited by anna." in text_of(other)
        since = r"Since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \([\d.]+ s ago\), last seen [\d.]+ s ago"
        assert re.search(since, text_of(other))
        assert 'name="item"' not in other.content.decode()
        assert "Save" not in text_of(other)
        (holder,) = holders(order)
        assert (holder["user"], holder["host"], holder["label"]) == ("anna", "a browser tab", "edit lock")

    def test_save(self, order: Order) -> None:
        """What is typed is saved, and the lock is free."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order))) | {"item": "car"}
        assert anna.post(page_of(order), sent).status_code == 302
        order.refresh_from_db()
        assert order.item == "car"
        assert holders(order) == []

    def test_a_second_tab_of_the_same_user(self, order: Order) -> None:
        """It is told so, and may take over from itself without a permission."""
        anna = staff("anna")
        first = fields_of(anna.get(page_of(order)))
        second = anna.get(page_of(order))
        assert state_of(second) == "busy"
        assert "you, in another tab" in text_of(second)
        assert "Yes, take over" in text_of(second)
        again = staff("anna").get(page_of(order))
        assert "you, in another browser" in text_of(again)
        (token,) = [str(holder["token"]) for holder in holders(order)]
        followed = anna.post(f"{page_of(order)}?edit-lock=take-over", {"edit_lock_take_over": token}, follow=True)
        assert state_of(followed) == "mine"
        told = tell(anna, page_of(order), "beat", first).json()
        assert told["state"] == "busy"
        assert "you, in another tab" in told["text"]

    def test_a_double_click(self, order: Order) -> None:
        """A page that never came to life is no other tab; where the browser runs no script, nobody can tell."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        assert state_of(anna.get(page_of(order))) == "busy"
        tell(anna, page_of(order), "beat", sent)
        assert state_of(anna.get(page_of(order))) == "busy"
        tell(anna, page_of(order), "leave", sent)
        pages = [anna.get(page_of(order)) for _ in range(2)]
        assert [state_of(page) for page in pages] == ["mine", "mine"]
        (holder,) = holders(order)
        assert holder["lease"] == 20_000
        tell(anna, page_of(order), "beat", fields_of(pages[1]))
        (holder,) = holders(order)
        assert holder["lease"] == 120_000

    def test_taking_over_needs_the_permission(self, order: Order) -> None:
        """Without it there is no button, and the request does nothing; with it, the first is told by the next beat."""
        anna, ben, boss = staff("anna"), staff("ben"), staff("boss", "take_over_edit_lock")
        sent = fields_of(anna.get(page_of(order)))
        (token,) = [str(holder["token"]) for holder in holders(order)]
        page = ben.get(page_of(order))
        assert re.search(r'data-part="take-over" hidden', page.content.decode())
        for client, state, name in ((ben, "busy", "anna"), (boss, "mine", "boss")):
            address = f"{page_of(order)}?edit-lock=take-over&_popup=1"
            followed = client.post(address, {"edit_lock_take_over": token}, follow=True)
            assert followed.redirect_chain[0][0].startswith(f"{page_of(order)}?_popup=1")
            assert state_of(followed) == state
            assert [holder["user"] for holder in holders(order)] == [name]
        told = tell(anna, page_of(order), "beat", sent, had="1").json()
        assert told["state"] == "busy"
        assert "This is now being edited by boss. What you typed is still here" in told["text"]

    def test_taking_over_is_from_who_was_shown(self, order: Order) -> None:
        """Whoever came after him keeps it."""
        anna, ben, boss = staff("anna"), staff("ben"), staff("boss", "take_over_edit_lock")
        sent = fields_of(anna.get(page_of(order)))
        (token,) = [str(holder["token"]) for holder in holders(order)]
        tell(anna, page_of(order), "leave", sent)
        assert state_of(ben.get(page_of(order))) == "mine"
        answer = tell(boss, page_of(order), "take-over", {}, edit_lock_take_over=token).json()
        assert answer["state"] == "busy"
        assert [holder["user"] for holder in holders(order)] == ["ben"]

    def test_without_the_permission_to_change(self, order: Order) -> None:
        """Who may only look takes no lock, and is told of none."""
        viewer = Client()
        user = User.objects.create(username="viewer", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename="view_order"))
        viewer.force_login(user)
        page = viewer.get(page_of(order))
        assert page.status_code == 200
        assert state_of(page) == ""
        assert holders(order) == []
        assert tell(viewer, page_of(order), "take", {}).json()["state"] == "gone"
        assert holders(order) == []

    def test_pages_that_take_no_lock(self, order: Order) -> None:
        """Adding, and the history."""
        anna = staff("anna")
        for address in ("/admin/shop/order/add/", page_of(order).replace("change", "history")):
            assert anna.get(address).status_code == 200
        assert holders(order) == []

    def test_the_session_key_is_nowhere(self, order: Order) -> None:
        """Not in the lock, not in the page; and the tab's name is not in the lock either."""
        anna = staff("anna")
        page = anna.get(page_of(order))
        key, stored = anna.session.session_key, repr(holders(order))
        assert key
        assert key not in stored + page.content.decode()
        assert fields_of(page)["edit_lock_tab"] not in stored

    def test_nobody_beats_for_another(self, order: Order) -> None:
        """The name of a tab is worth nothing to another user."""
        anna, ben = staff("anna"), staff("ben")
        sent = fields_of(anna.get(page_of(order)))
        assert tell(ben, page_of(order), "leave", sent).status_code == 200
        assert [holder["user"] for holder in holders(order)] == ["anna"]
        assert tell(ben, page_of(order), "beat", sent).json()["state"] == "busy"
        assert tell(ben, page_of(order), "take", sent).json()["state"] == "busy"
        assert [holder["user"] for holder in holders(order)] == ["anna"]


class TestScript:
    """What the page's script tells and is told."""

    def test_a_beat_keeps_it(self, order: Order, locks: Locks) -> None:
        """It pushes the end of the lease, and any process may serve it."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        (before,) = holders(order)
        close_backends()
        told = tell(anna, page_of(order), "beat", sent, idle="3").json()
        assert told == {**told, "state": "mine", "detail": ""}
        assert "tab" not in told
        (after,) = holders(order)
        assert after["until"] > before["until"]
        assert after["token"] == before["token"]

    def test_leaving_frees_it(self, order: Order) -> None:
        """At once. A beat that comes later changes nothing, and a take that comes later has no effect."""
        anna, ben = staff("anna"), staff("ben")
        sent = fields_of(anna.get(page_of(order)))
        tell(anna, page_of(order), "leave", sent)
        assert holders(order) == []
        told = tell(anna, page_of(order), "beat", sent).json()
        assert told["state"] == "free"
        assert "Your edit lock has ended" in told["text"]
        assert holders(order) == []
        assert state_of(ben.get(page_of(order))) == "mine"

    def test_idle(self, order: Order, settings: Settings) -> None:
        """After so long without a key or a click the lock is given back."""
        set_locks(settings, EDIT_IDLE=60)
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        assert tell(anna, page_of(order), "beat", sent, idle="59").json()["state"] == "mine"
        told = tell(anna, page_of(order), "beat", sent, idle="60").json()
        assert told["state"] == "idle"
        assert "Nothing was typed for 1 min 0 s" in told["text"]
        assert holders(order) == []
        set_locks(settings, EDIT_IDLE=None)
        sent = fields_of(anna.get(page_of(order)))
        assert tell(anna, page_of(order), "beat", sent, idle="999999").json()["state"] == "mine"

    @pytest.mark.parametrize(
        ("asks", "told"),
        [
            ("ben", "ben asks you to finish."),
            ("ben, in the admin", "ben asks you to finish."),
            ("ben, in the admin: let me in: please", "ben asks you to finish: “let me in: please”"),
            ("deploy: at 3", "deploy asks you to finish: “at 3”"),
        ],
    )
    def test_asked_to_finish(self, order: Order, asks: str, told: str) -> None:
        """Whoever asks the holder to release, in the lock admin, is heard in the form, with the reason."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        operations.ask_to_release(mongo_store(), edit_key(order), asks)
        answer = tell(anna, page_of(order), "beat", sent).json()
        assert (answer["state"], answer["detail"]) == ("mine", told)

    def test_force_release(self, order: Order) -> None:
        """In the lock admin, as with any lock; the editor is told."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        boss = staff("boss", superuser=True)
        page = boss.get("/locks/django_mongolock/lock/")
        assert "edit lock · user anna" in text_of(page)
        assert "session:" not in page.content.decode()  # a hash, which says nothing to people
        (holder,) = holders(order)
        operations.force_release(mongo_store(), edit_key(order), [holder["grant"]])
        assert tell(anna, page_of(order), "beat", sent).json()["state"] == "free"

    @pytest.mark.parametrize("junk", ["nonsense", "", "beat"])
    def test_junk(self, order: Order, junk: str) -> None:
        """What makes no sense takes nothing and breaks nothing."""
        anna = staff("anna")
        fields = {"edit_lock_tab": "" if junk == "beat" else "$x\x00", "edit_lock_seal": "junk"}
        answer = tell(anna, page_of(order), junk or "take-over", fields, idle="-1", edit_lock_take_over="²")
        assert answer.status_code == 200


class TestSave:
    """On saving, the lock and the version are looked at; nobody's writing gets lost."""

    @pytest.mark.long
    def test_who_lost_the_lock_saves_nothing(self, order: Order) -> None:
        """While another one edits; what was typed stays in its field."""
        anna, boss = staff("anna"), staff("boss", "take_over_edit_lock")
        sent = fields_of(anna.get(page_of(order)))
        (token,) = [str(holder["token"]) for holder in holders(order)]
        tell(boss, page_of(order), "take-over", {}, edit_lock_take_over=token)
        page = anna.post(page_of(order), sent | {"item": "car"})
        assert state_of(page) == "refused"
        assert "Not saved: this is now being edited by boss." in text_of(page)
        assert fields_of(page)["item"] == "car"
        assert "Take over and save" not in text_of(page)
        again = fields_of(page)
        assert 'name="_save"' in page.content.decode()  # for when it is free
        assert state_of(anna.post(page_of(order), again)) == "refused"
        order.refresh_from_db()
        assert order.item == "bike"

    def test_changed_meanwhile(self, order: Order) -> None:
        """What was changed is named, and who did it; mine stays, what I left alone takes theirs; sent again, it is
        saved."""
        anna, boss = staff("anna"), staff("boss", "take_over_edit_lock")
        sent = fields_of(anna.get(page_of(order)))
        (token,) = [str(holder["token"]) for holder in holders(order)]
        address = f"{page_of(order)}?edit-lock=take-over"
        theirs = fields_of(boss.post(address, {"edit_lock_take_over": token}, follow=True))
        boss.post(page_of(order), theirs | {"item": "boat", "price": "7", "state": "paid"})
        page = anna.post(page_of(order), sent | {"item": "car"})
        assert "Not saved: this was changed while you were editing it. Changed meanwhile: Item, Price" in text_of(page)
        assert "The last change in the admin was made by boss, 20" in text_of(page)
        again = fields_of(page)
        assert (again["item"], again["price"], again["state"]) == ("car", "7.00", "paid")
        order.refresh_from_db()
        assert order.item == "boat"
        assert anna.post(page_of(order), again).status_code == 302
        order.refresh_from_db()
        assert (order.item, float(order.price), order.state) == ("car", 7.0, "paid")

    def test_a_change_behind_the_lock(self, order: Order) -> None:
        """A writer that knows no edit lock is noticed as well; what the form does not show is left to it."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order))) | {"item": "car"}
        Order.objects.filter(pk=order.pk).update(charges=5)
        assert anna.post(page_of(order), sent).status_code == 302
        order.refresh_from_db()
        assert (order.item, order.charges) == ("car", 5)
        sent = fields_of(anna.get(page_of(order))) | {"item": "boat"}
        Order.objects.filter(pk=order.pk).update(price=5)
        assert state_of(anna.post(page_of(order), sent)) == "refused"

    def test_a_lease_that_ended(self, order: Order, locks: Locks) -> None:
        """Nobody came and nothing changed: it is saved as if nothing had been."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order))) | {"item": "car"}
        locks.collection.delete_many({})
        assert anna.post(page_of(order), sent).status_code == 302

    @pytest.mark.parametrize("seal", [None, "", "junk"])
    def test_a_page_that_does_not_say(self, order: Order, seal: str | None) -> None:
        """Nobody can tell what it has seen: it is not saved."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order))) | {"item": "car"}
        if seal is None:
            del sent["edit_lock_seal"]
        else:
            sent["edit_lock_seal"] = seal
        assert state_of(anna.post(page_of(order), sent)) == "refused"

    def test_the_page_of_another_object(self, order: Order) -> None:
        """Its digests are worth nothing here."""
        anna = staff("anna")
        twin = Order.objects.create(buyer=order.buyer, item="bike", price=100)
        seal = fields_of(anna.get(page_of(twin)))["edit_lock_seal"]
        sent = fields_of(anna.get(page_of(order))) | {"edit_lock_seal": seal}
        assert state_of(anna.post(page_of(order), sent)) == "refused"

    @pytest.mark.long
    def test_errors_of_the_form(self, order: Order) -> None:
        """The page with the errors has the lock, also when the page before it says good-bye only now."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        page = anna.post(page_of(order), sent | {"price": "much"})
        assert state_of(page) == "mine"
        tell(anna, page_of(order), "leave", sent)
        assert len(holders(order)) == 1
        assert anna.post(page_of(order), fields_of(page) | {"price": "3"}).status_code == 302
        assert holders(order) == []

    def test_save_and_continue(self, order: Order) -> None:
        """The next page has the lock."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order)))
        page = anna.post(page_of(order), sent | {"item": "car", "_continue": "1"}, follow=True)
        assert state_of(page) == "mine"
        assert fields_of(page)["item"] == "car"

    def test_save_as_new(self, order: Order) -> None:
        """Changes nothing of what is locked, so that it needs no lock."""
        anna, ben = staff("anna"), staff("ben")
        sent = fields_of(anna.get(page_of(order)))
        answer = anna.post(page_of(order), sent | {"item": "car", "_saveasnew": "1"})
        assert answer.status_code == 302
        assert Order.objects.filter(item="car").exists()
        assert "Save as new" not in text_of(ben.get(page_of(order)))

    def test_popup(self, order: Order) -> None:
        """It has the lock as any page; saved, it closes itself, and the lock is free."""
        anna = staff("anna")
        address = f"/admin/auth/user/{order.buyer_id}/change/?_popup=1&_to_field=id"
        page = anna.get(address)
        assert state_of(page) == "mine"
        assert state_of(staff("ben").get(address)) == "busy"
        answer = anna.post(address, fields_of(page) | {"first_name": "Bea"})
        assert "admin/popup_response" in str(answer.templates[0].name)
        assert holders(order.buyer) == []
        assert User.objects.filter(first_name="Bea").exists()

    @pytest.mark.long
    @pytest.mark.parametrize("taken", [False, True])
    @pytest.mark.parametrize("changed", [False, True])
    def test_take_over_and_save_when_it_is_free(self, order: Order, *, taken: bool, changed: bool) -> None:
        """Also where this page has taken it meanwhile: saved, or shown both versions; nobody is told of himself."""
        anna, boss = staff("anna", "take_over_edit_lock"), staff("boss", "take_over_edit_lock")
        sent = fields_of(anna.get(page_of(order)))
        (token,) = [str(holder["token"]) for holder in holders(order)]
        address = f"{page_of(order)}?edit-lock=take-over"
        theirs = fields_of(boss.post(address, {"edit_lock_take_over": token}, follow=True))
        refused = fields_of(anna.post(page_of(order), sent | {"item": "car"}))
        (token,) = [str(holder["token"]) for holder in holders(order)]
        assert boss.post(page_of(order), theirs | {"item": "boat" if changed else "bike"}).status_code == 302
        if taken:
            told = tell(anna, page_of(order), "take", refused).json()
            assert (told["state"], "changed meanwhile" in told["text"]) == ("mine", changed)
            refused["edit_lock_tab"] = told["tab"]
        page = anna.post(page_of(order), refused | {"edit_lock_take_over": token})
        if changed:
            assert "Not saved: this was changed while you were editing it." in text_of(page)
            assert "being edited by you" not in text_of(page)
            assert "Changed meanwhile: Item." in text_of(page)
            assert 'name="_save"' in page.content.decode()
            page = anna.post(page_of(order), fields_of(page))
        assert page.status_code == 302
        order.refresh_from_db()
        assert order.item == "car"
        assert holders(order) == []

    def test_deleted_meanwhile(self, order: Order) -> None:
        """What was typed is shown, to be made anew."""
        anna = staff("anna")
        sent = fields_of(anna.get(page_of(order))) | {"item": "car"}
        order.delete()
        address = f"/admin/shop/order/{Order.objects.count() + 999}/change/"
        page = anna.post(address, sent)
        assert "this was deleted while you were editing it" in text_of(page)
        assert Order.objects.count() == 0
        assert anna.post(address, fields_of(page)).status_code == 302
        assert Order.objects.get().item == "car"

    @pytest.mark.long
    def test_a_race_in_the_moment_of_the_save(self, mongo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever is faster between the look and the save is found out by the database, and shown."""
        ad = Ad.objects.create(user_id="1", title="boat", price=5)
        documents = mongo[connections["mongo"].settings_dict["NAME"]][Ad._meta.db_table]
        anna, page = staff("anna"), f"/admin/shop/ad/{ad.pk}/change/"
        sent = fields_of(anna.get(page)) | {"title": "ship"}
        save = Ad.save

        def slower(self: Ad, *args: Any, **kwargs: Any) -> None:
            documents.update_one({"_id": ad.pk}, {"$set": {"price": 7}})
            save(self, *args, **kwargs)

        monkeypatch.setattr(Ad, "save", slower)
        answer = anna.post(page, sent)
        assert state_of(answer) == "refused"
        assert "Changed meanwhile: Price." in text_of(answer)
        ad.refresh_from_db()
        assert (ad.title, ad.price) == ("boat", 7)

    def test_a_model_and_an_admin_that_know_versions(self) -> None:
        """The version counts, also of what the form does not show; saved again, both checks have seen it."""
        rate = Rate.objects.create(name="EUR", value=1)
        anna, page = staff("anna"), "/admin/rates/rate/EUR/change/"
        sent = fields_of(anna.get(page)) | {"note": "mine"}
        rate.value = 2
        rate.save()
        answer = anna.post(page, sent)
        assert state_of(answer) == "refused"
        assert "Changed meanwhile: Value." in text_of(answer)
        again = fields_of(answer)
        assert (again["value"], again["note"]) == ("2", "mine")
        assert anna.post(page, again).status_code == 302
        rate.refresh_from_db()
        assert (rate.value, rate.note, rate.version) == (2, "mine", 3)


class TestInlines:
    """Rows of inlines count as the object itself."""

    @pytest.fixture
    def rows(self, order: Order) -> list[Order]:
        return [order, Order.objects.create(buyer=order.buyer, item="hat", price=3)]

    @pytest.fixture
    def page(self, order: Order) -> str:
        return f"/admin/auth/user/{order.buyer_id}/change/"

    @pytest.mark.long
    def test_undisturbed(self, page: str, rows: list[Order]) -> None:
        """A row is changed, one added, one deleted."""
        anna = staff("anna")
        sent = fields_of(anna.get(page))
        number = next(n for n in (0, 1) if sent[f"order_set-{n}-item"] == "bike")
        sent |= {f"order_set-{number}-item": "car", f"order_set-{1 - number}-DELETE": "on"}
        sent |= {"order_set-2-item": "new", "order_set-2-price": "1"}
        assert anna.post(page, sent).status_code == 302
        assert sorted(Order.objects.values_list("item", flat=True)) == ["car", "new"]

    @pytest.mark.long
    def test_a_row_that_another_user_changed(self, page: str, rows: list[Order]) -> None:
        """A row that was left alone takes theirs, so that saving again does not put it back."""
        anna = staff("anna")
        sent = fields_of(anna.get(page))
        for row in rows:
            Order.objects.filter(pk=row.pk).update(price=50)
        number = next(n for n in (0, 1) if sent[f"order_set-{n}-item"] == "bike")
        answer = anna.post(page, sent | {f"order_set-{number}-price": "9"})
        assert state_of(answer) == "refused"
        assert "Changed meanwhile: Price." in text_of(answer)
        again = fields_of(answer)
        assert again[f"order_set-{1 - number}-price"] == "50.00"
        assert anna.post(page, again).status_code == 302
        assert sorted(Order.objects.values_list("price", flat=True)) == [9, 50]

    def test_rows_that_are_gone_or_new(self, page: str, rows: list[Order]) -> None:
        """A row that was added or deleted meanwhile is a change. An added one stays; what was typed into one that is
        gone is shown, and cannot be saved."""
        anna = staff("anna")
        sent = fields_of(anna.get(page))
        number = next(n for n in (0, 1) if sent[f"order_set-{n}-item"] == "bike")
        Order.objects.create(buyer=rows[1].buyer, item="added", price=1)
        answer = anna.post(page, sent)
        assert state_of(answer) == "refused"
        Order.objects.filter(item="bike").delete()
        for more in ({f"order_set-{number}-item": "car"}, {}):
            answer = anna.post(page, fields_of(answer) | more)
            assert answer.status_code == 200
            assert fields_of(answer)[f"order_set-{number}-item"] == "car"
        assert sorted(Order.objects.values_list("item", flat=True)) == ["added", "hat"]


class TestKeys:
    """Any kind of primary key."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Ad.objects.create(user_id="1", title="boat", price=5),
            lambda: PastRate.objects.create(name="EUR", value=1),
            lambda: PlainRate.objects.create(name="a/b c:d?e", value=1),
            lambda: PlainRate.objects.create(name="_5F,%é\"'<", value=1),
            lambda: PlainRate.objects.create(name="x\ny", value=1),
            lambda: Rate.objects.create(name="EUR", value=1),
        ],
    )
    def test_key(self, make: Any) -> None:
        """ObjectId, UUID, text with odd characters: taken, seen by others, kept, saved, free."""
        obj = make()
        page = reverse(f"editing:{obj._meta.app_label}_{obj._meta.model_name}_change", args=[quote(obj.pk)])
        anna, ben = staff("anna"), staff("ben")
        sent = fields_of(anna.get(page))
        assert state_of(ben.get(page)) == "busy"
        assert tell(anna, page, "beat", sent).json()["state"] == "mine"
        name = "price" if isinstance(obj, Ad) else "value"
        assert anna.post(page, sent | {name: "42"}).status_code == 302
        obj.refresh_from_db()
        assert getattr(obj, name) == 42
        assert holders(obj) == []

    def test_a_key_that_is_too_long(self) -> None:
        """Or is none at all: it goes in by a hash, and two have two locks."""
        keys = {edit_key(PlainRate, "x" * n) for n in (10, 600, 601, 9_999)} | {edit_key(PlainRate, "x\x00")}
        assert len(keys) == 5
        assert all(key.startswith("edit:rates.plainrate:") and len(key) <= 512 for key in keys)
        assert edit_key(Order, (1, "a,b")) != edit_key(Order, ("1,a", "b"))
        with pytest.raises(ValueError, match="no primary key yet"):
            edit_key(Order())


class TestDeleting:
    """What another user is editing is not deleted."""

    def test_the_page(self, order: Order) -> None:
        """The editor himself may; others are sent to the page, which says who edits."""
        anna, ben = staff("anna"), staff("ben")
        address = page_of(order).replace("change", "delete")
        anna.get(page_of(order))
        for answer in (ben.get(address, follow=True), ben.post(address, {"post": "yes"}, follow=True)):
            assert "Not deleted. This is being edited by anna." in text_of(answer)
        assert Order.objects.exists()
        asked = anna.get(address, follow=True)
        assert asked.status_code == 200
        pk = order.pk
        anna.post(asked.redirect_chain[0][0], {"post": "yes"})
        assert not Order.objects.exists()
        assert holders(f"shop.order:{pk}") == []

    def test_the_action(self, order: Order) -> None:
        """Nothing is deleted that is being edited."""
        anna, ben = staff("anna"), staff("ben")
        anna.get(page_of(order))
        chosen = {"action": "delete_selected", "_selected_action": [str(order.pk)], "post": "yes"}
        answer = ben.post("/admin/shop/order/", chosen)
        assert "This is being edited by anna." in text_of(answer)
        assert Order.objects.exists()
        anna.post("/admin/logout/")
        ben.post("/admin/shop/order/", chosen)
        assert not Order.objects.exists()

    @pytest.mark.long
    def test_the_list(self, order: Order) -> None:
        """A row of the list that another user is editing is not changed there."""
        anna, ben = staff("anna"), staff("ben")
        anna.get(page_of(order))
        other = Order.objects.create(buyer=order.buyer, item="hat", price=1)
        sent = fields_of(ben.get("/admin/shop/order/")) | {"form-0-price": "2", "_save": "Save"}
        assert (sent["form-0-id"], sent["form-1-id"]) == (str(other.pk), str(order.pk))
        assert ben.post("/admin/shop/order/", sent).status_code == 302
        other.refresh_from_db()
        assert other.price == 2
        answer = ben.post(
            "/admin/shop/order/", fields_of(ben.get("/admin/shop/order/")) | {"form-1-price": "7", "_save": "Save"}
        )
        assert "This is being edited by anna." in text_of(answer)
        order.refresh_from_db()
        assert order.price == 100


class TestList:
    """The list says what is being edited, and by whom."""

    @pytest.fixture
    def orders(self, order: Order) -> list[Order]:
        return [order, Order.objects.create(buyer=order.buyer, item="hat", price=1)]

    @pytest.mark.long
    def test_column(self, orders: list[Order], commands: Commands) -> None:
        """A name and since when, for any admin with the mixin, by one command."""
        ben = staff("ben")
        assert state_of(staff("anna").get(page_of(orders[0]))) == "mine"
        commands.sent.clear()
        page = ben.get("/admin/shop/order/")
        assert commands.names() == ["aggregate"]
        rows = re.findall(r'<td class="field-edited_by">(.*?)</td>', page.content.decode())
        assert [re.sub(r"[\d.]+ s", "N s", row) for row in rows] == ["–", "anna · N s ago"]

    @pytest.mark.long
    def test_without_mongo(self, orders: list[Order], away: None) -> None:
        """The list is there, and does not know."""
        page = staff("anna").get("/admin/shop/order/")
        assert re.findall(r'<td class="field-edited_by">(.*?)</td>', page.content.decode()) == ["?", "?"]


class TestWithoutMongo:
    """While MongoDB is away: a warning, and the version; or nothing at all."""

    @pytest.mark.long
    def test_open(self, order: Order, away: None) -> None:
        """The form opens with a warning, and is saved if nobody changed anything."""
        anna = staff("anna")
        page = anna.get(page_of(order))
        assert state_of(page) == "away"
        assert "We cannot check at the moment whether someone else is editing this. You can edit it" in text_of(page)
        sent = fields_of(page) | {"item": "car"}
        assert tell(anna, page_of(order), "beat", sent).json()["state"] == "away"
        assert anna.post(page_of(order), sent).status_code == 302
        sent = fields_of(anna.get(page_of(order))) | {"item": "boat"}
        Order.objects.update(item="theirs")
        assert state_of(anna.post(page_of(order), sent)) == "refused"
        assert Order.objects.get().item == "theirs"

    @pytest.mark.long
    def test_closed(self, order: Order, settings: Settings, away: None) -> None:
        """With EDIT_FAIL_CLOSED, it is for reading, and nothing is saved."""
        set_locks(settings, EDIT_FAIL_CLOSED=True)
        anna = staff("anna")
        page = anna.get(page_of(order))
        assert state_of(page) == "away"
        assert 'name="item"' not in page.content.decode()
        sent = {"buyer": order.buyer_id, "item": "car", "price": "1", "state": "new", "edit_lock_seal": "x"}
        page = anna.post(page_of(order), sent)
        assert "Not saved: we cannot check at the moment whether someone else is editing this." in text_of(page)
        assert Order.objects.get().item == "bike"
