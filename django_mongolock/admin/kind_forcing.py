"""Taking documents from their holders before they are stale: the page that asks, and what is done after it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from bson import json_util
from bson.errors import BSONError
from django.contrib import messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..engine.text_checks import tidy_fact
from ..exceptions import printable
from ..inspection.kinds import Choice, LockKind, Row, find_kind, kinds, still_there
from .confirmation import FORCE, ReasonForm
from .kind_rows import Shown, may_force, may_view
from .pages import Pages
from .release import MAX_SELECTED

#: Rows by their kind, as a page has shown them.
Chosen = list[tuple[LockKind, list[Row]]]


def ask(admin: Pages, request: HttpRequest) -> HttpResponse:
    """Show what would be released, and ask for a reason: of the selected documents, or of all of an owner."""
    _check_rights(request)
    if request.POST.get("force") == "owner":
        owner = request.POST.get("owner", "").strip()
        found = [(kind, kind.rows(Choice(owner=owner), MAX_SELECTED + 1)) for kind in kinds()]
        none = _("This owner holds no document now.")
    else:
        found = read_shown(request.POST.getlist("document"))
        none = _("No document was selected. Nothing was changed.")
    return question(admin, request, found) or _back(admin, request, none)


def question(admin: Pages, request: HttpRequest, shown: Chosen, form: ReasonForm | None = None) -> HttpResponse | None:
    """The page that asks for confirmation, about the documents as they are now; None if there are none to release."""
    held = [Shown(kind, row) for kind, rows in shown for row in still_there(kind, rows)]
    if not held:
        return None
    context = {"title": FORCE.title, "form": form or ReasonForm(FORCE), "way_back": _list(admin)}
    more = {"rows": held[:MAX_SELECTED], "more": len(held) > MAX_SELECTED}
    return admin.page(request, "documents_confirmation", context | more)


def force_view(admin: Pages, request: HttpRequest) -> HttpResponse:
    """Release the documents that were shown, if they still have the holders that were shown."""
    _check_rights(request)
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    shown = read_shown(request.POST.getlist("document"))
    form = ReasonForm(FORCE, request.POST)
    if not form.is_valid():
        none = _("None of the selected documents is held now.")
        return question(admin, request, shown, form) or _back(admin, request, none)
    by, reason = tidy_fact(request.user.get_username()), tidy_fact(form.cleaned_data["reason"])
    taken = 0
    for kind, rows in shown:
        done = kind.force(still_there(kind, rows), by=by, reason=reason)
        taken += len(done)
        _log(admin, request, kind, done, reason)
    if taken:
        text = ngettext("%d document was taken from its holder.", "%d documents were taken from their holders.", taken)
        admin.message_user(request, text % taken, messages.SUCCESS)
    if left := sum(len(rows) for _kind, rows in shown) - taken:
        text = ngettext(
            "%d document was not changed because it has another holder now, or none.",
            "%d documents were not changed because they have other holders now, or none.",
            left,
        )
        admin.message_user(request, text % left, messages.WARNING)
    return HttpResponseRedirect(_list(admin))


def read_shown(values: Sequence[str]) -> Chosen:
    """Read the documents of a form. Raises BadRequest for values that no form of ours has."""
    if len(values) > MAX_SELECTED:
        raise BadRequest("too many documents")
    found: dict[str, tuple[LockKind, list[Row]]] = {}
    for value in values:
        try:
            name, text, holder = json.loads(value)
            kind = find_kind(name)
            if holder is not None:
                str.encode(holder)  # any text: another program wrote it
            row = Row(kind.check_id(json_util.loads(text)), holder=holder)
        except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError, BSONError):
            raise BadRequest("not a document") from None
        found.setdefault(name, (kind, []))[1].append(row)
    return list(found.values())


def _check_rights(request: HttpRequest) -> None:
    if not (may_view(request) and may_force(request)):
        raise PermissionDenied


def _list(admin: Pages) -> str:
    return reverse("admin:django_mongolock_lock_documents", current_app=admin.admin_site.name)


def _back(admin: Pages, request: HttpRequest, text: str) -> HttpResponse:
    admin.message_user(request, text, messages.WARNING)
    return HttpResponseRedirect(_list(admin))


def _log(admin: Pages, request: HttpRequest, kind: LockKind, done: Iterable[Row], reason: str) -> None:
    """Write into the log of the admin who did what to an instance; documents without a model have no such log."""
    if kind.model is None:
        return
    rows: Any = kind.model._base_manager.using(kind.alias)
    for each in done:  # one by one: a document may have megabytes
        if (instance := rows.filter(pk=each.id).first()) is not None:
            text = _("Forced its release; it was held by %(holder)s. Reason: %(reason)s")
            admin.log_change(request, instance, text % {"holder": printable(each.holder), "reason": printable(reason)})
