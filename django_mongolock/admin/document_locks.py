"""The admin of a model that has a document lock: its form leaves the lock alone, and actions release documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin, messages
from django.core import checks
from django.db.models import Expression, F, Field, QuerySet
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..documents import DocumentLock
from ..exceptions import LockError, printable
from ..models import Lock
from .document_forcing import question
from .document_pages import report_cleared
from .document_permissions import may_clear, may_force
from .document_rows import Shown
from .pages import Pages
from .release import MAX_SELECTED

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = object

#: How many documents one action releases at most.
MAX_CLEARED_AT_ONCE: Final = 1_000


class DocumentLockAdminMixin(ModelAdmin):
    """For the admin of a model that has a `DocumentLock`: actions that release the selected documents, if they are
    stale, or by force after a question; and a form that does not write what the lock has written since it was opened.

    The fields of the lock are read-only. A save writes the others, and increases the version in the same update: work
    on the document that is under way ends in its failed state, and is done again with what was saved.

    Put it before ModelAdmin, and set `document_lock`. Where you set `actions` yourself, name "clear_stale_documents"
    and "force_release_documents" among them. They need the permissions ``django_mongolock.clear_document_lock`` and
    ``django_mongolock.force_release_lock``.
    """

    document_lock: DocumentLock[Any]
    actions = ("clear_stale_documents", "force_release_documents")

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

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Add the fields of the lock."""
        found = list(super().get_readonly_fields(request, obj))
        return [*found, *(field.name for field in self._lock_fields if field.name not in found)]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save what is not the lock's, unless you have put that into the form, and increase the version."""
        version = self.document_lock.rules.fields.version
        if change:
            for field in self._lock_fields:
                if field.name not in form.changed_data and not getattr(field, "is_version", False):
                    del obj.__dict__[field.attname]  # a deferred field, which Django does not write
                    if field.column == version:
                        setattr(obj, field.attname, Coalesce(F(field.name), 0) + 1)
        super().save_model(request, obj, form, change)
        for field in self._lock_fields:
            if isinstance(obj.__dict__.get(field.attname), Expression):
                del obj.__dict__[field.attname]

    @property
    def _lock_fields(self) -> list[Field[Any, Any]]:
        columns = self.document_lock.rules.fields.names().values()
        return [field for field in self.model._meta.concrete_fields if field.column in columns]

    def has_clear_document_lock_permission(self, request: HttpRequest) -> bool:
        """Whether this user may release stale documents."""
        return may_clear(request)

    def has_force_document_lock_permission(self, request: HttpRequest) -> bool:
        """Whether this user may force a release, on a site that has the admin of the locks: its page asks first."""
        return may_force(request) and self._locks is not None

    @property
    def _locks(self) -> Pages | None:
        registered = self.admin_site._registry.get(Lock)
        return registered if isinstance(registered, Pages) else None

    @admin.action(
        description=gettext_lazy("Force the release of the selected documents"), permissions=["force_document_lock"]
    )
    def force_release_documents(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Show the holder of each document, and ask for a reason and a confirmation."""
        keys = list(queryset.values_list("pk", flat=True)[: MAX_SELECTED + 1])
        try:
            shown = [Shown(self.document_lock, each) for each in self.document_lock.at_work().with_ids(keys)]
            page = question(self._locks, request, shown) if self._locks is not None else None
        except LockError as error:
            self.message_user(request, str(error), messages.ERROR)
            return None
        if page is None:
            self.message_user(request, _("None of the selected documents is held now."), messages.WARNING)
        return page

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
            self.log_change(request, instance, _("Released: %s held it for too long.") % printable(document.holder))
        report_cleared(request, self.document_lock, swept)
        if len(keys) > MAX_CLEARED_AT_ONCE:
            text = _("Only the first %d of the selected documents were processed. Repeat the action for the others.")
            self.message_user(request, text % MAX_CLEARED_AT_ONCE, messages.WARNING)
