"""`LockEventAdmin`: the read-only admin of the history of the locks."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..admin.listing import BoundedChangeList, ChoiceFilter, match_of
from ..admin.pages import Pages, in_own_encoding, unless_away
from ..backends import mongo_store
from ..conf import get_settings
from ..exceptions import LockBackendFailed
from ..inspection import display
from ..inspection.kinds import starting
from ..models.reading import Condition
from .models import Happened, LockEvent

__all__ = ["LockEventAdmin"]

#: The events that need a look.
TROUBLE = [Happened.LOST.value, Happened.DEADLOCK.value, Happened.FORCED.value]
#: An empty cell. On a narrow screen, an event is a card without columns, and shows nothing in its place.
NONE = SafeString('<span class="mongolock-none">–</span>')


class LockEventChangeList(BoundedChangeList):
    """The list of events, the latest first."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[str | Combinable]:
        """Return the only order that has an index."""
        return ["-at", "-id"]

    def fetch(self, skip: int, limit: int, timeout: float) -> list[LockEvent]:
        """See BoundedChangeList.fetch()."""
        queryset: Any = self.queryset
        try:
            found: list[LockEvent] = queryset.recent(limit, skip=skip, timeout=timeout)
        except LockBackendFailed as error:
            if error.passing or mongo_store(queryset.db).history is not None:
                raise
            return []  # no history is kept, and this user may not look for an earlier one
        return found


class EventFilter(ChoiceFilter):
    """The kind of an event. The default is all trouble, and all events for a search."""

    title = gettext_lazy("event")
    parameter_name = "event"

    def default(self, request: HttpRequest) -> str:
        return "all" if request.GET.get(SEARCH_VAR, "").strip() else "trouble"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[Any]:
        several = gettext_lazy("losses, deadlocks, forced releases"), gettext_lazy("all events")
        return [("trouble", several[0]), *Happened.choices, ("all", several[1])]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.chosen == "all":
            return queryset
        return queryset.filter(Condition({"event": {"$in": TROUBLE if self.chosen == "trouble" else [self.chosen]}}))


@admin.register(LockEvent)
class LockEventAdmin(Pages):
    """The read-only admin of events, with the permission ``mongolock_history.view_lockevent``."""

    list_display = ("when", "who", "key_link", "what", "how_long", "details")
    list_filter = (EventFilter,)
    search_fields = ("key",)
    search_help_text = gettext_lazy(
        "The start of a key, such as order:5; or the whole key, with * for any text and ? for one character."
    )
    sortable_by = ()
    actions = None

    def get_urls(self) -> list[URLPattern]:
        """Return the address of the list. There is no other page."""
        view = self.admin_site.admin_view(in_own_encoding(self.changelist_view))
        return [path("", view, name="mongolock_history_lockevent_changelist")]

    @unless_away
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {"title": _("Lock history"), "keeps_history": mongo_store().history is not None}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LockEventChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[LockEvent]:
        """Return the events of keys with the prefix of this project."""
        settings = get_settings()
        queryset: QuerySet[LockEvent] = LockEvent.objects.using(settings.DATABASE)
        return queryset.filter(Condition(starting(settings.KEY_PREFIX).query("key")))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[LockEvent], search_term: str
    ) -> tuple[QuerySet[LockEvent], bool]:
        text, prefix = search_term.strip(), get_settings().KEY_PREFIX
        if not text:
            return queryset, False
        try:
            return queryset.filter(Condition(match_of(text, prefix).query("key"))), False
        except ValueError:  # no key can match
            return queryset.none(), False

    @admin.display(description=gettext_lazy("when"))
    def when(self, event: LockEvent) -> SafeString | str:
        return display.time_ago(event.at, event.now)

    @admin.display(description=gettext_lazy("who"))
    def who(self, event: LockEvent) -> SafeString:
        named = display.named(display.who(event.party), display.where(event.party))
        return format_html('<span title="{}">{}</span>', display.details(event.party), named)

    @admin.display(description=gettext_lazy("key"))
    def key_link(self, event: LockEvent) -> SafeString | str:
        return self.link(event.key)

    @admin.display(description=gettext_lazy("event"))
    def what(self, event: LockEvent) -> SafeString:
        return format_html('<span title="{} {}">{}</span>', gettext_lazy("token"), event.token or "–", event.badge)

    @admin.display(description=gettext_lazy("how long"))
    def how_long(self, event: LockEvent) -> str:
        return event.lengths or NONE

    @admin.display(description=gettext_lazy("details"))
    def details(self, event: LockEvent) -> str:
        return event.reasons or NONE
