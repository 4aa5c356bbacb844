"""`EditLockMixin` lets one tab edit while the others read. No change is lost."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ValidationError
from django.db import connections
from django.forms import ModelForm
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from django_mongolock.backends import close_backends, mongo_store
from django_mongolock.editing import EditLock, edit_key, edit_lock
from django_mongolock.editing.admin import _note_editors
from django_mongolock.inspection import operations
from testproject.rates.models import PastRate, PlainRate, Rate
from testproject.shop.models import Ad, Order
from tests.editing.conftest import set_locks
from tests.editing.site import OrderAdmin
from tests.editing.staff import TAKES, Tab, fields_of, holders, page_of, staff, state_of, tell, text_of, token_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO, Commands

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("locks")]
LIST = "/admin/shop/order/"


class TestPage:
    """The page for each user."""

    def test_first_comes_first(self, order: Order) -> None:
        """The first tab edits. Another user's tab reads, and shows the editor with the times of the start and of the
        last sign of life."""
        anna, ben = Tab("anna", order), Tab("ben", order)
        assert (anna.state, anna.fields["item"], ben.state) == ("mine", "bike", "busy")
        assert "This is being edited by anna." in ben.text
        since = r"Since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \([\d.]+ s ago\), last seen [\d.]+ s ago"
        assert re.search(since, ben.text)
        assert 'name="item"' not in ben.html
        assert "Save" not in ben.text
        (holder,) = holders(order)
        assert (holder["user"], holder["host"], holder["label"]) == ("anna", "a browser tab", "edit lock")

    @pytest.mark.parametrize("ended", [False, True])
    def test_save(self, order: Order, locks: Locks, *, ended: bool) -> None:
        """The typed text is saved, and the lock is free. This holds after the end of its lease, if nobody came."""
        anna = Tab("anna", order)
        if ended:
            locks.collection.delete_many({})
        assert anna.send(item="car").status_code == 302
        assert Order.objects.get().item == "car"
        assert holders(order) == []

    def test_a_second_tab_of_the_same_user(self, order: Order) -> None:
        """A second tab of the same user says so, and may take over without a permission."""
        first = Tab("anna", order)
        second = Tab(first.client, order)
        assert second.state == "busy"
        assert "you, in another tab" in second.text
        assert "Yes, take over" in second.text
        assert "you, in another browser" in Tab("anna", order).text
        second.take_over(token_of(order))
        assert second.state == "mine"
        told = first.tell("beat")
        assert told["state"] == "busy"
        assert "you, in another tab" in told["text"]

    def test_a_double_click(self, order: Order) -> None:
        """A page that never came to life is not another tab. Without scripts in the browser, nobody can tell."""
        first = Tab("anna", order)
        assert Tab(first.client, order).state == "busy"
        first.tell("beat")
        assert Tab(first.client, order).state == "busy"
        first.tell("leave")
        tabs = [Tab(first.client, order) for _ in range(2)]
        assert [tab.state for tab in tabs] == ["mine", "mine"]
        assert [holder["lease"] for holder in holders(order)] == [20_000]
        tabs[1].tell("beat")
        assert [holder["lease"] for holder in holders(order)] == [120_000]

    def test_taking_over_needs_the_permission(self, order: Order) -> None:
        """Without the permission there is no button, and the request does nothing. With it, the next beat tells the
        first user."""
        anna, ben, boss = Tab("anna", order), Tab("ben", order), Tab("boss", order, TAKES)
        token = token_of(order)
        assert re.search(r'data-part="take-over" hidden', ben.html)
        for tab, state, name in ((ben, "busy", "anna"), (boss, "mine", "boss")):
            followed = tab.take_over(token, "&_popup=1")
            assert followed.redirect_chain[0][0].startswith(f"{page_of(order)}?_popup=1")
            assert tab.state == state
            assert [holder["user"] for holder in holders(order)] == [name]
        told = anna.tell("beat", had="1")
        assert told["state"] == "busy"
        assert "This is now being edited by boss. What you typed is still here" in told["text"]
        chief = Tab("chief", order, TAKES)
        chief.take_over(token)
        assert chief.state == "busy", "it is taken from who was shown, not from who came after"

    def test_without_the_permission_to_change(self, order: Order) -> None:
        """A user who may only look takes no lock, and is told of none."""
        viewer = Client()
        user = User.objects.create(username="viewer", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename="view_order"))
        viewer.force_login(user)
        tab = Tab(viewer, order)
        assert (tab.page.status_code, tab.state) == (200, "")
        assert tell(viewer, page_of(order), "take", {}).json()["state"] == "gone"
        anna = Tab("anna", order)
        User.objects.get(username="anna").user_permissions.clear()
        assert anna.tell("beat")["state"] == "gone"
        assert holders(order) == [], "nor keeps one from before"

    def test_pages_that_take_no_lock(self, order: Order) -> None:
        """The page for adding and the history take no lock."""
        for address in (f"{LIST}add/", page_of(order).replace("change", "history")):
            assert Tab("anna", address).page.status_code == 200
        assert holders(order) == []

    def test_the_session_key_is_nowhere(self, order: Order) -> None:
        """The session key is neither in the lock nor in the page. The tab's name is not in the lock either."""
        anna = Tab("anna", order)
        key, stored = anna.client.session.session_key, repr(holders(order))
        assert key
        assert key not in stored + anna.html
        assert anna.fields["edit_lock_tab"] not in stored

    def test_nobody_beats_for_another(self, order: Order) -> None:
        """The name of a tab is worth nothing to another user."""
        anna, ben = Tab("anna", order), staff("ben")
        for action in ("leave", "beat", "take"):
            assert tell(ben, page_of(order), action, anna.fields).json()["state"] == "busy"
            assert [holder["user"] for holder in holders(order)] == ["anna"]


