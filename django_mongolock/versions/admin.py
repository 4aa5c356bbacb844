"""The admin for models with a version: a conflict leads to a page that says so, never to a lost update."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import TO_FIELD_VAR, get_content_type_for_model
from django.contrib.admin.utils import NestedObjects, flatten_fieldsets, unquote
from django.core import checks, signing
from django.core.exceptions import ValidationError
from django.db import models, router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from ..context import own_address
from ..exceptions import VersionConflict
from ..inspection import display
from .checking import UnlessOvertaken, counted, version_field
from .forms import FIELD, SealedModelForm, VersionedModelForm
from .seal import SALT, from_primary, pages_of, show, unseal

__all__ = ["VersionedAdmin", "VersionedForms"]

#: The salt of what a page that deletes has shown.
TREE: Final = f"{SALT}.tree"

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    BaseModelAdmin = admin.options.BaseModelAdmin[Any]
else:
    ModelAdmin, BaseModelAdmin = admin.ModelAdmin, admin.options.BaseModelAdmin


class FromPrimary(BaseModelAdmin):
    """See from_primary()."""

    def get_queryset(self, request: HttpRequest) -> Any:
        """See from_primary()."""
        return from_primary(request, super().get_queryset(request))


class SealedPages(FromPrimary, ModelAdmin):
    """Pages that change only what their user has seen: the list, and the one that deletes."""

    #: The hidden field by which a page that was edited is known.
    seal_field = FIELD

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """With list_editable, put the seals of the rows into the page, and conflicts into their rows."""
        response = None
        if "_save" in request.POST:  # an action is not run twice
            with UnlessOvertaken(router.db_for_write(self.model)):
                response = super().changelist_view(request, extra_context)
        if response is None:
            response = super().changelist_view(request, extra_context)
        context = getattr(response, "context_data", None) or {}
        formset = getattr(context.get("cl"), "formset", None)
        if formset is not None:
            for form in formset.initial_forms:
                if FIELD in form.fields:  # Django's list page has room for hidden fields in the management form only
                    shown = form[FIELD].value()
                    field = forms.CharField(widget=forms.HiddenInput, required=False, initial=shown)
                    show(field, shown)
                    formset.management_form.fields[f"{form.prefix.rpartition('-')[2]}-{FIELD}"] = field
        return response

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        """See changelist_view()."""
        return super().get_changelist_form(request, **{"form": SealedModelForm, **kwargs})

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """After a conflict, say who made the last change in the admin."""
        form = context["adminform"].form
        if getattr(form, "conflict", False):
            of = {"content_type": get_content_type_for_model(form.instance), "object_id": form.instance.pk}
            for entry in LogEntry.objects.filter(**of).select_related("user")[:1]:
                values = {"name": entry.user.get_username(), "time": display.moment(entry.action_time)}
                text = _("The last change in the admin was made by %(name)s, %(time)s.") % values
                self.message_user(request, text, messages.WARNING)
        return super().render_change_form(request, context, *args, **kwargs)

    def _get(self, request: HttpRequest, object_id: str) -> Any:
        """Return the object of an address; None where the view has to say that there is none."""
        by = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        known = by is None or self.to_field_allowed(request, by)
        return self.get_object(request, unquote(object_id), by) if known else None

    def _is_stored(self, request: HttpRequest, object_id: str) -> bool:
        """Return whether the object of an address is there, if only for others: get_queryset() may hide it by now."""
        by = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if by is not None and not self.to_field_allowed(request, by):
            return True
        field: Any = self.opts.pk if by is None else self.opts.get_field(by)
        rows: models.QuerySet[Any] = self.model._base_manager.using(router.db_for_write(self.model))
        with suppress(ValidationError, ValueError):
            return rows.filter(**{field.name: field.to_python(unquote(object_id))}).exists()
        return False

    def _get_obj_does_not_exist_redirect(self, request: HttpRequest, opts: Any, object_id: str) -> Any:
        """Show what was typed if the object was deleted while it was being edited, so that it can be created again."""
        edited = request.method == "POST" and self.seal_field in request.POST and self.has_add_permission(request)
        if edited and not self._is_stored(request, object_id):
            return self._changeform_view(request, None, "", None)  # type: ignore[attr-defined]
        return super()._get_obj_does_not_exist_redirect(request, opts, object_id)  # type: ignore[misc]

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Ask for confirmation about what is stored now: the address of the page carries its seal."""
        obj, using = self._get(request, object_id), router.db_for_write(self.model)
        if obj is None or not self.has_delete_permission(request, obj):
            return super().delete_view(request, object_id, extra_context)
        if request.method != "POST" and FIELD not in request.GET:
            return _ask(request, signing.dumps(_tree(obj), salt=TREE))
        with UnlessOvertaken(using):
            if request.method == "POST":
                rows = self.model._base_manager.using(using).select_for_update().filter(pk=obj.pk)
                found = next(iter(rows), None)  # not first(): Oracle locks no row of a slice
                if found is None or unseal(request.GET.get(FIELD), TREE) != _tree(found):
                    raise counted(VersionConflict(obj._meta.label, obj.pk, None))
            return super().delete_view(request, object_id, extra_context)
        self.message_user(request, _("This was changed meanwhile. Look again before you delete it."), messages.ERROR)
        return _ask(request, None)


