"""`EditLockViewMixin`: Django's UpdateView, for one tab at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import router
from django.http import Http404, HttpRequest, HttpResponse
from django.views.generic import UpdateView

from ..versions.seal import from_primary, keys_of, unseal
from . import texts
from .page import Editing
from .page_request import SEAL

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
        try:
            self.object = self.get_object()
        except Http404 as error:
            return self._deleted(error)
        self.editing = Editing.open(request, self.object, respond=False)
        if self.editing.page.takes:
            return self.editing.respond(self.object, self.get_form().fields)
        if self.editing.page.action:
            return self.editing.respond()
        return self.editing.save(self._save)

    def _save(self, stored: Any) -> tuple[bool, HttpResponse]:
        """Check and save. Return whether the lock is to be released, and the response."""
        if stored is None:
            return True, self._deleted(Http404())
        before, self.object = self.object, self.get_object()
        if self.object is before:  # the request had it, such as `request.user`
            self.object.refresh_from_db(stored._state.db)
        form = self.get_form()
        may_save = self.editing.check(stored, form.fields)
        if form.is_valid() and may_save:
            response = self.form_valid(form)
        else:
            self.editing.refuse(form, stored)
            response = self.form_invalid(form)
        return not self.editing.shown, response

    def _deleted(self, error: Exception) -> HttpResponse:
        """Show what was typed into the page of an object that was deleted, or answer the page's script. Raise *error*
        for any other object."""
        model = self.get_form_class()._meta.model
        keys = keys_of(unseal(self.request.POST.get(SEAL)) or {}, model)
        if not keys or model._base_manager.using(router.db_for_write(model)).filter(pk=keys[0]).exists():
            raise error
        self.object = model(pk=keys[0])
        self.editing = Editing(self.request, self.object)
        answer, form = self.editing.gone(), self.get_form()
        if self.editing.page.action:
            return answer
        self.editing.deleted, self.editing.seal = True, self.request.POST[SEAL]
        self.editing.refusals.append(texts.gone())
        form.is_valid()
        self.editing.refuse(form, model())
        return self.form_invalid(form)

    def form_invalid(self, form: Any) -> HttpResponse:
        """Note that nothing was saved, also if form_valid() calls it."""
        self.editing.shown = True
        return super().form_invalid(form)

    def get_queryset(self) -> Any:
        """See from_primary()."""
        return from_primary(self.request, super().get_queryset())

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Add `editing`."""
        return super().get_context_data(**{"editing": self.editing, **kwargs})
