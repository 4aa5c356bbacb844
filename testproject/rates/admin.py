"""Rates in the admin. Concurrent changes are shown instead of overwritten."""

from django.contrib import admin

from django_mongolock.versions.admin import VersionedAdmin
from testproject.rates.models import Rate


@admin.register(Rate)
class RateAdmin(VersionedAdmin):
    """Rates that can be edited one by one or in the list."""

    list_display = ("name", "value", "note", "version")
    list_editable = ("value",)
    fields = (("name", "value"), "note", "version")
    readonly_fields = ("version",)
