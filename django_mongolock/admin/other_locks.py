"""The page of the locks of other kinds, such as document locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..context import own_address
from ..engine.logs import INFO, log
from ..exceptions import LockError, printable
from ..inspection.kinds import UNREADABLE, Choice, LockKind, Row, Swept, other_kinds
from ..inspection.snapshot import ShownState
from .confirmation import FORCE, MAX_SELECTED, Shown, read_shown
from .lock_actions import LockActions, may_clear, may_force
from .pages import unless_away

#: The number of rows of each kind on the page, and the number if the page shows one kind.
SHOWN: Final = 20
SHOWN_OF_ONE: Final = 100

STATES: Final = {
    "all": gettext_lazy("All"),
    "held": gettext_lazy("Held"),
    "stale": gettext_lazy("Stale"),
    "damaged": gettext_lazy("Damaged"),
}


@dataclass(frozen=True)
class Section:
    """The rows of one kind that the page shows.

    - error: reason why the rows could not be read.
    """

    kind: LockKind
    rows: Sequence[Shown] = ()
    more: bool = False
    error: LockError | ImproperlyConfigured | None = None

    @property
    def has_stale(self) -> bool:
        return any(shown.row.state is ShownState.STALE for shown in self.rows)


class OtherLocks(LockActions):
    """The page of other locks in the admin of locks."""

    @unless_away
    def others_view(self, request: HttpRequest) -> HttpResponse:
        """Show the locks of other kinds (GET), release the stale ones of a kind, or ask before a forced release (POST).

        A kind that fails does not hide the others. If all kinds fail, the view raises one of their errors.
        """
        if not self.may_view(request, ()):
            raise PermissionDenied
        if request.method == "POST":
            return self._ask(request) if "force" in request.POST else self._clear(request)
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
        name, state = request.GET.get("kind", ""), request.GET.get("state")
        choice = Choice(state if state in STATES else "all", request.GET.get("owner", "").strip() or None)
        declared, most = other_kinds(), SHOWN_OF_ONE if name else SHOWN
        sections = [self._section(request, choice, kind, most) for kind in declared if name in ("", kind.name)]
        errors = [section.error for section in sections if section.error]
        if errors and len(errors) == len(sections):
            raise errors[0]
        context = {
            "title": _("Locks of other kinds"),
            "sections": sections,
            "choice": choice,
            "kind": name,
            "states": STATES,
        }
        rights = {"may_force": may_force(request), "may_clear": may_clear(request)}
        return self.page(request, "others", {**context, "declared": bool(declared), **rights})

    def _section(self, request: HttpRequest, choice: Choice, kind: LockKind, most: int) -> Section:
        """Read the first rows of a kind."""
        try:
            found = list(kind.rows(choice, most + 1))
        except UNREADABLE as error:
            return Section(kind, error=error)
        rows = [Shown(kind, row, self._address(request, kind, row.key)) for row in found[:most]]
        return Section(kind, rows, more=len(found) > most)

    def _address(self, request: HttpRequest, kind: LockKind, id_: Any) -> str:
        """Return the address of the document in the admin of its model, "" if this user may see no such page."""
        registered = self.admin_site._registry.get(kind.model) if kind.model is not None else None
        if registered is None or not registered.has_view_permission(request):
            return ""
        name = f"admin:{registered.opts.app_label}_{registered.opts.model_name}_change"
        try:
            return reverse(name, args=(quote(id_),), current_app=self.admin_site.name)
        except NoReverseMatch:
            return ""

    def _ask(self, request: HttpRequest) -> HttpResponse:
        """Show the locks to be released, and ask for a reason. These are the selected locks, or all of an owner."""
        if not may_force(request):
            raise PermissionDenied
        rows, changed = list[tuple[LockKind, Row]](), list[str]()
        if request.POST["force"] == "owner":
            choice = Choice(owner=request.POST.get("owner", "").strip())
            for kind in other_kinds():
                try:
                    rows += [(kind, row) for row in kind.rows(choice, MAX_SELECTED + 1)]
                except UNREADABLE as error:  # a failed kind does not hide the others
                    self.message_user(request, printable(f"{kind.name}: {error}"), messages.ERROR)
        else:
            rows, changed = read_shown(request.POST.getlist("lock"))
        if not self.may_view(request, [kind for kind, _row in rows]):
            raise PermissionDenied
        return self.question(request, FORCE, rows, changed) or HttpResponseRedirect(own_address(request))

    def _clear(self, request: HttpRequest) -> HttpResponse:
        if not may_clear(request):
            raise PermissionDenied
        kind = next((kind for kind in other_kinds() if kind.name == request.POST.get("kind")), None)
        if kind is None:
            raise BadRequest("no such kind of locks")
        done = Swept()
        choice = Choice("stale", request.POST.get("owner") or None)
        for part in kind.clear(choice, dry_run=False):
            done.count_in(part)
            for row in part.cleared:
                log(INFO, "document released", document=row.key, lock=kind.name, by=request.user.get_username())
        report_cleared(request, kind.name, done)
        return HttpResponseRedirect(own_address(request))


def report_cleared(request: HttpRequest, name: str, swept: Swept) -> None:
    """Show the result as messages."""
    text = ngettext(
        "%(count)d stale lock of “%(kind)s” was released.",
        "%(count)d stale locks of “%(kind)s” were released.",
        swept.count,
    )
    level = messages.SUCCESS if swept.count else messages.WARNING
    messages.add_message(request, level, text % {"count": swept.count, "kind": name})
    if swept.damaged:
        text = ngettext(
            "%d damaged document was not changed.", "%d damaged documents were not changed.", len(swept.damaged)
        )
        messages.add_message(request, messages.ERROR, text % len(swept.damaged))
