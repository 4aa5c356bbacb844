"""An admin site with every kind of key and of version, and views with edit locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django import forms
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView
from django.contrib.staticfiles.views import serve
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import aget_object_or_404, render
from django.urls import path
from django.views.generic import UpdateView

from django_mongolock.editing import Editing, EditLockViewMixin
from django_mongolock.editing.admin import EditLockMixin
from django_mongolock.versions.admin import VersionedAdmin
from django_mongolock.versions.forms import SealedModelForm
from testproject.rates.models import PastRate, PlainRate, Rate
from testproject.shop.models import Ad, Order
from tests.editing.notes import Author, Note, NoteAdmin

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    TabularInline = admin.TabularInline[Any, Any]
    OrderView = UpdateView[Order, Any]
    UserView = UpdateView[User, Any]
    ModelForm = forms.ModelForm[Order]
else:
    ModelAdmin, TabularInline, OrderView, UserView = admin.ModelAdmin, admin.TabularInline, UpdateView, UpdateView
    ModelForm = forms.ModelForm

site = admin.AdminSite("editing")
site.register(Note, NoteAdmin)
site.register(Author)


class RowForm(ModelForm):
    """A form of a row that needs more arguments than Django gives."""

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class OrderRows(TabularInline):
    """The orders of a buyer."""

    model = Order
    form = RowForm
    fields = ("item", "price")
    extra = 1


@admin.register(User, site=site)
class BuyerAdmin(EditLockMixin, ModelAdmin):
    """With inlines, and keys that are numbers."""

    fields = ("username", "first_name", "last_name")
    inlines = (OrderRows,)
    search_fields = ("username",)

    def get_formset_kwargs(self, request: HttpRequest, *args: Any) -> dict[str, Any]:
        return super().get_formset_kwargs(request, *args) | {"form_kwargs": {"user": request.user}}


@admin.register(Order, site=site)
class OrderAdmin(EditLockMixin, ModelAdmin):
    """With a foreign key that opens a popup, choices, a list to be edited, and "save as new"."""

    list_display = ("pk", "item", "price")
    list_editable = ("price",)
    fields = ("buyer", "item", "price", "state")
    save_as = True


@admin.register(Ad, site=site)
class AdAdmin(EditLockMixin, ModelAdmin):
    """In MongoDB."""

    fields = ("title", "body", "price", "opted_in")


@admin.register(PastRate, site=site)
class PastRateAdmin(EditLockMixin, ModelAdmin):
    """Keys that are UUIDs."""

    fields = ("name", "value")


@admin.register(PlainRate, site=site)
class PlainRateAdmin(EditLockMixin, ModelAdmin):
    """Keys that are any text."""

    fields = ("value",)


@admin.register(Rate, site=site)
class RateAdmin(EditLockMixin, VersionedAdmin):
    """A model with a version, in an admin that knows versions as well."""

    fields = ("value", "note")


class OrderForm(SealedModelForm):
    """A form of both views that leaves out a field of its class."""

    class Meta:
        model = Order
        fields = ("item", "price", "state")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.fields["state"]


class OrderEdit(EditLockViewMixin, OrderView):
    """A class of one's own."""

    model = Order
    form_class = OrderForm
    template_name = "editing/order.html"
    success_url = "/done/"


class UserEdit(EditLockViewMixin, UserView):
    """A view of the user's own data."""

    form_class = forms.modelform_factory(User, fields=("first_name", "last_name"))
    template_name = "editing/order.html"
    success_url = "/done/"

    def get_object(self, queryset: Any = None) -> Any:
        return self.request.user


async def order_edit(request: HttpRequest, pk: int) -> HttpResponse:
    """A coroutine of one's own."""
    order = await aget_object_or_404(Order, pk=pk)
    editing = await Editing.aopen(request, order)
    if editing.response:
        return editing.response
    form = OrderForm(request.POST or None, instance=order)
    if request.method == "POST" and await sync_to_async(editing.try_save)(form):
        return HttpResponseRedirect("/done/")
    return render(request, "editing/order.html", {"form": form, "editing": editing})


urlpatterns = [
    path("admin/", site.urls),
    path("locks/", admin.site.urls),
    path("own/<int:pk>/", OrderEdit.as_view()),
    path("user/", UserEdit.as_view()),
    path("async/<int:pk>/", order_edit),
    path("done/", lambda request: HttpResponse("<!doctype html><title>done</title>saved")),
    path("login/", LoginView.as_view(template_name="shop/login.html"), name="login"),
    path("static/<path:path>", serve, {"insecure": True}),
]
