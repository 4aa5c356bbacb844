"""Edit locks and versions together with admin classes of other people. A refused change is not saved."""

# ruff: noqa: DJ008 - they are never shown
# mypy: disable-error-code="comparison-overlap"

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from bson import ObjectId
from django import forms
from django.contrib import admin
from django.contrib.admin.utils import NestedObjects
from django.contrib.auth.models import User
from django.db import connection, connections, models
from django.forms.utils import ErrorDict
from django.urls import clear_url_caches, path
from pytest_django import Settings

from django_mongolock.editing.admin import EditLockMixin
from django_mongolock.versions.admin import VersionedAdmin
from testproject.shop.models import Ad, Order
from tests.editing.notes import registry
from tests.editing.site import site
from tests.editing.staff import Tab, fields_of, staff, text_of
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("locks")]
LIST = "/admin/shop/order/"


class PlainForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Order
        fields = ("item", "price")


class BoldForm(PlainForm):
    """A form that forgets its errors."""

    def is_valid(self) -> bool:
        super().is_valid()
        self._errors = ErrorDict()
        return True


class OwnForm:
    """A `get_form()` without super()."""

    def get_form(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        return PlainForm


class OwnBoldForm:
    """An admin with a form that hides its errors."""

    def get_form(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        return BoldForm


class OwnListForm:
    """A `get_changelist_form()` without super()."""

    list_display = ("pk", "price")
    list_editable = ("price",)

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        return forms.modelform_factory(Order, fields=("price",))


class OwnFormset:
    """A `get_changelist_formset()` without super()."""

    list_display = ("pk", "price")
    list_editable = ("price",)

    def get_changelist_formset(self, request: Any, **kwargs: Any) -> Any:
        return forms.modelformset_factory(Order, fields=("price",), extra=0)


class OwnDelete:
    """A `get_deleted_objects()` without super(), and actions that delete in their own way."""

    actions = ("at_once",)

    def get_deleted_objects(self, objs: Any, request: Any) -> Any:
        collector = NestedObjects(using="default")
        collector.collect(objs)
        return collector.nested(str), {}, set(), []

    def at_once(self, request: Any, queryset: Any) -> None:
        self.delete_queryset(request, queryset)

    def delete_queryset(self, request: Any, queryset: Any) -> None:
        queryset.delete()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Callable[..., Any]:
    """Return a function that registers an admin until the test ends."""

    def register(kind: Any, model: Any = Order) -> Any:
        own = admin.AdminSite("editing")
        for other, found in site._registry.items():
            own.register(other, kind if other is model else type(found))
        if model not in own._registry:
            own.register(model, kind)
        urls: Any = ModuleType("other_classes_urls")
        urls.urlpatterns = [path("admin/", own.urls), path("locks/", admin.site.urls)]
        monkeypatch.setitem(sys.modules, urls.__name__, urls)
        settings.ROOT_URLCONF = urls.__name__
        clear_url_caches()
        return own._registry[model]

    return register


def made(own: type, *, first: bool, base: type = EditLockMixin) -> type:
    """An admin with the class of another person before or behind ours."""
    bases = (own, base, admin.ModelAdmin) if first else (base, own, admin.ModelAdmin)
    return type("OtherAdmin", bases, {})


@pytest.mark.parametrize("first", [True, False])
class TestRefused:
    """A refused change is not saved, whatever the other class overrides, with or without super()."""

    @pytest.mark.parametrize("own", [OwnForm, OwnBoldForm])
    def test_a_stale_page(self, use: Callable[..., Any], order: Order, own: type, *, first: bool) -> None:
        """F200: The form of the other class shows the conflict. A form that hides it is rolled back."""
        use(made(own, first=first))
        anna = Tab("anna", order)
        Order.objects.update(item="theirs")
        page = anna.client.post(anna.address, anna.fields | {"item": "mine"}, follow=True)
        assert Order.objects.get().item == "theirs"
        assert "Not saved: this was changed while you were editing it." in text_of(page)
        assert "changed successfully" not in text_of(page)

    @pytest.mark.parametrize("own", [OwnForm, OwnBoldForm])
    def test_beside_an_editor(self, use: Callable[..., Any], order: Order, own: type, *, first: bool) -> None:
        """F200: A page that has lost its lock saves nothing."""
        use(made(own, first=first))
        anna = Tab("anna", order)
        ben = Tab("ben", order)
        sent = anna.fields | {"item": "mine", "edit_lock_tab": "x"}
        page = ben.client.post(anna.address, sent, follow=True)
        assert Order.objects.get().item == "bike"
        assert "this is now being edited by anna" in text_of(page)

    @pytest.mark.parametrize("own", [OwnListForm, OwnFormset])
    def test_the_list(self, use: Callable[..., Any], order: Order, own: type, *, first: bool) -> None:
        """F200: A row that another user is editing, or has changed meanwhile, is not saved."""
        use(made(own, first=first))
        ben, boss = Tab("ben", LIST), Tab("anna", order)
        page = ben.client.post(LIST, ben.fields | {"form-0-price": "7", "_save": "Save"}, follow=True)
        assert Order.objects.get().price == 100
        assert "This is being edited by anna." in text_of(page)
        assert fields_of(page)["form-0-price"] == "7"
        assert boss.send(price="50").status_code == 302
        ben.send({"form-0-price": "7", "_save": "Save"})
        assert Order.objects.get().price == 50
        assert "Changed meanwhile: Price." in ben.text

    @pytest.mark.parametrize("action", ["delete_selected", "at_once"])
    def test_deleting(self, use: Callable[..., Any], order: Order, action: str, *, first: bool) -> None:
        """F200: An object that another user is editing is not deleted."""
        use(made(OwnDelete, first=first))
        Tab("anna", order)
        ben = Tab("ben", LIST)
        chosen = {"action": action, "_selected_action": [str(order.pk)], "post": "yes"}
        page = ben.client.post(LIST, chosen, follow=True)
        assert Order.objects.exists()
        assert "This is being edited by anna." in text_of(page)


class Nonce(models.CharField):  # type: ignore[type-arg]
    """A field that stores each value in another way every time, as encryption with a nonce does."""

    def get_prep_value(self, value: Any) -> Any:
        return f"{uuid.uuid4().hex}:{value}"

    def from_db_value(self, value: str, *args: Any) -> str:
        return value.partition(":")[2]


class Secret(models.Model):
    """A model with such a field."""

    objects: Any = models.Manager()

    token = Nonce(max_length=99)
    note = models.CharField(max_length=20, default="note")

    class Meta:
        apps = registry
        app_label = "rates"


class SecretAdmin(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin with an editable list."""

    list_display = ("id", "token")
    list_editable = ("token",)


@pytest.fixture
def secret(locks: Locks) -> Secret:
    if Secret._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Secret)
    Secret.objects.all().delete()
    made: Secret = Secret.objects.create(token="s3")
    return made


class TestValues:
    """The value that the page showed is compared."""

    def test_a_value_that_is_stored_otherwise_each_time(self, use: Callable[..., Any], secret: Secret) -> None:
        """F202: The value is saved on the page and in the list, and can be deleted. Another value is noticed."""
        use(SecretAdmin, Secret)
        anna = Tab(staff("root", superuser=True), secret)
        assert anna.send(token="mine").status_code == 302
        assert Secret.objects.get().token == "mine"
        address = "/admin/rates/secret/"
        tab = Tab(anna.client, address)
        assert tab.send({"form-0-token": "list"}, _save="Save").status_code == 302
        assert Secret.objects.get().token == "list"
        anna = Tab(anna.client, secret)
        stored = Secret.objects.get()
        stored.token = "theirs"
        stored.save()
        anna.send(token="mine")
        assert "Changed meanwhile: Token." in anna.text
        asked = anna.client.get(f"{address}{secret.pk}/delete/")["Location"]
        assert anna.client.post(asked, {"post": "yes"}).status_code == 302
        assert not Secret.objects.exists()

    @pytest.mark.parametrize("kind", ["EditLockMixin", "VersionedAdmin"])
    def test_fields_that_a_document_lacks(self, use: Callable[..., Any], mongo: Any, kind: str) -> None:
        """F201: A page is saved although a field and the version were added after the document was written."""
        base = VersionedAdmin if kind == "VersionedAdmin" else EditLockMixin
        use(type("Old", (base, admin.ModelAdmin), {"fields": ("title", "body", "price", "opted_in")}), Ad)
        documents, pk = mongo[connections["mongo"].settings_dict["NAME"]][Ad._meta.db_table], ObjectId()
        documents.insert_one({"_id": pk, "title": "old"})
        address = f"/admin/shop/ad/{pk}/change/"
        anna = Tab(staff("root", superuser=True), address)
        assert anna.page.status_code == 200
        assert anna.send(title="new", price="5").status_code == 302
        found = documents.find_one({"_id": pk})
        assert (found["title"], found["price"], found["documentVersion"]) == ("new", 5, 1)
        documents.update_one({"_id": pk}, {"$unset": {"price": 1, "optedIn": 1, "documentVersion": 1}})
        asked = anna.client.get(address.replace("change", "delete"))["Location"]
        assert anna.client.post(asked, {"post": "yes"}).status_code == 302
        assert documents.find_one({"_id": pk}) is None

    def test_a_new_secret_key(self, order: Order, settings: Settings) -> None:
        """F203: A page that was made before SECRET_KEY was replaced is saved, and its tab still has the lock."""
        anna = Tab("anna", order)
        settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
        settings.SECRET_KEY = "another"
        assert anna.tell("beat")["state"] == "mine"
        assert anna.send(item="car").status_code == 302
        assert Order.objects.get().item == "car"


class BuyerWithRows(EditLockMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """Rows of a form that needs no user."""

    fields = ("username",)
    inlines = (type("Rows", (admin.TabularInline,), {"model": Order, "fields": ("item", "price"), "extra": 1}),)


class TestDeleted:
    """An object deleted while a user typed can be created again."""

    @pytest.mark.parametrize("base", [EditLockMixin, VersionedAdmin])
    def test_with_rows(self, use: Callable[..., Any], order: Order, base: Any) -> None:
        """F205: The object and its rows, including the new one, can be created again."""
        use(type("Buyers", (base, admin.ModelAdmin), {"fields": ("username",), "inlines": BuyerWithRows.inlines}), User)
        anna = Tab(staff("root", superuser=True), order.buyer)
        order.buyer.delete()
        anna.send({"username": "again", "order_set-1-item": "new", "order_set-1-price": "1"})
        assert "this was deleted while you were editing it" in anna.text
        assert anna.send().status_code == 302
        made = User.objects.get(username="again")
        assert sorted(each.item for each in made.order_set.all()) == ["bike", "new"]

    def test_without_the_right_to_add(self, use: Callable[..., Any], order: Order) -> None:
        """F205: The typed text stays on the page, and nothing is created."""
        use(type("Fixed", (EditLockMixin, admin.ModelAdmin), {"has_add_permission": lambda *_: False}))
        anna = Tab("anna", order)
        order.delete()
        for typed in ({"item": "car"}, {}):
            anna.send(typed)
            assert anna.fields["item"] == "car"
            assert "Copy what you typed." in anna.text
        assert not Order.objects.exists()


@pytest.mark.parametrize("base", [EditLockMixin, VersionedAdmin])
class TestBusyList:
    """A row of the list is saved whatever happens to the others."""

    @pytest.fixture
    def tab(self, use: Callable[..., Any], order: Order, base: Any) -> Tab:
        """Return a list of two, with the hat as `form-0` and the bike as `form-1`."""
        own = {"list_display": ("pk", "item", "price"), "list_editable": ("item", "price")}
        use(type("Listed", (base, admin.ModelAdmin), own))
        Order.objects.create(buyer=order.buyer, item="hat", price=3)
        return Tab("anna", LIST)

    def test_another_row_was_changed(self, tab: Tab) -> None:
        """F206: The row keeps the other user's values."""
        Order.objects.filter(item="hat").update(price=7)
        assert tab.send({"form-1-price": "9", "_save": "Save"}).status_code == 302
        assert sorted(Order.objects.values_list("item", "price")) == [("bike", 9), ("hat", 7)]

    def test_another_field_of_the_row_was_changed(self, tab: Tab) -> None:
        """Without a version, both changes are kept."""
        Order.objects.filter(item="bike").update(item="boat")
        assert tab.send({"form-1-price": "9", "_save": "Save"}).status_code == 302
        assert sorted(Order.objects.values_list("item", "price")) == [("boat", 9), ("hat", 3)]

    @pytest.mark.parametrize("typed", [{}, {"form-0-price": "8"}])
    def test_a_row_was_deleted(self, tab: Tab, typed: dict[str, str]) -> None:
        """F206: The page reports the deletion, and shows the text typed into the row."""
        Order.objects.filter(item="hat").delete()
        page = tab.client.post(LIST, tab.fields | typed | {"form-1-price": "9", "_save": "Save"}, follow=True)
        assert list(Order.objects.values_list("item", "price")) == [("bike", 9)]
        assert "was deleted meanwhile." in text_of(page)
        assert ("Price: 8" in text_of(page)) == bool(typed)