class TestScript:
    """The messages of the page's script, and the answers."""

    def test_a_beat_keeps_it(self, order: Order) -> None:
        """A beat moves the end of the lease, and any process may serve it."""
        anna = Tab("anna", order)
        (before,) = holders(order)
        close_backends()
        told = anna.tell("beat", idle="3")
        assert told == {**told, "state": "mine", "detail": ""}
        assert "tab" not in told
        (after,) = holders(order)
        assert after["until"] > before["until"]
        assert after["token"] == before["token"]

    def test_leaving_frees_it(self, order: Order) -> None:
        """Leaving frees the lock at once. A later beat changes nothing."""
        anna = Tab("anna", order)
        anna.tell("leave")
        assert holders(order) == []
        told = anna.tell("beat")
        assert told["state"] == "free"
        assert "Your edit lock has ended" in told["text"]
        assert holders(order) == []
        assert Tab("ben", order).state == "mine"

    def test_idle(self, order: Order, settings: Settings) -> None:
        """After a time without a key press or a click, the lock is released."""
        set_locks(settings, EDIT_IDLE=60)
        anna = Tab("anna", order)
        assert anna.tell("beat", idle="59")["state"] == "mine"
        told = anna.tell("beat", idle="60")
        assert told["state"] == "idle"
        assert "Nothing was typed for 1 min 0 s" in told["text"]
        assert holders(order) == []
        set_locks(settings, EDIT_IDLE=None)
        assert Tab(anna.client, order).tell("beat", idle="999999")["state"] == "mine"

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
        """A release request in the lock admin shows up in the form, with its reason."""
        anna = Tab("anna", order)
        operations.ask_to_release(mongo_store(), edit_key(order), asks)
        answer = anna.tell("beat")
        assert (answer["state"], answer["detail"]) == ("mine", told)

    def test_force_release(self, order: Order) -> None:
        """The lock admin forces the release of an edit lock like that of any lock, and the editor is told."""
        anna = Tab("anna", order)
        page = staff("boss", superuser=True).get("/locks/django_mongolock/lock/")
        assert "edit lock · user anna" in text_of(page)
        assert "session:" not in page.content.decode()  # a hash, useless to people
        (holder,) = holders(order)
        operations.force_release(mongo_store(), edit_key(order), [holder["grant"]])
        assert anna.tell("beat")["state"] == "free"

    @pytest.mark.parametrize("junk", ["nonsense", "", "beat"])
    def test_junk(self, order: Order, junk: str) -> None:
        """Junk takes nothing and breaks nothing."""
        fields = {"edit_lock_tab": "" if junk == "beat" else "$x\x00", "version_read": "junk"}
        more = {"idle": "-1", "edit_lock_take_over": "²"}
        assert tell(staff("anna"), page_of(order), junk or "take-over", fields, **more).status_code == 200


