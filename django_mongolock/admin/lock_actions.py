"""The actions on locks: ask for a release, force it, clear stale locks.

The first two actions show a page with the consequences for each holder. They are carried out when the user confirms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Unpack

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..backends import mongo_store
from ..conf import get_settings
from ..engine.text_checks import tidy_fact
from ..exceptions import LockDocumentDamaged, printable
from ..inspection import operations
from ..inspection.display import duration, lock_address, sentence
from ..inspection.kinds import UNREADABLE, LockKind, Row
from ..inspection.named_locks import LockRow, NamedLocks, row_of
from ..inspection.queries import Bounds
from ..inspection.snapshot import LockSnapshot, ShownState
from ..models import Lock
from ..signals import send, stale_locks_cleared
from .confirmation import (
    ASK,
    FORCE,
    MAX_SELECTED,
    Action,
    ReasonForm,
    Rows,
    Shown,
    left_out,
    log_entry,
    read_shown,
    report,
)
from .pages import Pages, unless_away

#: The number of holders, and of waiters, that one page shows. The actions do not touch other holders.
SHOWN: Final = 100
NAMED: Final = NamedLocks()


def may_force(request: HttpRequest) -> bool:
    """Return whether this user may take a lock from its holder."""
    return request.user.has_perm("django_mongolock.force_release_lock")


def may_clear(request: HttpRequest) -> bool:
    """Return whether this user may release stale locks. Everyone who may force a release may do this too."""
    return request.user.has_perm("django_mongolock.clear_document_lock") or may_force(request)


class LockActions(Pages):
    """The actions of the admin of locks, and their pages."""

    actions = ("ask_to_release", "force_release", "clear_stale")

    has_force_release_permission = staticmethod(may_force)

    def has_ask_release_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may ask a holder for a release. Everyone who may force a release may do this too."""
        asks = request.user.has_perm("django_mongolock.ask_release_lock")
        return asks or self.has_force_release_permission(request)

    def may_view(self, request: HttpRequest, kinds: Iterable[LockKind]) -> bool:
        """Return whether this user may see the holders of locks of these kinds.

        Users who may clear stale locks may also see the holders of kinds other than named locks.
        """
        others = not any(isinstance(kind, NamedLocks) for kind in kinds)
        clears = request.user.has_perm("django_mongolock.clear_document_lock")
        return self.has_view_permission(request) or (others and clears)

    @admin.action(
        description=gettext_lazy("Ask the holders to release the selected locks"), permissions=["ask_release"]
    )
    def ask_to_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Show the holders of each lock, and ask for a reason."""
        return self.question(request, ASK, _rows(self._selected(request, queryset, SHOWN)))

    @admin.action(description=gettext_lazy("Force the release of the selected locks"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse | None:
        """Show the holders of each lock, and ask for a reason and a confirmation."""
        return self.question(request, FORCE, _rows(self._selected(request, queryset, SHOWN)))

    @admin.action(description=gettext_lazy("Clear the selected stale locks"), permissions=["force_release"])
    def clear_stale(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse:
        """Clear the selected stale locks without a confirmation.

        A stale lock has no holder, and the server checks again before it clears one.
        """
        store, timeout = mongo_store(), get_settings().COMMAND_TIMEOUT

        def clear(kind: LockKind, row: Row) -> str:
            if row.state is not ShownState.STALE or not operations.clear_stale(store, [row.key], timeout=timeout)[0]:
                return ""
            return _("Cleared: its lease had ended.")

        cleared, skipped = self._each(request, _rows(self._selected(request, queryset, 1)), clear)
        if cleared:
            send(stale_locks_cleared, count=cleared, using=get_settings().DATABASE)
            text = ngettext("%d stale lock was cleared.", "%d stale locks were cleared.", cleared)
            self.message_user(request, text % cleared, messages.SUCCESS)
        if count := len(skipped):
            text = ngettext(
                "%d lock was skipped because it is not stale.",
                "%d locks were skipped because they are not stale.",
                count,
            )
            self.message_user(request, text % count, messages.WARNING)
        return HttpResponseRedirect(self.way_back(request))

    @unless_away
    def ask_to_release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask the holders that were shown."""
        return self._answer(request, ASK, self.has_ask_release_permission(request))

    @unless_away
    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Take the locks of any kind from the holders that were shown."""
        return self._answer(request, FORCE, self.has_force_release_permission(request))

    def way_back(self, request: HttpRequest, rows: Sequence[tuple[LockKind, Row]] = ()) -> str:
        """Return the address of the page to go back to.

        The page is the lock where the action began, else the list with its filters, else the list of other kinds.
        """
        if back := request.POST.get("back") or request.GET.get("key"):
            return lock_address(back, self.admin_site.name)
        site = self.admin_site.name
        named = all(isinstance(kind, NamedLocks) for kind, _row in rows)
        if not named or not self.has_view_permission(request):
            return reverse("admin:django_mongolock_lock_others", current_app=site)
        address = reverse("admin:django_mongolock_lock_changelist", current_app=site)
        filters = request.POST["filters"] if "filters" in request.POST else request.GET.urlencode()
        return f"{address}?{filters}" if filters else address

    def question(
        self,
        request: HttpRequest,
        action: Action,
        rows: Rows,
        changed: Sequence[str] = (),
        form: ReasonForm | None = None,
    ) -> HttpResponse | None:
        """Return the page that asks for confirmation, or None if none of these locks is held.

        - changed: keys of the locks with other holders.
        """
        held = [(kind, row) for kind, row in rows if action.meets(kind, row)]
        for level, text in report(action, 0, changed):
            self.message_user(request, text, level)
        if not held:
            if not changed:
                self.message_user(request, _("Nothing was changed: none of these locks is held now."), messages.WARNING)
            return None
        shown = held[:MAX_SELECTED]
        locks = [row.lock for _kind, row in shown if isinstance(row, LockRow)]
        named = len(locks) == len(shown)
        context = {
            "title": action.title,
            "action": action.name,
            "may_ask": action is FORCE,
            "holding": sum(lock.holding for lock in locks),
            "renewal": duration(max((lock.lease for lock in locks), default=0.0) / 3),
            "all_kept": all(row.state is ShownState.KEPT for _kind, row in held),
            "rows": [Shown(kind, row, chooses=named and len(held) == 1 and len(row.seal) > 1) for kind, row in shown],
            "more": len(held) > MAX_SELECTED,
            "left_out": list(left_out(action, rows)),
            "filters": request.POST.get("filters") or request.GET.urlencode(),
            "back": request.POST.get("back") or request.GET.get("key", ""),
            "way_back": self.way_back(request, held),
            "form": form or ReasonForm(action),
        }
        return self.page(request, "confirmation" if named else "others_confirmation", context)

    def _answer(self, request: HttpRequest, action: Action, may: bool) -> HttpResponse:
        """Carry out the confirmed action on the holders that were shown. If a required reason is missing, ask again."""
        if not may or not self.may_view(request, ()):
            raise PermissionDenied
        if request.method == "GET" and "key" in request.GET:
            one = self.read(self.get_queryset(request).filter(pk=request.GET["key"]), holders=SHOWN)
            rows, changed = _rows(one), list[str]()
        elif request.method == "POST":
            rows, changed = read_shown(request.POST.getlist("lock"), named=action is ASK)
        else:
            return HttpResponseNotAllowed(["POST"])
        if not self.may_view(request, [kind for kind, _row in rows]):
            raise PermissionDenied
        way_back = HttpResponseRedirect(self.way_back(request, rows))
        if request.method == "GET":
            return self.question(request, action, rows) or way_back
        if not rows and not changed:
            self.message_user(request, _("No holder was selected. Nothing was changed."), messages.WARNING)
            return way_back
        form = ReasonForm(action, request.POST)
        if not form.is_valid():
            return self.question(request, action, rows, changed, form) or way_back
        self._carry_out(request, action, rows, changed, tidy_fact(form.cleaned_data["reason"]))
        return way_back

    def _carry_out(self, request: HttpRequest, action: Action, rows: Rows, changed: list[str], reason: str) -> None:
        """Carry out the action, log it, and tell the user."""
        by = tidy_fact(request.user.get_username())
        where = _("%s, in the admin") % by
        requested_by = tidy_fact(f"{where}: {reason}" if reason else where)

        def act(kind: LockKind, row: Row) -> str:
            if action is ASK:
                acted = NAMED.ask(row, requested_by, by=by, reason=reason) > 0
            else:
                acted = bool(kind.force([row], by=by, reason=reason))
            return log_entry(action, row, reason) if acted else ""

        done, left = self._each(request, rows, act)
        for level, text in report(action, done, [*changed, *left]):
            self.message_user(request, text, level)

    def _each(self, request: HttpRequest, rows: Rows, act: Callable[[LockKind, Row], str]) -> tuple[int, list[str]]:
        """Call *act* on each lock and write its text into the log of the admin.

        Return the number of locks with a text, and the keys of the locks without one. An empty text means that nothing
        was done.
        """
        done, left = 0, list[str]()
        try:
            for kind, row in rows:
                try:
                    said = act(kind, row)
                except LockDocumentDamaged as error:
                    text = _("The document of “%(key)s” is damaged, and was not changed: %(problem)s")
                    self.message_user(
                        request, text % {"key": printable(row.key), "problem": printable(error.problem)}, messages.ERROR
                    )
                    continue
                if not said:
                    left.append(str(row.key))
                    continue
                done += 1
                if kind.model is not None:  # a kind without a model has no such log
                    write_log(request, kind.model, row.key, said)
        except UNREADABLE as error:
            text = _("The remaining locks were not processed: %s") % sentence(getattr(error, "problem", error))
            self.message_user(request, text, messages.ERROR)
        return done, left

    def _selected(self, request: HttpRequest, queryset: Any, holders: int) -> Sequence[LockSnapshot]:
        """Return the first of the selected locks as they are now. Nobody reads a longer page before confirming it."""
        if request.POST.get("select_across") != "1":  # locks may have left the filter since then
            queryset = self.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))
        locks = self.read(queryset.order_by("key"), limit=MAX_SELECTED + 1, holders=holders)
        if len(locks) > MAX_SELECTED:
            text = _("Only the first %d of the selected locks were processed. Repeat the action for the others.")
            self.message_user(request, text % MAX_SELECTED, messages.WARNING)
        return locks[:MAX_SELECTED]

    def read(self, queryset: Any, **bounds: Unpack[Bounds]) -> list[LockSnapshot]:
        """Read these locks, and the locks that their holders wait for."""
        return list(NAMED.with_obstacles(queryset.snapshots(timeout=get_settings().COMMAND_TIMEOUT, **bounds)))


def write_log(request: HttpRequest, model: type[Model], key: Any, text: str) -> None:
    """Record in the log of the admin that the user changed the instance with this key.

    The instance is not read. It may be large, or deleted by now.
    """
    LogEntry.objects.create(
        user_id=str(request.user.pk),
        content_type=get_content_type_for_model(model),
        object_id=str(key),
        object_repr=printable(key)[:200],
        action_flag=CHANGE,
        change_message=text,
    )


def _rows(locks: Iterable[LockSnapshot]) -> Rows:
    return [(NAMED, row_of(lock)) for lock in locks]
