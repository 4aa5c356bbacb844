"""`LockAdmin`: the read-only admin of held locks, their holders and their waiters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.db.models.expressions import OrderBy
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..conf import get_settings
from ..exceptions import printable
from ..inspection import display
from ..inspection.kinds import other_kinds, starting
from ..inspection.named_locks import row_of
from ..inspection.pictures import panels
from ..inspection.status import lock_status
from ..models import Lock
from .dashboard import Dashboard
from .listing import Columns, Computed, LockChangeList, StateFilter, chosen_state, search, sorts_all
from .lock_actions import SHOWN
from .other_locks import OtherLocks
from .pages import in_own_encoding, unless_away


@admin.register(Lock)
class LockAdmin(Columns, Dashboard, OtherLocks):
    """The read-only admin of locks.

    Forced releases and clearing need the permission ``django_mongolock.force_release_lock``. Asking for a release needs
    ``django_mongolock.ask_release_lock``.
    """

    list_display = ("key_link", "state", "who", "since", "left", "waiting", "waited")
    list_filter = (StateFilter,)
    search_fields = ("key",)
    search_help_text = gettext_lazy(
        "The start of a key, such as order:5; if no key starts with it, the owner, user, host or label of a holder. "
        "With * for any text and ? for one character: the whole key, such as *:5, which takes longer with many locks."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        """Return the locks with the key prefix of this project."""
        settings = get_settings()
        queryset: QuerySet[Lock] = Lock.objects.using(settings.DATABASE).matching(starting(settings.KEY_PREFIX))
        return queryset

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[LockChangeList]:
        return LockChangeList

    def get_ordering(self, request: HttpRequest) -> tuple[str | OrderBy]:
        """Return the order with the longest held, or longest waited for, first. A list of all locks has the order of an
        index.
        """
        if not sorts_all(request):
            return ("key",)
        orders: dict[str, str | OrderBy] = {"stale": "expires_at", "waited": Computed("waited").asc()}
        return (orders.get(chosen_state(request), Computed("since").asc()),)

    def get_sortable_by(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the sortable columns. If free locks are listed too, only columns with an index are sortable."""
        return ("key_link", "left", *(("since", "waiting", "waited") if sorts_all(request) else ()))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Lock], search_term: str
    ) -> tuple[QuerySet[Lock], bool]:
        text = search_term.strip()
        found: Any = queryset
        return (search(found, text) if text else queryset), False

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses. No page adds or deletes. The page of one lock has the name that Django expects."""
        pages: list[tuple[str, Callable[..., HttpResponse], str]] = [
            ("", self.changelist_view, "changelist"),
            ("force-release/", self.force_release_view, "force_release"),
            ("ask-to-release/", self.ask_to_release_view, "ask_to_release"),
            ("others/", self.others_view, "others"),
            ("<path:object_id>/history/", self.history_view, "history"),
            ("<path:object_id>/change/", self.change_view, "change"),
        ]
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        ours = [
            path(route, self.admin_site.admin_view(in_own_encoding(view)), name=f"{name}_{page}")
            for route, view, page in pages
        ]
        # A monitoring program has no session, and need not be a member of staff. The view checks its permission.
        return [path("status/", lock_status, name=f"{name}_status"), *ours]

    @unless_away
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list."""
        context = {"title": _("Locks"), "shows_others": bool(other_kinds())}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    @unless_away
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one lock, with its holders, its waiters and its statistics."""
        key = display.unquote_key(object_id)
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        found = self.read(self.get_queryset(request).filter(pk=key), holders=SHOWN, waiters=SHOWN)
        if (lock := next(iter(found), None)) is None:
            text = _("There is no lock “%s”. The documents of unused locks are deleted after a while.")
            self.message_user(request, text % printable(key), messages.WARNING)
            return HttpResponseRedirect(self.way_back(request))
        context = {
            "title": printable(key),
            "lock": lock,
            "row": row_of(lock),
            "facts": display.counters(lock),
            "quoted": display.quote_key(key),
            "may_ask": self.has_ask_release_permission(request),
            "may_force": self.has_force_release_permission(request),
            "panels": [panel(request, lock) for panel in panels],
        }
        return self.page(request, "detail", context)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return super().history_view(request, quote(display.unquote_key(object_id)), extra_context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Lock | None:
        """Return a lock with only its key. The actions on a lock are shown even if its document is deleted."""
        return Lock(key=object_id) if object_id and object_id.startswith(get_settings().KEY_PREFIX) else None

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def key_link(self, lock: Lock) -> SafeString | str:
        return self.link(lock.key)
