"""Edit locks and versions among admin classes of other people: what was refused is not saved, whatever they override."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from django import forms
from django.contrib import admin
from django.contrib.admin.utils import NestedObjects
from django.forms.utils import ErrorDict
from django.urls import clear_url_caches, path
from pytest_django import Settings

from django_mongolock.editing.admin import EditLockMixin
from testproject.shop.models import Order
from tests.editing.site import site
from tests.editing.staff import Tab, fields_of, text_of
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
    """The same, of a form that does not say what is wrong."""

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
    """What is refused is not saved, whatever the other class overrides, with or without super()."""

    @pytest.mark.parametrize("own", [OwnForm, OwnBoldForm])
    def test_a_stale_page(self, use: Callable[..., Any], order: Order, own: type, *, first: bool) -> None:
        """The form of the other class shows the conflict; a form that hides it is rolled back."""
        use(made(own, first=first))
        anna = Tab("anna", order)
        Order.objects.update(item="theirs")
        page = anna.client.post(anna.address, anna.fields | {"item": "mine"}, follow=True)
        assert Order.objects.get().item == "theirs"
        assert "Not saved: this was changed while you were editing it." in text_of(page)
        assert "changed successfully" not in text_of(page)

    @pytest.mark.parametrize("own", [OwnForm, OwnBoldForm])
    def test_beside_an_editor(self, use: Callable[..., Any], order: Order, own: type, *, first: bool) -> None:
        """A page that has lost its lock saves nothing."""
        use(made(own, first=first))
        anna = Tab("anna", order)
        ben = Tab("ben", order)
        sent = anna.fields | {"item": "mine", "edit_lock_tab": "x"}
        page = ben.client.post(anna.address, sent, follow=True)
        assert Order.objects.get().item == "bike"
        assert "this is now being edited by anna" in text_of(page)

    @pytest.mark.parametrize("own", [OwnListForm, OwnFormset])
    def test_the_list(self, use: Callable[..., Any], order: Order, own: type, *, first: bool) -> None:
        """A row that another user is editing, or has changed meanwhile, is not saved."""
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
        """What another user is editing is not deleted."""
        use(made(OwnDelete, first=first))
        Tab("anna", order)
        ben = Tab("ben", LIST)
        chosen = {"action": action, "_selected_action": [str(order.pk)], "post": "yes"}
        page = ben.client.post(LIST, chosen, follow=True)
        assert Order.objects.exists()
        assert "This is being edited by anna." in text_of(page)
