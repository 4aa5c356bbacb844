"""`EditLockViewMixin`: Django's UpdateView, for one tab at a time."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.http import Http404, HttpRequest, HttpResponse
from django.views.generic import UpdateView

from ..versions.forms import FIELD, sealed
from ..versions.saving import locked_row
from ..versions.seal import from_primary, key_of, unseal
from . import texts
from .page import Editing


class EditLockViewMixin(UpdateView):  # type: ignore[type-arg]
    """A mixin for one editor at a time. Put it before UpdateView. Python refuses the other order.

    The template gets `editing`, for ``{% edit_lock editing %}`` and its fields. While someone else is editing, the page
    has `editing.readonly`, and its form is disabled. As in `EditLockMixin`, a save requires that the page showed the
    stored state. The view itself decides who has access. Put LoginRequiredMixin before this mixin.
    """

    editing: Editing

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show the page, for editing or for reading."""
        self.object = self.get_object()
        self.editing = Editing.open(request, self.object)
        form = self._form()
        for field in form.fields.values() if self.editing.readonly else ():
            field.disabled = True
        return self.render_to_response(self.get_context_data(form=form))

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Save the sent data if that is allowed, or answer the page's script."""
        try:
            self.object = self.get_object()
        except Http404 as error:
            return self._deleted(error)
        self.editing = editing = Editing.open(request, self.object, respond=False)
        if editing.page.action:
            return editing.respond(self.object if editing.page.takes else None)
        using = self.object._state.db or router.db_for_write(editing.model)
        response = editing.run([using], lambda: self._save(using))
        if response is None:  # the view has saved data that its form refuses
            form = self._form()
            form.is_valid()
            return self.form_invalid(form)
        if not editing.shown:
            editing.end(using)
        return response

    def _form(self) -> Any:
        """Return the form of the page with its seal."""
        self.editing.begin(self.request)
        return self.get_form(sealed(self.get_form_class(), self.request))

    def _save(self, using: str) -> HttpResponse:
        """Check and save."""
        stored = locked_row(self.editing.model, using, self.editing.pk)
        if stored is None:
            return self._deleted(Http404())
        before, self.object = self.object, self.get_object()
        if self.object is before:  # a shared object, such as `request.user`
            self.object.refresh_from_db(using)
        form = self._form()
        return self.form_valid(form) if form.is_valid() else self.form_invalid(form)

    def _deleted(self, error: Exception) -> HttpResponse:
        """Show the typed values for an object that was deleted, or answer the page's script.

        Raise *error* for an object that the page did not show.
        """
        model = self.get_form_class()._meta.model
        key = key_of(unseal(self.request.POST.get(FIELD)), model)
        if not key or model._base_manager.using(router.db_for_write(model)).filter(pk=key).exists():
            raise error
        self.object = model(pk=key)
        self.editing = Editing(self.request, self.object)
        answer = self.editing.gone()
        if self.editing.page.action:
            return answer
        self.editing.deleted, self.editing.refused = True, True
        self.editing.refusals.append(texts.gone())
        form = self._form()
        form.is_valid()
        return self.form_invalid(form)

    def form_invalid(self, form: Any) -> HttpResponse:
        """Record that nothing was saved, even if form_valid() calls this method."""
        self.editing.shown = True
        return super().form_invalid(form)

    def get_queryset(self) -> Any:
        """See from_primary()."""
        return from_primary(self.request, super().get_queryset())

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Add `editing`."""
        return super().get_context_data(**{"editing": self.editing, **kwargs})
