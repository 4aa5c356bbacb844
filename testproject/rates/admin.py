"""Rates in the admin: what somebody else changes meanwhile is shown, and not written over."""

from django.contrib import admin

from django_mongolock.versions.version_admin import VersionedAdmin
from testproject.rates.models import Rate


@admin.register(Rate)
class RateAdmin(VersionedAdmin):
    """Rates, to be changed one by one or in the list."""

    list_display = ("name", "value", "note", "version")
    list_editable = ("value",)
    fields = (("name", "value"), "note", "version")
    readonly_fields = ("version",)
