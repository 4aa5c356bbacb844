"""Releasing stale documents in the admin: a page of all document locks, and an action for the admin of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin, messages
from django.core import checks
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect, JsonResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..documents import DocumentLock, StaleDocument, declared
from ..documents.document_lock import find_lock
from ..documents.sweep import Swept, as_rows
from ..engine.logs import INFO, log
from ..exceptions import LockBackendFailed, LockError
from .pages import Pages

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = object

PERMISSION: Final = "django_mongolock.clear_document_lock"
#: How many documents of one lock the page shows, and how many one action releases at most.
SHOWN: Final = 20
MAX_CLEARED_AT_ONCE: Final = 1_000


def may_clear(request: HttpRequest) -> bool:
    """Whether this user may release stale documents."""
    return request.user.has_perm(PERMISSION)


@dataclass(frozen=True)
class Row:
    """The documents of one lock that the page shows. error: why they could not be read."""

    lock: DocumentLock[Any]
    stale: list[StaleDocument]
    damaged: list[StaleDocument]
    more: bool
    error: LockError | None = None

    def as_json(self) -> dict[str, Any]:
        """The row for programs."""
        return {
            "lock": self.lock.name,
            "stale": list(as_rows(self.stale)),
            "damaged": list(as_rows(self.damaged)),
            "more": self.more,
            "error": None if self.error is None else str(self.error),
        }


def _row(lock: DocumentLock[Any]) -> Row:
    try:
        found = lock.stale(limit=SHOWN + 1)
    except LockError as error:
        return Row(lock, [], [], more=False, error=error)
    shown, more = found[:SHOWN], len(found) > SHOWN
    stale = [document for document in shown if not document.damage]
    return Row(lock, stale, [document for document in shown if document.damage], more)


def view(admin: Pages, request: HttpRequest) -> HttpResponse:
    """The page: GET shows the stale documents of every lock, POST releases those of one. JSON without HTML in Accept.

    A lock that fails does not hide the others. Raises LockBackendFailed if all of them fail.
    """
    if not may_clear(request):
        raise PermissionDenied
    for_programs = not request.accepts("text/html")
    if request.method == "POST":
        return _clear(request, for_programs=for_programs)
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
    found = [_row(lock) for lock in declared()]
    errors = [row.error for row in found if isinstance(row.error, LockBackendFailed)]
    nothing = bool(errors) and len(errors) == len(found)
    if for_programs:
        return JsonResponse({"documents": [row.as_json() for row in found]}, status=503 if nothing else 200)
    if nothing:
        raise errors[0]
    return admin.page(request, "documents", {"title": _("Stale documents"), "rows": found})


def _clear(request: HttpRequest, *, for_programs: bool) -> HttpResponse:
    try:
        lock = find_lock(request.POST.get("lock", ""))
    except LookupError:
        raise BadRequest("no such document lock") from None
    swept = lock.clear_stale()
    for document in swept.cleared:
        log(INFO, "document released", document=document.id, lock=lock.name, by=request.user.get_username())
    if for_programs:
        return JsonResponse({"lock": lock.name, "cleared": swept.count, "stale": list(as_rows(swept.cleared))})
    tell(request, lock, swept)
    return HttpResponseRedirect(request.path)


def tell(request: HttpRequest, lock: DocumentLock[Any], swept: Swept) -> None:
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


class DocumentLockAdminMixin(ModelAdmin):
    """For the admin of a model that has a `DocumentLock`: an action that releases the selected documents if stale.

    Put it before ModelAdmin, and set `document_lock`. Where you set `actions` yourself, name
    "clear_stale_documents" among them. It needs the permission ``django_mongolock.clear_document_lock``.
    """

    document_lock: DocumentLock[Any]
    actions = ("clear_stale_documents",)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also that `document_lock` is the lock of this very model."""
        found: list[checks.CheckMessage] = super().check(**kwargs)
        lock = getattr(self, "document_lock", None)
        place = lock.model if isinstance(lock, DocumentLock) else None
        if place is None or place._meta.concrete_model is not self.model._meta.concrete_model:
            message = f"The document_lock of {type(self).__name__} is not a DocumentLock of {self.model._meta.label}."
            hint = "Set it to the lock that you declared beside the model: document_lock = ad_exports."
            found.append(checks.Error(message, hint=hint, obj=type(self), id="mongolock.E017"))
        return found

    def has_clear_document_lock_permission(self, request: HttpRequest) -> bool:
        """Whether this user may release stale documents."""
        return may_clear(request)

    @admin.action(
        description=gettext_lazy("Release the selected documents if their lock is stale"),
        permissions=["clear_document_lock"],
    )
    def clear_stale_documents(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Needs no confirmation: the server looks again before it releases one, and an active holder keeps its lock."""
        keys = list(queryset.values_list("pk", flat=True)[: MAX_CLEARED_AT_ONCE + 1])
        try:
            swept = self.document_lock.clear_stale(keys[:MAX_CLEARED_AT_ONCE])
        except LockError as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        for document in swept.cleared:
            instance = queryset.model(pk=document.id)
            self.log_change(request, instance, _("Released: %s held it for too long.") % document.holder)
        tell(request, self.document_lock, swept)
        if len(keys) > MAX_CLEARED_AT_ONCE:
            text = _("Only the first %d of the selected documents were processed. Repeat the action for the others.")
            self.message_user(request, text % MAX_CLEARED_AT_ONCE, messages.WARNING)
