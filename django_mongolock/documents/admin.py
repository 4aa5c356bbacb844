"""The admin of a model that has a document lock. Its form shows the lock, and actions release documents."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin, messages
from django.core import checks
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..admin.confirmation import FORCE, MAX_SELECTED
from ..admin.lock_actions import LockActions, may_clear, may_force, write_log
from ..admin.other_locks import report_cleared
from ..exceptions import LockError, printable
from ..models import Lock
from .document_lock import DocumentLock
from .kind import DocumentKind

__all__ = ["DocumentLockAdminMixin"]

#: The most documents that one action releases.
MAX_CLEARED_AT_ONCE: Final = 1_000


class DocumentLockAdminMixin(admin.ModelAdmin):  # type: ignore[type-arg]
    """The admin mixin for a model that has a `DocumentLock`.

    The fields of the lock are read-only. Actions release the selected documents if they are stale, or by force after a
    question. A save raises the version. Work on the document that is under way then ends in its failed state, and is
    done again with the saved values.

    Put the mixin before ModelAdmin, since Python refuses the other order. Set `document_lock`. If you set `actions`
    yourself, name "clear_stale_documents" and "force_release_documents" among them. The actions need the permissions
    ``django_mongolock.clear_document_lock`` and ``django_mongolock.force_release_lock``.
    """

    document_lock: DocumentLock[Any]
    actions = ("clear_stale_documents", "force_release_documents")

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check additionally that `document_lock` is the lock of this very model."""
        found: list[checks.CheckMessage] = super().check(**kwargs)
        lock = getattr(self, "document_lock", None)
        place = lock.model if isinstance(lock, DocumentLock) else None
        if place is None or place._meta.concrete_model is not self.model._meta.concrete_model:
            message = f"The document_lock of {type(self).__name__} is not a DocumentLock of {self.model._meta.label}."
            hint = "Set it to the lock that you declared beside the model: document_lock = ad_exports."
            found.append(checks.Error(message, hint=hint, obj=type(self), id="mongolock.E017"))
        return found

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Add the fields of the lock."""
        columns = self.document_lock.rules.fields.names().values()
        own = [field.name for field in self.model._meta.concrete_fields if field.column in columns]
        return list(dict.fromkeys([*super().get_readonly_fields(request, obj), *own]))

    has_clear_document_lock_permission = staticmethod(may_clear)

    def has_force_document_lock_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may force a release.

        The site must have the admin of the locks, whose page asks first.
        """
        return may_force(request) and isinstance(self.admin_site._registry.get(Lock), LockActions)

    @admin.action(
        description=gettext_lazy("Force the release of the selected documents"), permissions=["force_document_lock"]
    )
    def force_release_documents(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Show the holder of each document, and ask for a reason and a confirmation."""
        keys, locks = list(queryset.values_list("pk", flat=True)[: MAX_SELECTED + 1]), self.admin_site._registry[Lock]
        kind = DocumentKind(self.document_lock)
        try:
            shown = [(kind, row) for row in self.document_lock.snapshots(ids=keys)]
        except LockError as error:
            self.message_user(request, str(error), messages.ERROR)
            return None
        return locks.question(request, FORCE, shown)  # type: ignore[attr-defined, no-any-return]

    @admin.action(
        description=gettext_lazy("Release the selected documents if their lock is stale"),
        permissions=["clear_document_lock"],
    )
    def clear_stale_documents(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Release the selected documents that are stale.

        No confirmation is needed. The server looks again before it releases a document, and an active holder keeps its
        lock.
        """
        keys = list(queryset.values_list("pk", flat=True)[: MAX_CLEARED_AT_ONCE + 1])
        try:
            swept = self.document_lock.clear_stale(keys[:MAX_CLEARED_AT_ONCE])
        except LockError as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        for document in swept.cleared:
            text = _("Released: %s held it for too long.") % printable(document.holder)
            write_log(request, queryset.model, document.id, text)
        report_cleared(request, self.document_lock.name, swept)
        if len(keys) > MAX_CLEARED_AT_ONCE:
            text = _("Only the first %d of the selected documents were processed. Repeat the action for the others.")
            self.message_user(request, text % MAX_CLEARED_AT_ONCE, messages.WARNING)
