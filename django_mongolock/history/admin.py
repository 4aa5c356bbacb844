"""`LockEventAdmin`: the history of the locks, to read."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..admin.listing import BoundedChangeList, labelled, match_of
from ..admin.pages import Pages, in_own_encoding, unless_away
from ..backends import mongo_store
from ..conf import get_settings
from ..exceptions import LockBackendFailed
from ..inspection import display
from ..inspection.kinds import starting
from ..models.reading import Condition
from .models import LockEvent

__all__ = ["LockEventAdmin"]


class LockEventChangeList(BoundedChangeList):
    """The latest event comes first."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[str | Combinable]:
        """No other order has an index."""
        return ["-at", "-id"]

    def fetch(self, skip: int, limit: int, timeout: float) -> list[LockEvent]:
        """See BoundedChangeList.fetch()."""
        queryset: Any = self.queryset
        try:
            found: list[LockEvent] = queryset.recent(limit, skip=skip, timeout=timeout)
        except LockBackendFailed as error:
            if error.passing or mongo_store(queryset.db).history is not None:
                raise
            return []  # none is kept, and this user has no right to look for one that was kept before
        return found


@admin.register(LockEvent)
class LockEventAdmin(Pages):
    """Read only, with the permission ``mongolock_history.view_lockevent``."""

    list_display = ("when", "key_link", "what", "who", "fencing_token", "details")
    list_filter = ("event",)
    search_fields = ("key",)
    search_help_text = gettext_lazy(
        "The start of a key, such as order:5; or the whole key, with * for any text and ? for one character."
    )
    sortable_by = ()
    actions = None

    def get_urls(self) -> list[URLPattern]:
        """The list, and no other page."""
        view = self.admin_site.admin_view(in_own_encoding(self.changelist_view))
        return [path("", view, name="mongolock_history_lockevent_changelist")]

    @unless_away
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {"title": _("Lock history"), "keeps_history": mongo_store().history is not None}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LockEventChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[LockEvent]:
        """The events of this project: those of keys with its prefix."""
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

    @admin.display(description=gettext_lazy("key"))
    def key_link(self, event: LockEvent) -> SafeString | str:
        return self.link(event.key)

    @admin.display(description=gettext_lazy("event"))
    def what(self, event: LockEvent) -> SafeString:
        return event.badge

    @admin.display(description=gettext_lazy("who"))
    def who(self, event: LockEvent) -> SafeString:
        return display.in_a_line(f"{display.who(event.party)} · {display.details(event.party)}")

    @admin.display(description=gettext_lazy("token"))
    def fencing_token(self, event: LockEvent) -> SafeString:
        return labelled(gettext_lazy("token"), "–" if event.token is None else str(event.token))

    @admin.display(description=gettext_lazy("details"))
    def details(self, event: LockEvent) -> SafeString:
        return display.in_a_line(event.details)
