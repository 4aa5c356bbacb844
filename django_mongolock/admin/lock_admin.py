"""`LockAdmin`: what is held, by whom, since when, and who waits; and how to free it. Nothing is edited here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.document import tidy_fact
from ..engine.history import Happened
from ..engine.store import MongoStore
from ..inspect import display, operations
from ..inspect.monitoring import lock_status
from ..inspect.patterns import starting
from ..inspect.snapshot import State
from ..models import Lock, LockEvent
from ..signals import send, stale_locks_cleared
from . import dashboard, document_locks, incidents, release
from .columns import Columns, badge
from .listing import LockChangeList, ModeFilter, StateFilter, search
from .pages import Pages, csrf, unless_away

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Lock]
else:
    ModelAdmin = admin.ModelAdmin

#: A path of dots is not what it looks like to a browser. `quote` never makes these out of a key.
_DOTS = {".": "_2E", "..": "_2E_2E"}
#: How many holders, and how many of those who wait, one page shows; how many of the latest events.
SHOWN = incidents.SHOWN
EVENTS = 20


@admin.register(Lock)
class LockAdmin(Columns, Pages, ModelAdmin):
    """Read only. To force a release and to clear needs the permission ``django_mongolock.force_release_lock``, to ask
    for one ``django_mongolock.ask_release_lock``."""

    list_display = ("key_link", "state", "who", "where", "since", "left", "waiting", "fencing_token")
    list_filter = (StateFilter, ModeFilter)
    search_fields = ("key",)
    search_help_text = gettext_lazy(
        "The start of a key, such as order:5; if no key starts like that, the owner, user, host or label of a holder. "
        "With * for any text and ? for one character: the whole key, such as *:5; among many locks that takes longer."
    )
    actions = ("ask_to_release", "force_release", "clear_stale")

    # Which locks, and who may do what

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        """The locks of this project: those with its prefix."""
        settings = get_settings()
        queryset: QuerySet[Lock] = Lock.objects.using(settings.DATABASE).matching(starting(settings.KEY_PREFIX))
        return queryset

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[LockChangeList]:
        return LockChangeList

    def get_ordering(self, request: HttpRequest) -> tuple[str]:
        """What ends first is first; what has no end goes by its key."""
        return ("key",) if request.GET.get("state") in ("all", "free") else ("expires_at",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Lock], search_term: str
    ) -> tuple[QuerySet[Lock], bool]:
        text = search_term.strip()
        found: Any = queryset
        return (search(found, text) if text else queryset), False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only the filters: a regular expression from the address bar could keep the server busy."""
        return lookup in (StateFilter.parameter_name, ModeFilter.parameter_name)

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        """May this user take a lock from its holder?"""
        return request.user.has_perm(f"{self.opts.app_label}.{get_permission_codename('force_release', self.opts)}")

    def has_ask_release_permission(self, request: HttpRequest) -> bool:
        """May this user ask a holder for its lock? Who may take it may also ask."""
        name = f"{self.opts.app_label}.{get_permission_codename('ask_release', self.opts)}"
        return request.user.has_perm(name) or self.has_force_release_permission(request)

    # Pages

    def get_urls(self) -> list[URLPattern]:
        """No way to add and none to delete. The page of one lock has the name that Django expects."""
        pages: list[tuple[str, Callable[..., HttpResponse], str]] = [
            ("", self.changelist_view, "changelist"),
            ("force-release/", self.force_release_view, "force_release"),
            ("ask-to-release/", self.ask_to_release_view, "ask_to_release"),
            ("documents/", self.documents_view, "documents"),
            ("dashboard/", self.dashboard_view, "dashboard"),
            ("<path:object_id>/history/", self.history_view, "history"),
            ("<path:object_id>/change/", self.change_view, "change"),
        ]
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        ours = [path(route, self.admin_site.admin_view(view), name=f"{name}_{page}") for route, view, page in pages]
        # A program that watches has no session, and need not be of the staff: the view sees to its permission.
        return [path("status/", lock_status, name=f"{name}_status"), *ours]

    @csrf
    @unless_away
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list. Where it shows what is waited for, it also tells of deadlocks."""
        context = {
            "title": _("Locks"),
            "may_clear_documents": document_locks.may_clear(request),
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)

    @unless_away
    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """What goes on: who holds, who waits for whom, what needs somebody."""
        return dashboard.view(self, request)

    @unless_away
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The page of one lock: who holds it, who waits, and its counters."""
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        key = _unquote(object_id)
        queryset: Any = self.get_queryset(request).filter(pk=key)
        lock = next(iter(queryset.survey(holders=SHOWN, waiters=SHOWN, timeout=get_settings().COMMAND_TIMEOUT)), None)
        if lock is None:
            return self._gone(request, key)
        may = self.has_force_release_permission(request)
        context = {
            "title": lock.key,
            "lock": lock,
            "seen": lock.seen,
            "badge": badge(lock.seen),
            "facts": display.counters(lock.seen),
            "quoted": _quote(lock.key),
            "can_ask": self.has_ask_release_permission(request) and lock.seen.state is State.HELD,
            "can_release": may and lock.seen.state is State.HELD,
            "can_clear": may and lock.seen.state is State.STALE,
            "checkbox": ACTION_CHECKBOX_NAME,
            **self._history(request, lock),
        }
        return self.page(request, "detail", context)

    def _history(self, request: HttpRequest, lock: Lock) -> dict[str, Any]:
        """What happened to the lock lately, where that is written."""
        if self.store().history is None:
            return {"keeps_history": False}
        events: Any = LockEvent.objects.using(get_settings().DATABASE).filter(key=lock.key)
        return {
            "keeps_history": True,
            "events": events.recent(EVENTS, timeout=get_settings().COMMAND_TIMEOUT),
            "may_view_events": request.user.has_perm(f"{self.opts.app_label}.view_lockevent"),
        }

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return super().history_view(request, quote(_unquote(object_id)), extra_context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Lock | None:
        """Only the key: what was done to a lock is told also when its document is gone."""
        return Lock(key=object_id) if object_id.startswith(get_settings().KEY_PREFIX) else None

    def _gone(self, request: HttpRequest, key: str) -> HttpResponse:
        text = _("There is no lock “%s” (any more): nobody has used it for as long as unused locks are kept.")
        self.message_user(request, text % key, messages.WARNING)
        return HttpResponseRedirect(self.way_back(request))

    def way_back(self, request: HttpRequest) -> str:
        """The list, as it was filtered; or the page of the lock that one came from."""
        if back := request.POST.get("back", ""):
            return address_of(back, self.admin_site.name)
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        address = reverse(name, current_app=self.admin_site.name)
        filters = request.POST["filters"] if "filters" in request.POST else request.GET.urlencode()
        return f"{address}?{filters}" if filters else address

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def key_link(self, lock: Lock) -> SafeString:
        if type(lock.key) is not str:
            return format_html("<bdi>{}</bdi>", str(lock.key))
        address = address_of(lock.key, self.admin_site.name)
        return format_html('<a class="mongolock-key" href="{}"><bdi>{}</bdi></a>', address, lock.key)

    # Actions

    @admin.action(
        description=gettext_lazy("Ask the holders to release the selected locks"), permissions=["ask_release"]
    )
    def ask_to_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Show who holds each of them, and ask for a word to the holders."""
        return incidents.question(self, request, incidents.ASK, self._selected(request, queryset, SHOWN))

    @admin.action(description=gettext_lazy("Force the release of the selected locks"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Ask first: show who holds each of them."""
        return incidents.question(self, request, incidents.FORCE, self._selected(request, queryset, SHOWN))

    @csrf
    @unless_away
    def ask_to_release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask the holders that were shown."""
        return self._answer(request, incidents.ASK, self.has_ask_release_permission(request))

    @csrf
    @unless_away
    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Do what was confirmed, to those grants that were shown."""
        return self._answer(request, incidents.FORCE, self.has_force_release_permission(request))

    def _answer(self, request: HttpRequest, kind: incidents.Kind, may: bool) -> HttpResponse:
        if not (self.has_view_permission(request) and may):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        return incidents.answer(self, request, kind)

    @csrf
    @unless_away
    def documents_view(self, request: HttpRequest) -> HttpResponse:
        """The stale documents of every declared `DocumentLock`, and a way to free them."""
        return document_locks.view(self, request)

    @admin.action(description=gettext_lazy("Clear the selected stale locks"), permissions=["force_release"])
    def clear_stale(self, request: HttpRequest, queryset: QuerySet[Lock]) -> None:
        """Needs no question: a stale lock belongs to nobody, and the server looks again before it clears one."""
        locks = self._selected(request, queryset, 1)
        stale = [str(lock.key) for lock in locks if lock.seen.state is State.STALE]
        store, timeout = self.store(), get_settings().COMMAND_TIMEOUT
        cleared = [key for key in stale if operations.clear_stale(store, [key], operations.Which(), timeout).cleared]
        for key in cleared:
            self.log(request, key, _("Cleared: its lease was over."))
            if store.history is not None:
                store.history.note(key, Happened.CLEARED, {}, by=tidy_fact(request.user.get_username()))
        if cleared:
            send(stale_locks_cleared, count=len(cleared), using=get_settings().DATABASE)
            text = ngettext("%d stale lock was cleared.", "%d stale locks were cleared.", len(cleared))
            self.message_user(request, text % len(cleared), messages.SUCCESS)
        if count := len(locks) - len(cleared):
            text = ngettext("%d lock was left: it is not stale.", "%d locks were left: they are not stale.", count)
            self.message_user(request, text % count, messages.WARNING)

    def _selected(self, request: HttpRequest, queryset: QuerySet[Lock], holders: int) -> Sequence[Lock]:
        """The first of the chosen locks, as they are now: a page that nobody could read confirms nothing."""
        if request.POST.get("select_across") != "1":  # they may have left the filter since the list was shown
            locks = self.read(request, request.POST.getlist(ACTION_CHECKBOX_NAME), holders)
        else:
            locks = self._read(queryset, holders)
        if len(locks) > release.MAX_SELECTED:
            text = _("Only the first %d of the selected locks are dealt with. Do it again for the others.")
            self.message_user(request, text % release.MAX_SELECTED, messages.WARNING)
        return locks[: release.MAX_SELECTED]

    def read(self, request: HttpRequest, keys: Sequence[str], holders: int) -> list[Lock]:
        """The locks of these keys, as they are now, with so many of their holders."""
        return self._read(self.get_queryset(request).filter(pk__in=keys), holders)

    def _read(self, queryset: Any, holders: int) -> list[Lock]:
        timeout = get_settings().COMMAND_TIMEOUT
        return list(queryset.order_by("key").survey(limit=release.MAX_SELECTED + 1, holders=holders, timeout=timeout))

    def store(self) -> MongoStore:
        """Where the locks of this project are."""
        return mongo_store()

    def log(self, request: HttpRequest, key: str, text: str) -> None:
        """Write down who did what to a lock."""
        self.log_change(request, Lock(key=key), text)


def address_of(key: str, site: str | None = None) -> str:
    """Where the page of a lock is, on the admin site of this name."""
    return reverse("admin:django_mongolock_lock_change", args=(_quote(key),), current_app=site)


def _quote(key: str) -> str:
    return _DOTS.get(key) or str(quote(key))


def _unquote(object_id: str) -> str:
    """The key that `_quote` was given."""
    return next((key for key, quoted in _DOTS.items() if quoted == object_id), unquote(object_id))