def _tree(instance: Any) -> list[str]:
    """Return the name of *instance* and a digest of it and of all that is deleted with it."""
    collector = NestedObjects(using=router.db_for_write(type(instance), instance=instance))
    collector.collect([instance])
    found = [each for some in collector.data.values() for each in some]
    pages = pages_of((each, dict.fromkeys(field.name for field in each._meta.concrete_fields)) for each in found)
    text = json.dumps(pages, sort_keys=True)
    return [instance._meta.label, str(instance.pk), hashlib.sha256(text.encode()).hexdigest()[:32]]


class VersionedForms(FromPrimary):
    """Pages that carry the version. For inlines: ``class Lines(VersionedForms, admin.TabularInline)``.

    Derive your own forms from VersionedModelForm.
    """

    form = VersionedModelForm

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the hidden field, also if the fields are listed explicitly."""
        fieldsets = super().get_fieldsets(request, obj)
        if FIELD in flatten_fieldsets(fieldsets):
            return fieldsets
        (name, options), *others = fieldsets or [(None, {"fields": ()})]
        return [(name, {**options, "fields": [*options["fields"], FIELD]}), *others]

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also the form and the model."""
        found: list[checks.CheckMessage] = super().check(**kwargs)
        if not issubclass(self.form, VersionedModelForm):
            message = f"The form of {type(self).__name__} does not carry the version."
            hint = "Derive it from django_mongolock.versions.forms.VersionedModelForm."
            found.append(checks.Error(message, hint=hint, obj=type(self), id="mongolock.E072"))
        if version_field(self.model) is None:
            message = f"{self.model._meta.label}, which {type(self).__name__} edits, has no version."
            hint = "Derive the model from VersionedModel, or take a plain ModelAdmin."
            found.append(checks.Error(message, hint=hint, obj=type(self), id="mongolock.E073"))
        return found


class VersionedAdmin(SealedPages, VersionedForms, ModelAdmin):
    """A ModelAdmin that saves and deletes only what its user has seen."""

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Show or save the page. If another writer is faster while it is being saved, the form shows the conflict."""
        with UnlessOvertaken(router.db_for_write(self.model)):
            return super().changeform_view(request, *args, **kwargs)
        return super().changeform_view(request, *args, **kwargs)


def _ask(request: HttpRequest, shown: str | None) -> HttpResponse:
    """Redirect to the same page, with the version that it shows in its address; without, to read it again."""
    query = request.GET.copy()
    query.pop(FIELD, None)
    if shown is not None:
        query[FIELD] = shown
    return HttpResponseRedirect(own_address(request, query))
