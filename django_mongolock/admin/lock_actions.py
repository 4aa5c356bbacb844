"""The actions on locks: to ask for a release, to force it, to clear stale locks. The first two show a page that says
what will happen to whom, and are done when that is confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.text_checks import tidy_fact
from ..inspection import operations
from ..inspection.display import lock_address
from ..inspection.happened import Happened
from ..inspection.snapshot import LockSnapshot, State
from ..models import Lock
from ..signals import send, stale_locks_cleared
from . import release
from .confirmation import ASK, FORCE, Kind, ReasonForm, Row, left_out, log_entry, report
from .pages import Pages, csrf, unless_away

#: How many holders one page shows; the others are not touched.
SHOWN: Final = 100


class LockActions(Pages):
    """The actions of the admin of locks, and their pages."""

    actions = ("ask_to_release", "force_release", "clear_stale")

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        """Whether this user may take a lock from its holder."""
        return request.user.has_perm("django_mongolock.force_release_lock")

    def has_ask_release_permission(self, request: HttpRequest) -> bool:
        """Whether this user may ask a holder for a release: also everyone who may force it."""
        asks = request.user.has_perm("django_mongolock.ask_release_lock")
        return asks or self.has_force_release_permission(request)

    @admin.action(
        description=gettext_lazy("Ask the holders to release the selected locks"), permissions=["ask_release"]
    )
    def ask_to_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Show the holders of each lock, and ask for a reason."""
        return self._question(request, ASK, self._selected(request, queryset, SHOWN))

    @admin.action(description=gettext_lazy("Force the release of the selected locks"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Show the holders of each lock, and ask for a reason and a confirmation."""
        return self._question(request, FORCE, self._selected(request, queryset, SHOWN))

    @admin.action(description=gettext_lazy("Clear the selected stale locks"), permissions=["force_release"])
    def clear_stale(self, request: HttpRequest, queryset: QuerySet[Lock]) -> None:
        """Needs no confirmation: a stale lock has no holder, and the server looks again before it clears one."""
        locks = self._selected(request, queryset, 1)
        stale = [lock.key for lock in locks if lock.state is State.STALE]
        store, timeout = mongo_store(), get_settings().COMMAND_TIMEOUT
        cleared = [key for key in stale if operations.clear_stale(store, [key], operations.Which(), timeout).cleared]
        for key in cleared:
            self._log(request, key, _("Cleared: its lease had ended."))
            if store.history is not None:
                store.history.note(key, Happened.CLEARED, {}, by=tidy_fact(request.user.get_username()))
        if cleared:
            send(stale_locks_cleared, count=len(cleared), using=get_settings().DATABASE)
            text = ngettext("%d stale lock was cleared.", "%d stale locks were cleared.", len(cleared))
            self.message_user(request, text % len(cleared), messages.SUCCESS)
        if count := len(locks) - len(cleared):
            text = ngettext(
                "%d lock was skipped because it is not stale.",
                "%d locks were skipped because they are not stale.",
                count,
            )
            self.message_user(request, text % count, messages.WARNING)

    @csrf
    @unless_away
    def ask_to_release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask the holders that were shown."""
        return self._answer(request, ASK, self.has_ask_release_permission(request))

    @csrf
    @unless_away
    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Take the locks from the holders that were shown."""
        return self._answer(request, FORCE, self.has_force_release_permission(request))

    def way_back(self, request: HttpRequest) -> str:
        """The list, with its filters; or the page of the lock where the action began."""
        if back := request.POST.get("back") or request.GET.get("key"):
            return lock_address(back, self.admin_site.name)
        address = reverse("admin:django_mongolock_lock_changelist", current_app=self.admin_site.name)
        filters = request.POST["filters"] if "filters" in request.POST else request.GET.urlencode()
        return f"{address}?{filters}" if filters else address

    def _question(
        self, request: HttpRequest, kind: Kind, locks: Sequence[LockSnapshot], form: ReasonForm | None = None
    ) -> HttpResponse | None:
        """The page that asks for confirmation; None if none of these locks is held."""
        held = [lock for lock in locks if lock.state in kind.states]
        if not held:
            self.message_user(request, _("None of the selected locks is held now."), messages.WARNING)
            return None
        context = {
            "title": kind.title,
            "kind": kind.name,
            "all_kept": all(lock.state is State.KEPT for lock in held),
            "rows": [Row(lock, chooses=len(held) == 1 and len(lock.tokens) > 1) for lock in held],
            "left_out": list(left_out(kind, locks)),
            "filters": request.POST.get("filters") or request.GET.urlencode(),
            "back": request.POST.get("back") or request.GET.get("key", ""),
            "way_back": self.way_back(request),
            "form": form or ReasonForm(kind),
        }
        return self.page(request, "confirmation", context)

    def _answer(self, request: HttpRequest, kind: Kind, may: bool) -> HttpResponse:
        """Do what was confirmed, to the holders that were shown; ask again if a required reason is missing."""
        if not (self.has_view_permission(request) and may):
            raise PermissionDenied
        asks = request.method == "GET" and "key" in request.GET
        if request.method != "POST" and not asks:
            return HttpResponseNotAllowed(["POST"])
        way_back = HttpResponseRedirect(self.way_back(request))
        if asks:
            one = self.get_queryset(request).filter(pk=request.GET["key"])
            return self._question(request, kind, self._read(one, SHOWN)) or way_back
        shown = release.read_shown(request.POST.getlist("lock"))
        if not shown:
            self.message_user(request, _("No holder was selected. Nothing was changed."), messages.WARNING)
            return way_back
        form = ReasonForm(kind, request.POST)
        if not form.is_valid():
            return self._question(request, kind, self._again(request, shown), form) or way_back
        by, reason = tidy_fact(request.user.get_username()), tidy_fact(form.cleaned_data["reason"])
        act = release.asking(by, _("%s, in the admin") % by, reason) if kind is ASK else release.forcing(by, reason)
        outcome = release.carry_out(shown, act)
        for key, tokens in outcome.done.items():
            self._log(request, key, log_entry(kind, tokens, reason))
        for level, text in report(kind, outcome):
            self.message_user(request, text, level)
        return way_back

    def _again(self, request: HttpRequest, shown: Mapping[str, Sequence[int]]) -> list[LockSnapshot]:
        """The same locks as they are now, but only with the holders that were shown: the user has read no others."""
        locks = []
        for lock in self._read(self.get_queryset(request).filter(pk__in=list(shown)), SHOWN):
            known = tuple(holder for holder in lock.holders if holder.token in shown[lock.key])
            locks += [replace(lock, holders=known, holding=len(known))] if known else []
        return locks

    def _selected(self, request: HttpRequest, queryset: QuerySet[Lock], holders: int) -> Sequence[LockSnapshot]:
        """The first of the selected locks as they are now: no person reads, and so confirms, a longer page."""
        if request.POST.get("select_across") != "1":  # they may have left the filter since the list was shown
            queryset = self.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))
        locks = self._read(queryset, holders)
        if len(locks) > release.MAX_SELECTED:
            text = _("Only the first %d of the selected locks were processed. Repeat the action for the others.")
            self.message_user(request, text % release.MAX_SELECTED, messages.WARNING)
        return locks[: release.MAX_SELECTED]

    def _read(self, queryset: Any, holders: int) -> list[LockSnapshot]:
        timeout = get_settings().COMMAND_TIMEOUT
        return list(
            queryset.order_by("key").snapshots(limit=release.MAX_SELECTED + 1, holders=holders, timeout=timeout)
        )

    def _log(self, request: HttpRequest, key: str, text: str) -> None:
        """Write into the log of the admin who did what to a lock."""
        self.log_change(request, Lock(key=key), text)
