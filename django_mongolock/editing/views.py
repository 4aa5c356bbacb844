"""`EditLockViewMixin`: Django's UpdateView, for one tab at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, router, transaction
from django.http import HttpRequest, HttpResponse
from django.views.generic import UpdateView

from ..exceptions import VersionConflict
from ..versions.checking import all_or_nothing, is_write_conflict
from ..versions.retry import open_transaction
from .requests import Editing

if TYPE_CHECKING:
    View = UpdateView[Any, Any]
else:
    View = object


class EditLockViewMixin(View):
    """Put it before UpdateView. The template gets `editing`, for ``{% edit_lock editing %}`` and its fields.

    Whoever comes while somebody else edits gets the page with `editing.readonly`: its form is disabled. What is saved
    must be what was shown, as in `EditLockMixin`. The view itself says who may come: put LoginRequiredMixin before.
    """

    editing: Editing

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """The page, for editing or for reading."""
        self.object = self.get_object()
        self.editing = Editing.open(request, self.object)
        form = self.get_form()
        if self.editing.readonly:
            for field in form.fields.values():
                field.disabled = True
        else:
            self.editing.show(self.object, list(form.fields))
        return self.render_to_response(self.get_context_data(form=form))

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Save what was sent, if it may be; or answer the page's script."""
        using = router.db_for_write(self.get_queryset().model)
        self.editing = Editing.open(request, self.get_object(), respond=False)
        if self.editing.action:
            self.object = self.get_object()
            return self.editing.respond(self.object, list(self.get_form_class().base_fields))
        try:
            saved, response = self._try(using)
        except (VersionConflict, DatabaseError) as error:  # somebody who has no lock was faster in this very moment
            if not isinstance(error, VersionConflict) and not is_write_conflict(error):
                raise
            saved, response = self._try(using)
        if saved and open_transaction(using):
            transaction.on_commit(self.editing.done, using=using)
        elif saved:
            self.editing.done()
        return response

    def _try(self, using: str) -> tuple[bool, HttpResponse]:
        """Look, and save, in one transaction. Was it saved?"""
        self.editing.forget()
        with all_or_nothing(using):
            model = self.get_queryset().model
            list(model._base_manager.using(using).select_for_update().filter(pk=self.editing.pk))
            self.object, stored = self.get_object(), self.get_object()
            form = self.get_form()
            self.editing.check(stored, list(form.fields))
            if form.is_valid() and not self.editing.refusals:
                return True, self.form_valid(form)
            if self.editing.refusals:
                self.editing.refuse(form)
                self.editing.compare(form, stored)
            return False, self.form_invalid(form)

    def get_queryset(self) -> Any:
        """As always; what is compared and saved is not read from a replica, which may be behind."""
        queryset = super().get_queryset()
        return queryset.using(router.db_for_write(queryset.model)) if self.request.method == "POST" else queryset

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """With `editing`."""
        return super().get_context_data(**{"editing": self.editing, **kwargs})