class TestSave:
    """A save checks the lock and the version. No user's writing gets lost."""

    @pytest.mark.long
    def test_who_lost_the_lock_saves_nothing(self, order: Order) -> None:
        """A user who lost the lock to another editor saves nothing. The typed text stays in its field."""
        anna = Tab("anna", order)
        Tab("boss", order, TAKES).take_over(token_of(order))
        anna.send(item="car")
        assert (anna.state, anna.fields["item"]) == ("refused", "car")
        assert "Not saved: this is now being edited by boss." in anna.text
        assert "Take over and save" not in anna.text
        assert 'name="_save"' in anna.html  # for when it is free
        anna.send()
        assert anna.state == "refused"
        assert Order.objects.get().item == "bike"

    def test_changed_meanwhile(self, order: Order) -> None:
        """The page names the changes and their author. My text stays, and an untouched field takes the stored value.
        The second send saves."""
        anna, boss = Tab("anna", order), Tab("boss", order, TAKES)
        boss.take_over(token_of(order))
        boss.send(item="boat", price="7", state="paid")
        anna.send(item="car")
        assert "Not saved: this was changed while you were editing it. Changed meanwhile: Item, Price" in anna.text
        assert "The last change in the admin was made by boss, 20" in anna.text
        again = anna.fields
        assert (again["item"], again["price"], again["state"]) == ("car", "7.00", "paid")
        assert Order.objects.get().item == "boat"
        assert anna.send().status_code == 302
        order.refresh_from_db()
        assert (order.item, int(order.price), order.state) == ("car", 7, "paid")

    def test_a_change_behind_the_lock(self, order: Order) -> None:
        """A writer that knows no edit lock keeps each field that this user left alone. For a field that both have
        changed, the save is refused."""
        anna = Tab("anna", order)
        Order.objects.update(charges=5, price=7)
        assert anna.send(item="car").status_code == 302
        saved = Order.objects.get()
        assert (saved.item, int(saved.price), saved.charges) == ("car", 7, 5)
        anna = Tab(anna.client, order)
        Order.objects.update(item="theirs")
        anna.send(item="boat")
        assert anna.state == "refused"
        assert Order.objects.get().item == "theirs"

    @pytest.mark.parametrize("seal", [None, "", "junk", "another"])
    def test_a_page_that_does_not_say(self, order: Order, seal: str | None) -> None:
        """A page without its seal is not saved, because its contents are unknown. The seal of another object's page is
        worth nothing."""
        anna = Tab("anna", order)
        sent = anna.fields | {"item": "car"}
        del sent["version_read"]
        if seal == "another":
            twin = Order.objects.create(buyer=order.buyer, item="bike", price=100)
            seal = Tab(anna.client, twin).fields["version_read"]
        if seal is not None:
            sent["version_read"] = seal
        assert state_of(anna.client.post(anna.address, sent)) == "refused"

    @pytest.mark.long
    def test_errors_of_the_form(self, order: Order) -> None:
        """The page with the errors has the lock, even if the page before it leaves only now."""
        anna = Tab("anna", order)
        before = anna.fields
        anna.send(price="much")
        assert anna.state == "mine"
        tell(anna.client, anna.address, "leave", before)
        assert len(holders(order)) == 1
        assert anna.send(price="3").status_code == 302
        assert holders(order) == []

    def test_save_and_continue(self, order: Order) -> None:
        """The next page has the lock."""
        anna = Tab("anna", order)
        page = anna.client.post(anna.address, anna.fields | {"item": "car", "_continue": "1"}, follow=True)
        assert (state_of(page), fields_of(page)["item"]) == ("mine", "car")

    def test_save_as_new(self, order: Order) -> None:
        """ "Save as new" changes no locked object, and needs no lock."""
        assert Tab("anna", order).send(item="car", _saveasnew="1").status_code == 302
        assert Order.objects.filter(item="car").exists()
        assert "Save as new" not in Tab("ben", order).text

    def test_popup(self, order: Order) -> None:
        """A popup has the lock like any page. After the save, it closes itself, and the lock is free."""
        address = f"{page_of(order.buyer)}?_popup=1&_to_field=id"
        anna, ben = Tab("anna", address), Tab("ben", address)
        assert (anna.state, ben.state) == ("mine", "busy")
        answer = anna.send(first_name="Bea")
        assert "admin/popup_response" in str(answer.templates[0].name)
        assert holders(order.buyer) == []
        assert User.objects.filter(first_name="Bea").exists()

    @pytest.mark.long
    @pytest.mark.parametrize("taken", [False, True])
    @pytest.mark.parametrize("changed", [False, True])
    def test_take_over_and_save_when_it_is_free(self, order: Order, *, taken: bool, changed: bool) -> None:
        """Taking over and saving works when the lock is free, or when this page has taken it meanwhile. The page saves,
        or shows both versions. No user is reported to himself."""
        anna, boss = Tab("anna", order, TAKES), Tab("boss", order, TAKES)
        boss.take_over(token_of(order))
        anna.send(item="car")
        more = {"edit_lock_take_over": token_of(order)}
        assert boss.send(item="boat" if changed else "bike").status_code == 302
        if taken:
            told = anna.tell("take")
            assert (told["state"], "changed meanwhile" in told["text"]) == ("mine", changed)
            more["edit_lock_tab"] = told["tab"]
        answer = anna.send(more)
        if changed:
            assert "Not saved: this was changed while you were editing it." in anna.text
            assert "being edited by you" not in anna.text
            assert "Changed meanwhile: Item." in anna.text
            assert 'name="_save"' in anna.html
            answer = anna.send()
        assert answer.status_code == 302
        assert Order.objects.get().item == "car"
        assert holders(order) == []

    def test_deleted_meanwhile(self, order: Order) -> None:
        """The typed text is shown, to be created again."""
        anna = Tab("anna", order)
        order.delete()
        anna.send(item="car")
        assert "this was deleted while you were editing it" in anna.text
        assert Order.objects.count() == 0
        assert anna.send().status_code == 302
        assert Order.objects.get().item == "car"

    def test_what_a_user_sees_no_more(self, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
        """F205: An object that the admin hides by now, such as a deleted one, can be created again."""
        anna, queryset = Tab("anna", order), OrderAdmin.get_queryset
        monkeypatch.setattr(OrderAdmin, "get_queryset", lambda *args: queryset(*args).exclude(state="closed"))
        Order.objects.update(state="closed")
        anna.send(item="car")
        assert "this was deleted while you were editing it" in anna.text
        assert anna.send().status_code == 302
        assert sorted(each.item for each in Order.objects.all()) == ["bike", "car"]

    def test_a_form_whose_clean_raises(self, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
        """An untouched field takes the stored value, whatever else is wrong with the form."""

        def clean(self: Any) -> Any:
            if self.cleaned_data["item"] == "bad":
                raise ValidationError("There is no such item.")

        monkeypatch.setattr(OrderAdmin, "form", type("Strict", (ModelForm,), {"clean": clean}))
        anna = Tab("anna", order)
        Order.objects.update(item="boat", price=7)
        anna.send(item="bad")
        assert "There is no such item." in anna.text
        assert "Changed meanwhile: Item, Price." in anna.text
        assert anna.fields["price"] == "7.00"
        assert anna.send(item="car").status_code == 302
        order.refresh_from_db()
        assert (order.item, int(order.price)) == ("car", 7)

    @pytest.mark.long
    def test_a_race_in_the_moment_of_the_save(self, mongo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """If another writer is faster between the read and the save, the database detects it, and the page shows it."""
        ad = Ad.objects.create(user_id="1", title="boat", price=5)
        documents = mongo[connections["mongo"].settings_dict["NAME"]][Ad._meta.db_table]
        anna, save = Tab("anna", ad), Ad.save

        def slower(self: Ad, *args: Any, **kwargs: Any) -> None:
            documents.update_one({"_id": ad.pk}, {"$set": {"price": 7}})
            save(self, *args, **kwargs)

        monkeypatch.setattr(Ad, "save", slower)
        anna.send(title="ship")
        assert anna.state == "refused"
        assert "Changed meanwhile: Price." in anna.text
        ad.refresh_from_db()
        assert (ad.title, ad.price) == ("boat", 7)

    def test_a_model_and_an_admin_that_know_versions(self) -> None:
        """The version counts, also for fields that the form does not show. At the second save, both checks have
        passed."""
        rate = Rate.objects.create(name="EUR", value=1)
        anna = Tab("anna", rate)
        rate.value = 2
        rate.save()
        anna.send(note="mine")
        assert anna.state == "refused"
        assert "Changed meanwhile: Value." in anna.text
        assert (anna.fields["value"], anna.fields["note"]) == ("2", "mine")
        assert anna.send().status_code == 302
        rate.refresh_from_db()
        assert (rate.value, rate.note, rate.version) == (2, "mine", 3)


class TestInlines:
    """Rows of inlines count as the object itself."""

    @pytest.fixture
    def rows(self, order: Order) -> list[Order]:
        return [order, Order.objects.create(buyer=order.buyer, item="hat", price=3)]

    @pytest.fixture
    def anna(self, rows: list[Order]) -> Tab:
        """Let anna open the page of the buyer."""
        return Tab("anna", rows[0].buyer)

    @pytest.fixture
    def bike(self, anna: Tab) -> int:
        """Return the number of the row with the bike. The other row is 1 minus that number."""
        return next(number for number in (0, 1) if anna.fields[f"order_set-{number}-item"] == "bike")

    @pytest.mark.long
    def test_undisturbed(self, anna: Tab, bike: int) -> None:
        """A row is changed, one is added, and one is deleted."""
        typed = {f"order_set-{bike}-item": "car", f"order_set-{1 - bike}-DELETE": "on"}
        typed |= {"order_set-2-item": "new", "order_set-2-price": "1"}
        assert anna.send(typed).status_code == 302
        assert sorted(Order.objects.values_list("item", flat=True)) == ["car", "new"]

    @pytest.mark.long
    def test_a_row_that_another_user_changed(self, anna: Tab, bike: int) -> None:
        """An untouched row takes the other user's values, so that the second send does not overwrite them."""
        Order.objects.update(price=50)
        anna.send({f"order_set-{bike}-price": "9"})
        assert anna.state == "refused"
        assert "Changed meanwhile: Price." in anna.text
        assert anna.fields[f"order_set-{1 - bike}-price"] == "50.00"
        assert anna.send().status_code == 302
        assert sorted(Order.objects.values_list("price", flat=True)) == [9, 50]

    def test_rows_that_are_gone_or_new(self, anna: Tab, bike: int, rows: list[Order]) -> None:
        """A row that was added or deleted meanwhile does not prevent saving. Text typed into a deleted row is shown
        until the row is marked."""
        Order.objects.create(buyer=rows[1].buyer, item="added", price=1)
        Order.objects.filter(item="bike").delete()
        anna.send({f"order_set-{bike}-item": "car", f"order_set-{1 - bike}-item": "cap"})
        assert "This row was deleted meanwhile." in anna.text
        assert anna.fields[f"order_set-{bike}-item"] == "car"
        assert anna.send({f"order_set-{bike}-DELETE": "on"}).status_code == 302
        assert sorted(Order.objects.values_list("item", flat=True)) == ["added", "cap"]

    def test_a_row_left_alone_that_is_gone(self, anna: Tab, bike: int) -> None:
        """A deleted row that nobody has typed into does not keep other rows from being saved."""
        Order.objects.filter(item="bike").delete()
        assert anna.send({f"order_set-{1 - bike}-item": "cap"}).status_code == 302
        assert [each.item for each in Order.objects.all()] == ["cap"]


class TestKeys:
    """Primary keys of any kind."""

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
        """An object with a key of an ObjectId, a UUID or odd text can be taken, is seen by others, kept, saved, and
        freed."""
        obj = make()
        page = reverse(f"editing:{obj._meta.app_label}_{obj._meta.model_name}_change", args=[quote(obj.pk)])
        anna, ben = Tab("anna", page), Tab("ben", page)
        assert ben.state == "busy"
        assert anna.tell("beat")["state"] == "mine"
        name = "price" if isinstance(obj, Ad) else "value"
        assert anna.send({name: "42"}).status_code == 302
        obj.refresh_from_db()
        assert getattr(obj, name) == 42
        assert holders(obj) == []

    def test_a_key_that_is_too_long(self) -> None:
        """A key that is too long, or not allowed, is replaced by a hash. Two such keys have two locks."""
        keys = {edit_key(PlainRate, "x" * n) for n in (10, 600, 601, 9_999)} | {edit_key(PlainRate, "x\x00")}
        assert len(keys) == 5
        assert all(key.startswith("edit:rates.plainrate:") and len(key) <= 512 for key in keys)
        assert edit_key(Order, (1, "a,b")) != edit_key(Order, ("1,a", "b"))
        with pytest.raises(ValueError, match="no primary key yet"):
            edit_key(Order())


class TestDeleting:
    """An object that another user is editing is not deleted."""

    def test_the_page(self, order: Order) -> None:
        """The editor may delete. Other users are sent to the page, with the name of the editor."""
        anna, ben, pk = Tab("anna", order).client, staff("ben"), order.pk
        address = page_of(order).replace("change", "delete")
        for answer in (ben.get(address, follow=True), ben.post(address, {"post": "yes"}, follow=True)):
            assert "Not deleted. This is being edited by anna." in text_of(answer)
        assert Order.objects.exists()
        asked = anna.post(address, {"post": "yes"}, follow=True)
        assert len(holders(order)) == 1, "a page that deletes nothing leaves the other tab its lock"
        anna.post(asked.redirect_chain[-1][0], {"post": "yes"})
        assert not Order.objects.exists()
        assert holders(f"shop.order:{pk}") == []

    def test_the_action(self, order: Order) -> None:
        """An edited object is not deleted."""
        anna, ben = Tab("anna", order), staff("ben")
        chosen = {"action": "delete_selected", "_selected_action": [str(order.pk)], "post": "yes"}
        assert "This is being edited by anna." in text_of(ben.post(LIST, chosen))
        assert Order.objects.exists()
        anna.client.post("/admin/logout/")
        ben.post(LIST, chosen)
        assert not Order.objects.exists()

    @pytest.mark.long
    def test_the_list(self, order: Order) -> None:
        """A row of the list that another user is editing is not changed there."""
        Tab("anna", order)
        other = Order.objects.create(buyer=order.buyer, item="hat", price=1)
        ben = Tab("ben", LIST)
        assert (ben.fields["form-0-id"], ben.fields["form-1-id"]) == (str(other.pk), str(order.pk))
        assert ben.send({"form-0-price": "2", "_save": "Save"}).status_code == 302
        other.refresh_from_db()
        assert other.price == 2
        ben = Tab(ben.client, LIST)
        ben.send({"form-1-price": "7", "_save": "Save"})
        assert "This is being edited by anna." in ben.text
        order.refresh_from_db()
        assert order.price == 100


class TestList:
    """The list shows the edited objects, with their editors."""

    @pytest.fixture
    def orders(self, order: Order) -> list[Order]:
        return [order, Order.objects.create(buyer=order.buyer, item="hat", price=1)]

    @staticmethod
    def editors(page: Any) -> list[str]:
        return re.findall(r'<td class="field-edited_by">(.*?)</td>', page.content.decode())

    @pytest.mark.long
    def test_column(self, orders: list[Order], commands: Commands) -> None:
        """The column shows the editor and the start, for any admin with the mixin, by one command."""
        ben = staff("ben")
        assert Tab("anna", orders[0]).state == "mine"
        commands.sent.clear()
        page = ben.get(LIST)
        assert commands.names() == ["aggregate"]
        assert [re.sub(r"[\d.]+ s", "N s", editor) for editor in self.editors(page)] == ["–", "anna · N s ago"]

    def test_twice(self, order: Order) -> None:
        """A row that a join shows twice is edited in both of its lines."""
        assert Tab("anna", order).state == "mine"
        lines: list[Any] = [Order.objects.get(pk=order.pk) for _ in range(2)]
        _note_editors(lines)
        assert [line._mongolock_editor.split(" · ")[0] for line in lines] == ["anna", "anna"]

    @pytest.mark.long
    def test_without_mongo(self, orders: list[Order], away: None) -> None:
        """Without MongoDB, the list is shown without editors."""
        assert self.editors(staff("anna").get(LIST)) == ["?", "?"]


class TestWithoutMongo:
    """While MongoDB is away, the page shows a warning and checks the version, or does nothing at all."""

    @pytest.mark.long
    def test_open(self, order: Order, away: None) -> None:
        """The form opens with a warning, and is saved if nobody changed anything."""
        anna = Tab("anna", order)
        assert anna.state == "away"
        assert "We cannot check at the moment whether someone else is editing this. You can edit it" in anna.text
        assert anna.tell("beat")["state"] == "away"
        assert anna.send(item="car").status_code == 302
        anna = Tab(anna.client, order)
        Order.objects.update(item="theirs")
        anna.send(item="boat")
        assert anna.state == "refused"
        assert Order.objects.get().item == "theirs"

    @pytest.mark.long
    def test_closed(self, order: Order, settings: Settings, away: None) -> None:
        """With EDIT_FAIL_CLOSED, the form is read-only, and nothing is saved."""
        set_locks(settings, EDIT_FAIL_CLOSED=True)
        anna = Tab("anna", order)
        assert anna.state == "away"
        assert 'name="item"' not in anna.html
        sent = {"buyer": order.buyer_id, "item": "car", "price": "1", "state": "new", "version_read": "x"}
        page = anna.client.post(anna.address, sent)
        assert "Not saved: we cannot check at the moment whether someone else is editing this." in text_of(page)
        assert Order.objects.get().item == "bike"

    @pytest.mark.long
    @pytest.mark.parametrize("closed", [False, True])
    def test_many(
        self, order: Order, settings: Settings, monkeypatch: pytest.MonkeyPatch, away: None, closed: bool
    ) -> None:
        """When many objects are deleted, only one waits for MongoDB. With EDIT_FAIL_CLOSED, neither the list nor the
        pages that delete change anything."""
        set_locks(settings, EDIT_FAIL_CLOSED=closed)
        Order.objects.create(buyer=order.buyer, item="hat", price=1)
        reads, read = list[EditLock](), EditLock.read

        def counted(lock: EditLock) -> Any:
            reads.append(lock)
            return read(lock)

        monkeypatch.setattr(EditLock, "read", counted)
        anna = Tab("anna", LIST)
        anna.send({"form-0-price": "7", "form-1-price": "7"}, _save="Save")
        assert ("nothing is saved" in anna.text, Order.objects.filter(price=7).count()) == (closed, 0 if closed else 2)
        page = anna.client.post(page_of(order).replace("change", "delete"), {"post": "yes"}, follow=True)
        assert ("Not deleted." in text_of(page)) == closed
        reads.clear()
        keys = [str(each.pk) for each in Order.objects.all()]
        anna.client.post(LIST, {"action": "delete_selected", "_selected_action": keys, "post": "yes"})
        assert Order.objects.exists() == closed
        assert len(reads) == 1

    @pytest.mark.long
    def test_one_wait(self, order: Order, monkeypatch: pytest.MonkeyPatch, away: None) -> None:
        """F216: Each page waits for MongoDB once: to open, to save, to ask before a deletion, and to delete."""
        waits: list[Any] = []
        monkeypatch.setattr(edit_lock, "log", lambda _level, event, **_facts: waits.append(event))
        anna = Tab("anna", order)
        assert (anna.state, len(waits)) == ("away", 1)
        assert anna.send(item="car").status_code == 302
        assert len(waits) == 2
        asked = anna.client.get(anna.address.replace("change", "delete"))["Location"]
        assert len(waits) == 2
        anna.client.get(asked)
        assert len(waits) == 3
        assert anna.client.post(asked, {"post": "yes"}).status_code == 302
        assert (len(waits), Order.objects.exists()) == (4, False)


def test_sent_again_after_a_lost_answer(order: Order) -> None:
    """F212: Without JavaScript, the same form may come twice. The second time there is nothing to save, and nobody is
    editing."""
    anna = Tab("anna", order)
    sent = anna.fields | {"item": "car"}
    assert anna.client.post(anna.address, sent).status_code == 302
    Tab(anna.client, order)
    assert anna.client.post(anna.address, sent).status_code == 302
    assert Order.objects.get().item == "car"
