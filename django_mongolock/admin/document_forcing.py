"""Taking documents from their holders before they are stale: the page that asks, and what is done after it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bson import json_util
from bson.errors import BSONError
from django.contrib import messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..documents import DocumentLock, DocumentSnapshot, declared
from ..documents.document_lock import find_lock
from ..engine.text_checks import tidy_fact
from ..exceptions import printable
from .confirmation import FORCE, ReasonForm
from .document_permissions import may_force, may_view
from .document_rows import Shown
from .pages import Pages
from .release import MAX_SELECTED


def ask(admin: Pages, request: HttpRequest) -> HttpResponse:
    """Show what would be released, and ask for a reason: of the selected documents, or of all of an owner."""
    if not (may_view(request) and may_force(request)):
        raise PermissionDenied
    owner = request.POST.get("owner", "").strip()
    if request.POST.get("force") == "owner":
        found = [Shown(lock, each) for lock in declared() for each in lock.owned_by(owner)[: MAX_SELECTED + 1]]
        none = _("This owner holds no document now.")
    else:
        found = read_shown(request.POST.getlist("document"))
        none = _("No document was selected. Nothing was changed.")
    return question(admin, request, found) or _back(admin, request, none)


def question(
    admin: Pages, request: HttpRequest, shown: Sequence[Shown], form: ReasonForm | None = None
) -> HttpResponse | None:
    """The page that asks for confirmation, about the documents as they are now; None if there are none to release."""
    held = [row for row in _as_they_are(shown[:MAX_SELECTED]) if row.document.holder]
    if not held:
        return None
    context = {"title": FORCE.title, "rows": held, "form": form or ReasonForm(FORCE), "way_back": _list(admin)}
    context["more"] = len(shown) > MAX_SELECTED
    return admin.page(request, "documents_confirmation", context)


def force_view(admin: Pages, request: HttpRequest) -> HttpResponse:
    """Release the documents that were shown, if they still have the holders that were shown."""
    if not (may_view(request) and may_force(request)):
        raise PermissionDenied
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    shown = read_shown(request.POST.getlist("document"))
    form = ReasonForm(FORCE, request.POST)
    if not form.is_valid():
        return question(admin, request, shown, form) or _back(admin, request, _nothing_held())
    by, reason = tidy_fact(request.user.get_username()), tidy_fact(form.cleaned_data["reason"])
    taken = 0
    for lock, documents in _by_lock(_as_they_are(shown)):
        done = lock.force_release(documents, by=by, reason=reason)
        taken += len(done)
        _log(admin, request, lock, done, reason)
    if taken:
        text = ngettext("%d document was taken from its holder.", "%d documents were taken from their holders.", taken)
        admin.message_user(request, text % taken, messages.SUCCESS)
    if left := len(shown) - taken:
        text = ngettext(
            "%d document was not changed because it has another holder now, or none.",
            "%d documents were not changed because they have other holders now, or none.",
            left,
        )
        admin.message_user(request, text % left, messages.WARNING)
    return HttpResponseRedirect(_list(admin))


def read_shown(values: Iterable[str]) -> list[Shown]:
    """Read the documents of a form. Raises BadRequest for values that no form of ours has."""
    found: list[Shown] = []
    for value in values:
        try:
            name, text, holder = json.loads(value)
            lock = find_lock(name)
            id_ = lock.check_id(json_util.loads(text))
            document = DocumentSnapshot(id_, 0, _as_stored(holder), None, None, None, 0.0)
            found.append(Shown(lock, document))
        except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError, BSONError):
            raise BadRequest("not a document") from None
    if len(found) > MAX_SELECTED:
        raise BadRequest("too many documents")
    return found


def _as_stored(holder: str | None) -> str | None:
    """The holder of a form, which may be any text: another program wrote it. Raises TypeError, ValueError."""
    if holder is not None:
        str.encode(holder)
    return holder


def _by_lock(shown: Iterable[Shown]) -> list[tuple[DocumentLock[Any], list[DocumentSnapshot]]]:
    groups: dict[str, tuple[DocumentLock[Any], list[DocumentSnapshot]]] = {}
    for row in shown:
        groups.setdefault(row.lock.name, (row.lock, []))[1].append(row.document)
    return list(groups.values())


def _as_they_are(shown: Iterable[Shown]) -> Iterator[Shown]:
    """The documents as they are now, if they still have the holder that was shown."""
    for lock, documents in _by_lock(shown):
        holders = {each.id: each.holder for each in documents}
        for each in lock.at_work().with_ids(holders):
            if each.holder == holders.get(each.id):
                yield Shown(lock, each)


def _nothing_held() -> str:
    return _("None of the selected documents is held now.")


def _list(admin: Pages) -> str:
    return reverse("admin:django_mongolock_lock_documents", current_app=admin.admin_site.name)


def _back(admin: Pages, request: HttpRequest, text: str) -> HttpResponse:
    admin.message_user(request, text, messages.WARNING)
    return HttpResponseRedirect(_list(admin))


def _log(
    admin: Pages, request: HttpRequest, lock: DocumentLock[Any], done: Sequence[DocumentSnapshot], reason: str
) -> None:
    """Write into the log of the admin who did what to an instance; documents without a model have no such log."""
    if lock.model is None or not done:
        return
    for each in done:  # one by one: a document may have megabytes
        if (instance := lock.model._base_manager.using(lock.alias).filter(pk=each.id).first()) is not None:
            text = _("Forced its release; it was held by %(holder)s. Reason: %(reason)s")
            admin.log_change(request, instance, text % {"holder": printable(each.holder), "reason": printable(reason)})
