"""The service's records, read-only."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils import timezone

from testproject.external.models import Call, ShownAd

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin  # at run time it takes no type argument


def _never(*_: object, **__: object) -> bool:
    return False


class ReadOnlyAdmin(ModelAdmin):
    """An admin without adding, changing and deleting, because only the service writes its records."""

    has_add_permission = has_change_permission = has_delete_permission = _never


@admin.register(ShownAd)
class ShownAdAdmin(ReadOnlyAdmin):
    """The ads that the service shows now."""

    list_display = ("ad_id", "shown", "version", "sequence")
    list_filter = ("shown",)
    search_fields = ("ad_id",)


@admin.register(Call)
class CallAdmin(ReadOnlyAdmin):
    """Every call, the last one first."""

    list_display = ("started", "took", "ad_id", "kind", "version", "sequence")
    list_filter = ("kind",)
    search_fields = ("ad_id",)
    ordering = ("-started_at",)

    @admin.display(ordering="started_at")
    def started(self, call: Call) -> str:
        """Return the time of the call, to the millisecond, because overlaps are about milliseconds."""
        return timezone.localtime(call.started_at).isoformat(" ", "milliseconds")[:-6]

    @admin.display
    def took(self, call: Call) -> str:
        """Return the duration of the call."""
        return f"{(call.ended_at - call.started_at) / timedelta(milliseconds=1):.0f} ms"
