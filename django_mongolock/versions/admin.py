"""The admin for models with a version. A conflict leads to a page that explains it, never to a lost update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import TO_FIELD_VAR, get_content_type_for_model
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.core import checks
from django.db import router
from django.forms.models import _get_foreign_key
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from ..context import own_address
from ..exceptions import VersionConflict
from ..inspection import display
from .checking import counted, version_field
from .forms import FIELD, SealField, VersionedModelForm, sealed
from .saving import Refused, Saving, lock_rows, locked_row
from .seal import from_primary, is_current, seal, show, unseal

__all__ = ["VersionedAdmin", "VersionedForms"]

#: The prefix of the names of guards.
GUARD: Final = "_guard_"
Inner = Callable[..., Any]


class GuardedAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin with guards around its methods.

    The guard of a method is the method ``_guard_<name>``. It gets the method as its first argument. A guard belongs to
    the instance. It therefore runs whatever the class, its subclasses and other mixins make of the method, whether they
    call super() or not, and in any order of the bases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dir(type(self)):
            if name.startswith(GUARD) and hasattr(type(self), own := name.removeprefix(GUARD)):
                call = functools.partial(self._call_guard, own)
                setattr(self, own, functools.update_wrapper(call, getattr(type(self), own)))

    def _call_guard(self, name: str, *args: Any, **kwargs: Any) -> Any:
        inner = functools.partial(getattr(type(self), name), self)
        return getattr(self, GUARD + name)(inner, *args, **kwargs)


class SealedPages(GuardedAdmin):
    """Pages that change only objects as their user has seen them: the change page, the list, and the delete page."""

    # The change page

    def _guard_changeform_view(
        self, inner: Inner, request: HttpRequest, object_id: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Show or save the page. If another writer is faster while it is being saved, the form shows the conflict."""
        if request.method != "POST":
            return inner(request, object_id, *args, **kwargs)
        return self._save(request, Saving(), lambda: inner(request, object_id, *args, **kwargs))

    def _save(
        self, request: HttpRequest, saving: Saving, attempt: Callable[[], Any], again: Callable[..., Any] | None = None
    ) -> Any:
        """Return the result of *attempt*.

        If something was refused that no form shows, nothing is written. The page, or the result of *again*, then shows
        the reason.
        """
        saving.begin(request)
        aliases = (router.db_for_write(LogEntry), self.get_queryset(request).db)
        said: list[Any] = getattr(getattr(request, "_messages", None), "_queued_messages", [])
        before = len(said)

        def once() -> Any:
            saving.anew = saving.deleted or "_saveasnew" in request.POST
            del said[before:]
            return attempt()

        response = saving.run(aliases, once)
        for text in saving.notices:
            self.message_user(request, text, messages.ERROR)
        if response is not None:
            return response
        del said[before:]
        said_of_it = saving.refusals or [_("Not saved: this was changed while you were editing it.")]
        return self._say(request, said_of_it, again)

    def _say(self, request: HttpRequest, problems: Iterable[str], again: Callable[..., Any] | None = None) -> Any:
        """Show the page again, with the problems."""
        for text in problems:
            self.message_user(request, text, messages.ERROR)
        return again(request) if again is not None else HttpResponseRedirect(own_address(request, request.GET))

    def _guard_get_queryset(self, inner: Inner, request: HttpRequest) -> Any:
        """See from_primary()."""
        return from_primary(request, inner(request))

    def _guard_get_form(self, inner: Inner, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return a form that carries a seal."""
        if "fields" not in kwargs:
            kwargs["fields"] = flatten_fieldsets(self.get_fieldsets(request, *args[:1]))
        if kwargs["fields"]:
            kwargs["fields"] = [name for name in kwargs["fields"] if name not in self._hidden(request)]
        return sealed(inner(request, *args, **kwargs), request, "object", **self._hidden(request))

    def _hidden(self, request: HttpRequest) -> dict[str, forms.Field]:
        """Return the hidden fields of the page. They are fields of the form, so they are in every template."""
        return {FIELD: SealField()}

    def _guard_get_fieldsets(self, inner: Inner, request: HttpRequest, obj: Any = None) -> Any:
        """Add the hidden fields, even if the fields are listed explicitly. A page for reading gets none."""
        shown = obj is None or self.has_change_permission(request, obj)
        return with_hidden(inner(request, obj), list(self._hidden(request)), shown=shown)

    def _guard_get_formsets_with_inlines(self, inner: Inner, request: HttpRequest, *args: Any) -> Iterator[Any]:
        """Yield formsets whose rows carry seals."""
        for formset, inline in inner(request, *args):
            formset.form = sealed(formset.form, request, "row")
            yield formset, inline

    def _guard_get_formset_kwargs(self, inner: Inner, request: HttpRequest, *args: Any) -> dict[str, Any]:
        """When saving, read the rows from the primary, and lock them. The rows of a deleted object are added as new
        rows.
        """
        given: dict[str, Any] = inner(request, *args)
        rows, parent, inline = from_primary(request, given["queryset"]), given["instance"], args[1]
        if parent.pk is not None and not hasattr(inline, "ct_field"):
            lock_rows(rows, **{_get_foreign_key(inline.parent_model, inline.model, inline.fk_name).name: parent})
        return {**given, "queryset": rows} | ({"save_as_new": True} if Saving.of(request).deleted else {})

    def _guard_render_change_form(self, inner: Inner, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        """Put the seals of rows into the page. After a conflict, say who made the last change in the admin."""
        saving = Saving.of(request)
        saving.shown = True
        for each in context["inline_admin_formsets"]:
            if FIELD not in flatten_fieldsets(each.fieldsets):
                _seal_rows(each.formset)
        form = context["adminform"].form
        if getattr(form, "conflict", False):
            of = {"content_type": get_content_type_for_model(form.instance), "object_id": form.instance.pk}
            for entry in LogEntry.objects.filter(**of).select_related("user")[:1]:
                values = {"name": entry.user.get_username(), "time": display.moment(entry.action_time)}
                text = _("The last change in the admin was made by %(name)s, %(time)s.") % values
                self.message_user(request, text, messages.WARNING)
        return inner(request, context, *args, **kw)

    def _guard_history_form_view(self, inner: Inner, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Restore an old version on the page of django-simple-history. The restored object gets a new version."""
        if request.method != "POST":
            return inner(request, *args, **kwargs)
        saving = Saving()
        saving.restores = True
        return self._save(request, saving, lambda: inner(request, *args, **kwargs))

    def _guard_save_model(self, inner: Inner, request: HttpRequest, obj: Any, form: Any, change: bool) -> Any:
        """See _guard_history_form_view()."""
        field = version_field(self.model)
        if Saving.of(request).restores and field is not None:
            found = locked_row(self.model, self.get_queryset(request).db, obj.pk)
            setattr(obj, field.attname, getattr(found, field.attname, 0))
            obj._state.adding = found is None
        return inner(request, obj, form, change)

    # The list

    def _guard_changelist_view(self, inner: Inner, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """With list_editable, put the seals of the rows into the page, and conflicts into their rows."""

        def attempt() -> Any:
            response = inner(request, *args, **kwargs)
            context = getattr(response, "context_data", None) or {}
            formset = getattr(context.get("cl"), "formset", None)
            if formset is not None:
                Saving.of(request).shown = True
                _seal_rows(formset)
            return response

        if request.method == "POST" and "_save" in request.POST:
            return self._save(request, Saving(functools.partial(self._problem_of, request)), attempt)
        try:
            return attempt()  # an action does not run twice
        except Refused as refused:
            return self._say(request, refused.args)

    def _problem_of(self, request: HttpRequest, obj: Any) -> str:
        """Return the reason why an object may not be changed now, "" if it may."""
        return ""

    def _guard_get_changelist_formset(self, inner: Inner, request: HttpRequest, **kwargs: Any) -> Any:
        """See _guard_changelist_view()."""
        formset = inner(request, **kwargs)
        formset.form = sealed(formset.form, request, "list")
        return formset

    def _guard__get_list_editable_queryset(self, inner: Inner, request: HttpRequest, prefix: str) -> Any:
        """Lock the rows that are sent with `SELECT FOR UPDATE`, where the database can."""
        rows = inner(request, prefix)
        lock_rows(rows, pk__in=[row.pk for row in rows])
        return rows.all()

    # Objects that were deleted meanwhile

    def _get(self, request: HttpRequest, object_id: str) -> Any:
        """Return the object of an address, or None where the view has to report that there is none."""
        by = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        known = by is None or self.to_field_allowed(request, by)
        return self.get_object(request, unquote(object_id), by) if known else None

    def _guard__get_obj_does_not_exist_redirect(self, inner: Inner, request: HttpRequest, *args: Any) -> Any:
        """Show the typed values if the object was deleted or hidden while it was edited. The user can then create it
        again.
        """
        if request.method != "POST" or FIELD not in request.POST:
            return inner(request, *args)
        saving = Saving.of(request)
        if not self.has_add_permission(request):
            saving.refusals.append(_("Not saved: this was deleted while you were editing it. Copy what you typed."))
        saving.deleted = saving.anew = True
        return self._changeform_view(request, None, "", None)  # type: ignore[attr-defined]

    def _guard_has_add_permission(self, inner: Inner, request: HttpRequest, *args: Any) -> bool:
        """Allow the page to show the form that refuses to create an object again."""
        return Saving.of(request).deleted or inner(request, *args)

    # Deleting

    def _guard_delete_view(self, inner: Inner, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """Ask for confirmation of the stored state. The address of the page carries the seal of that state."""
        obj = self._get(request, object_id)
        if obj is None or not self.has_delete_permission(request, obj):
            return inner(request, object_id, extra_context)
        if request.method != "POST" and FIELD not in request.GET:
            return _ask(request, seal(obj, dict.fromkeys(field.name for field in obj._meta.concrete_fields)))

        if request.method != "POST":
            return inner(request, object_id, extra_context)
        return self._save(request, Saving(), lambda: self._delete(inner, request, obj, object_id, extra_context), _ask)

    def _delete(self, inner: Inner, request: HttpRequest, obj: Any, *args: Any) -> HttpResponse:
        """Delete the object if its stored state is the one that the page showed."""
        found = locked_row(self.model, obj._state.db, obj.pk)
        if found is None or not is_current(unseal(request.GET.get(FIELD)), found):
            counted(VersionConflict(obj._meta.label, obj.pk, None))
            raise Refused(_("This was changed meanwhile. Look again before you delete it."))
        response: HttpResponse = inner(request, *args)
        return response


def with_hidden(fieldsets: Any, hidden: Collection[str], *, shown: bool = True) -> Any:
    """Return the fieldsets with the hidden fields in the first one, or without them."""
    found = [
        (name, {**options, "fields": [each for each in options["fields"] if each not in hidden]})
        for name, options in fieldsets or [(None, {"fields": ()})]
    ]
    if shown:
        found[0][1]["fields"] += hidden
    return found


def _seal_rows(formset: Any) -> None:
    """Put the seals of rows into the management form. Every template has a management form, but not every one has
    hidden fields.
    """
    for form in formset.initial_forms:
        if FIELD in form.fields:
            shown = form[FIELD].value()
            field = forms.CharField(widget=forms.HiddenInput, required=False, initial=shown)
            show(field, shown)
            formset.management_form.fields[f"{form.prefix.rpartition('-')[2]}-{FIELD}"] = field


class VersionedForms(admin.options.BaseModelAdmin):  # type: ignore[type-arg]
    """An admin of any class for rows that carry the version: ``class Lines(VersionedForms, admin.TabularInline)``.

    Derive your own forms from VersionedModelForm.
    """

    form = VersionedModelForm

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the rows, read from the database that will be written if the page is sent. See from_primary()."""
        return from_primary(request, super().get_queryset(request))

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the hidden field, even if the fields are listed explicitly."""
        return with_hidden(super().get_fieldsets(request, obj), [FIELD])

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also the form and the model."""
        found: list[checks.CheckMessage] = super().check(**kwargs)
        if not issubclass(self.form, VersionedModelForm):
            message = f"The form of {type(self).__name__} does not carry the version."
            hint = "Derive it from django_mongolock.versions.forms.VersionedModelForm."
            found.append(checks.Error(message, hint=hint, obj=type(self), id="mongolock.E072"))
        return [*found, *_check_version(self)]


class VersionedAdmin(SealedPages):
    """A ModelAdmin that saves and deletes only objects as their user has seen them."""

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also the model."""
        return [*super().check(**kwargs), *_check_version(self)]


def _check_version(edits: Any) -> Iterator[checks.CheckMessage]:
    if version_field(edits.model) is None:
        message = f"{edits.model._meta.label}, which {type(edits).__name__} edits, has no version."
        hint = "Derive the model from VersionedModel, or take a plain ModelAdmin."
        yield checks.Error(message, hint=hint, obj=type(edits), id="mongolock.E073")


def _ask(request: HttpRequest, shown: str | None = None) -> HttpResponse:
    """Redirect to the same page, with the shown version in its address. Without a version, the page is read again."""
    query = request.GET.copy()
    query.pop(FIELD, None)
    if shown is not None:
        query[FIELD] = shown
    return HttpResponseRedirect(own_address(request, query))
