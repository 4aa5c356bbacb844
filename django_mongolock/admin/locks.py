"""`LockAdmin`: what is held, by whom, since when, and who waits; and how to free it. Nothing is edited here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.csrf import csrf_protect

from .. import words
from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine import upkeep
from ..engine.document import tidy_fact
from ..engine.patterns import starting
from ..engine.store import MongoStore
from ..engine.survey import State
from ..exceptions import LockBackendError, LockDocumentError
from ..models import Lock
from ..signals import send, stale_locks_cleared
from . import documents, release
from .columns import Columns, badge
from .listing import LockChangeList, ModeFilter, StateFilter, search

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Lock]
else:
    ModelAdmin = admin.ModelAdmin

P = ParamSpec("P")
View = Callable[Concatenate["LockAdmin", HttpRequest, P], HttpResponse]
csrf = method_decorator(csrf_protect)
#: A path of dots is not what it looks like to a browser. `quote` never makes these out of a key.
_DOTS = {".": "_2E", "..": "_2E_2E"}
#: How many holders, and how many of those who wait, one page shows.
SHOWN = 100


def unless_away(view: View[P]) -> View[P]:
    """While MongoDB cannot be asked, say so on a page of the admin, with status 503."""

    @wraps(view)
    def guarded(self: LockAdmin, request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        try:
            return view(self, request, *args, **kwargs)
        except LockBackendError as error:
            context = {"title": _("Locks"), "problem": error.problem}
            return self.page(request, "unavailable", context, status=503)

    return guarded


@admin.register(Lock)
class LockAdmin(Columns, ModelAdmin):
    """Read only. Force release and clearing need the permission ``django_mongolock.force_release_lock``."""

    list_display = ("key_link", "state", "who", "where", "since", "left", "waiting", "fencing_token")
    list_display_links = None
    list_filter = (StateFilter, ModeFilter)
    list_per_page = 100
    list_max_show_all = 0
    search_fields = ("key",)
    search_help_text = gettext_lazy(
        "The start of a key, such as order:5; if no key starts like that, the owner, user, host or label of a holder. "
        "With * for any text and ? for one character: the whole key, such as *:5; among many locks that takes longer."
    )
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ("ask_to_release", "force_release", "clear_stale")

    class Media:
        css = {"all": ("django_mongolock/locks.css",)}  # noqa: RUF012 - as Django wants it

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

    def has_add_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        """May this user take a lock from its holder?"""
        return request.user.has_perm(f"{self.opts.app_label}.{get_permission_codename('force_release', self.opts)}")

    # Pages

    def get_urls(self) -> list[URLPattern]:
        """No way to add and none to delete. The page of one lock has the name that Django expects."""
        pages: list[tuple[str, Callable[..., HttpResponse], str]] = [
            ("", self.changelist_view, "changelist"),
            ("force-release/", self.force_release_view, "force_release"),
            ("documents/", self.documents_view, "documents"),
            ("<path:object_id>/history/", self.history_view, "history"),
            ("<path:object_id>/change/", self.change_view, "change"),
        ]
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [path(route, self.admin_site.admin_view(view), name=f"{name}_{page}") for route, view, page in pages]

    def page(self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200) -> TemplateResponse:
        """A page of ours inside the admin."""
        request.current_app = self.admin_site.name
        defaults = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media}
        template = f"admin/django_mongolock/lock/{name}.html"
        return TemplateResponse(request, template, {**defaults, **context}, status=status)

    @csrf
    @unless_away
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list. Where it shows what is waited for, it also tells of deadlocks."""
        context = {"title": _("Locks"), "may_clear_documents": documents.may_clear(request), **(extra_context or {})}
        return super().changelist_view(request, context)

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
            "facts": words.counters(lock.seen),
            "quoted": _quote(lock.key),
            "can_release": may and lock.seen.state is State.HELD,
            "can_clear": may and lock.seen.state is State.STALE,
            "checkbox": ACTION_CHECKBOX_NAME,
        }
        return self.page(request, "detail", context)

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
        return self._to_list(request)

    def _to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        """Back to the list, as it was filtered."""
        address = reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist", current_app=self.admin_site.name
        )
        filters = request.POST.get("filters", "")
        return HttpResponseRedirect(f"{address}?{filters}" if filters else address)

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def key_link(self, lock: Lock) -> SafeString:
        if type(lock.key) is not str:
            return format_html("<bdi>{}</bdi>", str(lock.key))
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        address = reverse(name, args=(_quote(lock.key),), current_app=self.admin_site.name)
        return format_html('<a class="mongolock-key" href="{}"><bdi>{}</bdi></a>', address, lock.key)

    # Actions

    @admin.action(
        description=gettext_lazy("Ask the holders to release the selected locks"), permissions=["force_release"]
    )
    def ask_to_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> None:
        """Needs no question: the holders learn of it at their next renewal, and do as they see fit."""
        locks = self._selected(request, queryset, 1)
        held = [str(lock.key) for lock in locks if lock.seen.state is State.HELD]
        caller = tidy_fact(_("%s, in the admin") % request.user.get_username())
        asked = [key for key in held if self._ask(request, key, caller)]
        for key in asked:
            self._log(request, key, _("Asked its holder to release it."))
        if asked:
            text = ngettext("The holder of %d lock was asked.", "The holders of %d locks were asked.", len(asked))
            self.message_user(request, text % len(asked), messages.SUCCESS)
        if count := len(locks) - len(asked):
            text = ngettext("%d lock was left: nobody holds it.", "%d locks were left: nobody holds them.", count)
            self.message_user(request, text % count, messages.WARNING)

    def _ask(self, request: HttpRequest, key: str, caller: str) -> bool:
        try:
            return upkeep.ask_to_release(self._store(), key, caller, get_settings().COMMAND_TIMEOUT) > 0
        except LockDocumentError as error:
            self._tell_damage(request, key, error.problem)
            return False

    @admin.action(description=gettext_lazy("Force the release of the selected locks"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Ask first: show who holds each of them."""
        locks = self._selected(request, queryset, SHOWN)
        held = [lock for lock in locks if lock.seen.state is State.HELD]
        if not held:
            self.message_user(request, _("Nobody holds any of the selected locks now."), messages.WARNING)
            return None
        context = {
            "title": _("Force release?"),
            "rows": [(lock, release.as_shown(lock.seen)) for lock in held],
            "left_out": len(locks) - len(held),
            "filters": request.GET.urlencode(),
        }
        return self.page(request, "force_release", context)

    @csrf
    @unless_away
    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Do what was confirmed, to those grants that were shown."""
        if not (self.has_view_permission(request) and self.has_force_release_permission(request)):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        outcome = release.release(self._store(), release.read_shown(request.POST.getlist("lock")))
        for key, token in outcome.released.items():
            self._log(request, key, _("Force released; its holder had fencing token %s.") % token)
        self._tell(request, outcome)
        return self._to_list(request)

    @csrf
    @unless_away
    def documents_view(self, request: HttpRequest) -> HttpResponse:
        """The stale documents of every declared `DocumentLock`, and a way to free them."""
        return documents.view(self, request)

    def _tell(self, request: HttpRequest, outcome: release.Outcome) -> None:
        if count := len(outcome.released):
            text = ngettext("%d lock was taken from its holder.", "%d locks were taken from their holders.", count)
            self.message_user(request, text % count, messages.SUCCESS)
        if count := len(outcome.gone):
            text = ngettext(
                "%(count)d lock was left alone, since its holder is not the one that was shown any more: %(keys)s",
                "%(count)d locks were left alone, since their holders are not those that were shown any more: %(keys)s",
                count,
            )
            self.message_user(request, text % {"count": count, "keys": _some(outcome.gone)}, messages.WARNING)
        for key, problem in outcome.damaged.items():
            self._tell_damage(request, key, problem)
        if outcome.problem:
            text = _("The rest was not done: %s.")
            self.message_user(request, text % outcome.problem, messages.ERROR)

    def _tell_damage(self, request: HttpRequest, key: str, problem: str) -> None:
        text = _("The document of “%(key)s” is damaged and was left as it is: %(problem)s")
        self.message_user(request, text % {"key": key, "problem": problem}, messages.ERROR)

    @admin.action(description=gettext_lazy("Clear the selected stale locks"), permissions=["force_release"])
    def clear_stale(self, request: HttpRequest, queryset: QuerySet[Lock]) -> None:
        """Needs no question: a stale lock belongs to nobody, and the server looks again before it clears one."""
        locks = self._selected(request, queryset, 1)
        stale = [str(lock.key) for lock in locks if lock.seen.state is State.STALE]
        store, timeout = self._store(), get_settings().COMMAND_TIMEOUT
        cleared = [key for key in stale if upkeep.clear_stale(store, [key], upkeep.Which(), timeout).cleared]
        for key in cleared:
            self._log(request, key, _("Cleared: its lease was over."))
        if cleared:
            send(stale_locks_cleared, count=len(cleared), using=get_settings().DATABASE)
            text = ngettext("%d stale lock was cleared.", "%d stale locks were cleared.", len(cleared))
            self.message_user(request, text % len(cleared), messages.SUCCESS)
        if count := len(locks) - len(cleared):
            text = ngettext("%d lock was left: it is not stale.", "%d locks were left: they are not stale.", count)
            self.message_user(request, text % count, messages.WARNING)

    def _selected(self, request: HttpRequest, queryset: QuerySet[Lock], holders: int) -> Sequence[Lock]:
        """The first of the chosen locks, as they are now: a page that nobody could read confirms nothing."""
        chosen: Any = queryset
        if request.POST.get("select_across") != "1":  # they may have left the filter since the list was shown
            chosen = self.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))
        timeout = get_settings().COMMAND_TIMEOUT
        locks = list(chosen.order_by("key").survey(limit=release.MOST + 1, holders=holders, timeout=timeout))
        if len(locks) > release.MOST:
            text = _("Only the first %d of the selected locks are dealt with. Do it again for the others.")
            self.message_user(request, text % release.MOST, messages.WARNING)
        return locks[: release.MOST]

    def _store(self) -> MongoStore:
        return mongo_store()

    def _log(self, request: HttpRequest, key: str, text: str) -> None:
        self.log_change(request, Lock(key=key), text)


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (" …" if len(keys) > 5 else "")


def _quote(key: str) -> str:
    return _DOTS.get(key) or str(quote(key))


def _unquote(object_id: str) -> str:
    """The key that `_quote` was given."""
    return next((key for key, quoted in _DOTS.items() if quoted == object_id), unquote(object_id))
