"""The page of all document locks: who holds which document, and since when."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect, JsonResponse
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..context import own_address
from ..documents import DocumentLock, declared
from ..documents.document_lock import find_lock
from ..documents.snapshot import as_rows
from ..documents.sweep import Swept
from ..engine.logs import INFO, log
from ..exceptions import LockBackendFailed
from .document_forcing import ask
from .document_permissions import may_clear, may_force, may_view
from .document_rows import Choice, Section, Shown
from .pages import Pages


def view(admin: Pages, request: HttpRequest) -> HttpResponse:
    """The page: GET shows the documents, POST releases the stale ones of a lock, or asks before a forced release.

    JSON without HTML in Accept. A lock that fails does not hide the others; raises LockBackendFailed if all of them do.
    """
    if not may_view(request):
        raise PermissionDenied
    for_programs = not request.accepts("text/html")
    if request.method == "POST":
        if "force" in request.POST:
            return ask(admin, request)
        return _clear(request, for_programs=for_programs)
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
    choice = Choice(request)
    sections = [choice.section(lock) for lock in choice.locks]
    errors = [section.error for section in sections if isinstance(section.error, LockBackendFailed)]
    nothing = bool(errors) and len(errors) == len(sections)
    if for_programs:
        found = {"documents": [section.as_json() for section in sections]}
        return JsonResponse(found, status=503 if nothing else 200)
    if nothing:
        raise errors[0]
    context = {
        "title": _("Documents"),
        "sections": [_with_addresses(admin, request, section) for section in sections],
        "choice": choice,
        "may_force": may_force(request),
        "may_clear": may_clear(request),
        "declared": bool(declared()),
    }
    return admin.page(request, "documents", context)


def _with_addresses(admin: Pages, request: HttpRequest, section: Section) -> Section:
    rows = [
        Shown(section.lock, document, _page_of(admin, request, section.lock, document.id))
        for document in section.documents
    ]
    return Section(section.lock, section.documents, section.more, section.error, rows)


def _page_of(admin: Pages, request: HttpRequest, lock: DocumentLock[Any], id_: Any) -> str:
    """The address of the document in the admin of its model; "" if there is none that this user may see."""
    registered = admin.admin_site._registry.get(lock.model) if lock.model is not None else None
    if registered is None or not registered.has_view_permission(request):
        return ""
    name = f"admin:{registered.opts.app_label}_{registered.opts.model_name}_change"
    try:
        return reverse(name, args=(quote(id_),), current_app=admin.admin_site.name)
    except NoReverseMatch:
        return ""


# Releasing the stale


def _clear(request: HttpRequest, *, for_programs: bool) -> HttpResponse:
    if not may_clear(request):
        raise PermissionDenied
    lock = _find(request.POST.get("lock", ""))
    swept = lock.clear_stale()
    for document in swept.cleared:
        log(INFO, "document released", document=document.id, lock=lock.name, by=request.user.get_username())
    if for_programs:
        return JsonResponse({"lock": lock.name, "cleared": swept.count, "stale": list(as_rows(swept.cleared))})
    report_cleared(request, lock, swept)
    return HttpResponseRedirect(own_address(request))


def report_cleared(request: HttpRequest, lock: DocumentLock[Any], swept: Swept) -> None:
    """Show the result as messages."""
    text = ngettext(
        "%(count)d stale document of “%(lock)s” was released.",
        "%(count)d stale documents of “%(lock)s” were released.",
        swept.count,
    )
    level = messages.SUCCESS if swept.count else messages.WARNING
    messages.add_message(request, level, text % {"count": swept.count, "lock": lock.name})
    if swept.damaged:
        text = ngettext(
            "%d damaged document was not changed.", "%d damaged documents were not changed.", len(swept.damaged)
        )
        messages.add_message(request, messages.ERROR, text % len(swept.damaged))


def _find(name: str) -> DocumentLock[Any]:
    try:
        return find_lock(name)
    except LookupError:
        raise BadRequest("no such document lock") from None
