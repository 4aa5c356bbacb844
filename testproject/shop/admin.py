"""Orders, ads and sellers in the admin."""

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from django_mongolock.documents.admin import DocumentLockAdminMixin
from django_mongolock.editing.admin import EditLockMixin
from testproject.shop.models import Ad, Order, Seller, ad_exports

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin  # at run time it takes no type argument


@admin.register(Order)
class OrderAdmin(EditLockMixin, ModelAdmin):
    """Orders, with how often each was charged. One tab at a time edits an order."""

    list_display = ("pk", "item", "price", "state", "charges", "created_at")
    list_filter = ("state",)
    search_fields = ("item",)
    readonly_fields = ("charges", "created_at")


@admin.register(Ad)
class AdAdmin(EditLockMixin, DocumentLockAdminMixin, ModelAdmin):
    """Ads and the state of their exports. Ads that a dead flow holds can be freed.

    One tab at a time edits an ad. A change by the API in between is detected when it is saved.
    """

    document_lock = ad_exports

    list_display = (
        "title",
        "user_id",
        "price",
        "opted_in",
        "deleted",
        "document_version",
        "export_status",
        "exported_version",
        "locked_by",
        "updated_at",
    )
    list_filter = ("export_status", "opted_in", "deleted")
    search_fields = ("title", "user_id")
    readonly_fields = ("document_version", "export_status", "exported_version", "updated_at")


@admin.register(Seller)
class SellerAdmin(ModelAdmin):
    """The settings of each seller for all ads."""

    list_display = ("name", "user_id", "exports")
    list_filter = ("exports",)
