"""`EditLockViewMixin`: Django's UpdateView, for one tab at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import router
from django.http import HttpRequest, HttpResponse
from django.views.generic import UpdateView

from .page import Editing

if TYPE_CHECKING:
    View = UpdateView[Any, Any]
else:
    View = object


class EditLockViewMixin(View):
    """Put it before UpdateView. The template gets `editing`, for ``{% edit_lock editing %}`` and its fields.

    While someone else is editing, the page has `editing.readonly`, and its form is disabled. What is saved must be what
    was shown, as in `EditLockMixin`. The view itself decides who has access: put LoginRequiredMixin before it.
    """

    editing: Editing

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show the page, for editing or for reading."""
        self.object = self.get_object()
        self.editing = Editing.open(request, self.object)
        form = self.get_form()
        if self.editing.readonly:
            for field in form.fields.values():
                field.disabled = True
        else:
            self.editing.show(self.object, form.fields)
        return self.render_to_response(self.get_context_data(form=form))

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Save what was sent, if it may be; or answer the page's script."""
        self.editing = Editing.open(request, self.get_object(), respond=False)
        if self.editing.page.action:
            self.object = self.get_object()
            return self.editing.respond(self.object, self.get_form_class().base_fields)
        model = self.get_queryset().model
        return self.editing.save(model, router.db_for_write(model), self._save)

    def _save(self) -> tuple[bool, HttpResponse]:
        """Check and save. Return whether it was saved, and the response."""
        self.object, stored = self.get_object(), self.get_object()
        form = self.get_form()
        self.editing.check(stored, form.fields)
        if form.is_valid() and not self.editing.refusals:
            return True, self.form_valid(form)
        self.editing.refuse(form, stored)
        return False, self.form_invalid(form)

    def get_queryset(self) -> Any:
        """When saving, read from the primary: a replica may be behind."""
        queryset = super().get_queryset()
        return queryset.using(router.db_for_write(queryset.model)) if self.request.method == "POST" else queryset

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Add `editing`."""
        return super().get_context_data(**{"editing": self.editing, **kwargs})
