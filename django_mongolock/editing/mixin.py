"""`EditLockMixin`: a change page of the admin that one tab at a time may edit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin, messages
from django.contrib.admin.options import TO_FIELD_VAR, InlineModelAdmin
from django.contrib.admin.utils import flatten_fieldsets, quote, unquote
from django.core.exceptions import ValidationError
from django.db import DatabaseError, router, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import select_template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from ..exceptions import VersionConflict
from ..versions.checking import all_or_nothing, is_write_conflict
from ..versions.retry import open_transaction
from . import texts
from .form_state import Shown, without_gone
from .requests import ACTION, SEAL, Editing

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

#: Where a request keeps its `Editing`, and what its page was compared with.
_EDITING: Final = "_mongolock_editing"
_STORED: Final = "_mongolock_stored"
_TEMPLATE: Final = "django_mongolock/editing/change_form.html"


class EditLockMixin(ModelAdmin):
    """Put it before ModelAdmin: ``class OrderAdmin(EditLockMixin, admin.ModelAdmin)``.

    The tab that opens a change page takes the lock of the object; other pages of it are for reading until it is free.
    What is saved must be what was shown: by the version of a model that has one, else by a digest of each value of the
    form and of its inlines. So nothing that anybody has written is lost, even where the lock was: who lost it is shown
    both versions.

    Locked are the change page, the page that deletes, `list_editable` and the action that deletes. Not locked is what
    does not go through this admin.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, InlineModelAdmin):
            raise TypeError(f"{cls.__name__}: EditLockMixin goes on the ModelAdmin; its inlines are locked with it")
        for name in ("has_change_permission", "has_delete_permission"):
            if own := cls.__dict__.get(name):  # which may well not ask us
                setattr(cls, name, _unless_readonly(own))

    # Which page this is

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        """As always, for one tab at a time."""
        told = request.method == "POST" and ACTION in request.GET
        if object_id is None or (not told and "_saveasnew" in request.POST):
            return super().changeform_view(request, object_id, form_url, extra_context)
        obj = self._get(request, object_id)
        if obj is None or not self.has_change_permission(request, obj):
            if told:
                return self._gone(request, object_id)
            anew = obj is None and self._was_deleted(request)
            return super().changeform_view(request, None if anew else object_id, form_url, extra_context)
        editing = Editing.open(request, obj, respond=False)
        if told:
            return editing.respond(obj, *self._shown(request, obj)) if editing.takes else editing.respond()
        setattr(request, _EDITING, editing)
        if request.method == "POST":
            return self._save(request, editing, object_id, form_url, extra_context)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def _get(self, request: HttpRequest, object_id: str) -> Any:
        by = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if by is not None and not self.to_field_allowed(request, by):
            return None  # the view says so
        return self.get_object(request, unquote(object_id), by)

    def _gone(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return Editing(request, self.model(pk=self._to_pk(object_id))).gone()

    def _to_pk(self, object_id: str) -> Any:
        with suppress(ValidationError, ValueError):
            return self.opts.pk.to_python(unquote(object_id))
        return unquote(object_id)

    # Saving

    def _save(self, request: HttpRequest, editing: Editing, *args: Any) -> Any:
        using = router.db_for_write(self.model)
        try:
            response = self._try(request, editing, using, *args)
        except (VersionConflict, DatabaseError) as error:  # somebody who has no lock was faster in this very moment
            if not isinstance(error, VersionConflict) and not is_write_conflict(error):
                raise
            response = self._try(request, editing, using, *args)
        if not editing.shown:  # saved, and going elsewhere
            if open_transaction(using):
                transaction.on_commit(editing.done, using=using)
            else:
                editing.done()
        return response

    def _try(self, request: HttpRequest, editing: Editing, using: str, object_id: str, *args: Any) -> Any:
        """Look, and save, in one transaction."""
        editing.forget()
        with all_or_nothing(using):
            # Nobody changes it between the look and the save.
            list(self.model._base_manager.using(using).select_for_update().filter(pk=editing.pk))
            found = self._get(request, object_id)
            if found is None:
                return self.changeform_view(request, object_id, *args)
            names, rows = self._shown(request, found)
            if not editing.check(found, names, rows):
                setattr(request, _STORED, (found, rows))
                self._mend(request, found, rows)
            return super().changeform_view(request, object_id, *args)

    def _was_deleted(self, request: HttpRequest) -> bool:
        """Show what was typed into the page of something that is gone, to be made anew: at first without saving it."""
        if request.method != "POST" or SEAL not in request.POST or not self.has_add_permission(request):
            return False
        editing = Editing(request, f"{self.opts.label_lower}:new")
        editing.deleted = True
        if request.POST[SEAL]:
            editing.refusals.append(texts.deleted())
        setattr(request, _EDITING, editing)
        self._mend(request, None, {formset.prefix: [] for formset, _inline in self._formsets(request, None)})
        return True

    def _mend(self, request: HttpRequest, obj: Any, rows: Shown) -> None:
        """Rows of the page that are not there any more become new ones."""
        data = request.POST.copy()
        for formset, _inline in self._formsets(request, obj):
            prefix, pk = formset.prefix, formset.model._meta.pk.name
            there = {str(row.pk) for row, _names in rows.get(prefix, ())}
            with suppress(KeyError, ValueError):  # the formset says so itself
                initial = int(str(data[f"{prefix}-INITIAL_FORMS"]))
                gone = {n for n in range(initial) if data.get(f"{prefix}-{n}-{pk}") not in there}
                if gone and prefix in rows:
                    without_gone(data, prefix, pk, gone)
        request.POST = data  # type: ignore[assignment]

    # What a page shows

    def _shown(self, request: HttpRequest, obj: Any) -> tuple[list[str], Shown]:
        """The names of the fields that the form has for *obj*, and the rows of its inlines."""
        fields = flatten_fieldsets(self.get_fieldsets(request, obj))
        form = self.get_form(request, obj, change=True, fields=fields)
        rows = {formset.prefix: _rows(formset) for formset, inline in self._formsets(request, obj) if inline}
        return list(form.base_fields), rows

    def _formsets(self, request: HttpRequest, obj: Any) -> Iterator[tuple[Any, Any]]:
        """The formsets as Django makes them, and their inlines where somebody may change something there."""
        used: dict[str, int] = {}
        for formset, inline in self.get_formsets_with_inlines(request, obj):
            prefix = formset.get_default_prefix()
            used[prefix] = used.get(prefix, 0) + 1
            if used[prefix] != 1 or not prefix:
                prefix = f"{prefix}-{used[prefix]}"
            may = inline.has_change_permission(request, obj) or inline.has_delete_permission(request, obj)
            queryset = self._from_primary(request, inline.get_queryset(request))
            yield formset(instance=obj, prefix=prefix, queryset=queryset), inline if may else None

    def get_queryset(self, request: HttpRequest) -> Any:
        """As always; what is compared and saved is not read from a replica, which may be behind."""
        return self._from_primary(request, super().get_queryset(request))

    def _from_primary(self, request: HttpRequest, queryset: Any) -> Any:
        saves = request.method == "POST" and _editing(request) is not None
        return queryset.using(router.db_for_write(queryset.model)) if saves else queryset

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """As always; where what was sent is not to be saved, one that says why."""
        form = super().get_form(request, obj, change=change, **kwargs)
        editing = _editing(request)
        return _refusing(form, editing) if editing is not None and editing.refusals else form

    def render_change_form(  # noqa: PLR0917 - as Django has it
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> Any:
        """With who edits, above the form."""
        editing = _editing(request)
        if editing is None:
            return super().render_change_form(request, context, add, change, form_url, obj)
        editing.shown = True
        form, inlines = context["adminform"].form, context["inline_admin_formsets"]
        if form.is_bound:
            if hasattr(request, _STORED):
                self._compare(editing, form, inlines, *getattr(request, _STORED))
        elif not editing.readonly:
            shown = {each.formset.prefix: _rows(each.formset) for each in inlines if _may_change(each)}
            editing.show(obj, list(form.fields), shown)
        if editing.readonly and not add:
            context |= dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        response: Any = super().render_change_form(request, context, add, change, form_url, obj)
        names = response.template_name
        response.context_data |= {
            "edit_lock": editing,
            "edit_lock_base": select_template([names] if isinstance(names, str) else list(names)),
            "edit_lock_form": f"{self.opts.model_name}_form",
            "save_as": response.context_data["save_as"] and not editing.readonly,
        }
        response.template_name = _TEMPLATE
        return response

    def _compare(self, editing: Editing, form: Any, inlines: Any, stored: Model, rows: Shown) -> None:
        """Both versions, field by field; of the inlines, those of the rows that both have, and which only one has."""
        editing.compare(form, stored)
        for each in inlines:
            if (prefix := each.formset.prefix) in rows:
                title = capfirst(each.opts.verbose_name)
                editing.compare_rows(each.formset, [row for row, _names in rows[prefix]], title)

    # Who may what

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Not on a page that is for reading, since somebody else edits."""
        return not _is_readonly(request) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """See has_change_permission()."""
        return not _is_readonly(request) and super().has_delete_permission(request, obj)

    # Deleting, and the list

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """As always, under the lock: what somebody else edits is not deleted."""
        obj = self._get(request, object_id)
        if obj is None or not self.has_delete_permission(request, obj):
            return super().delete_view(request, object_id, extra_context)
        editing = Editing(request, obj)
        standing = editing.take_mine() if request.method == "POST" else editing.lock.look()
        if standing.editor is not None and standing.editor.who == "somebody":
            self.message_user(request, _("Not deleted. %s") % texts.state(standing), messages.ERROR)
            return HttpResponseRedirect(self._address(obj))
        try:
            return super().delete_view(request, object_id, extra_context)
        finally:
            if standing.held:
                editing.done()

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """What somebody else edits counts as protected."""
        to_delete, counts, perms, protected = super().get_deleted_objects(objs, request)
        for obj in objs:
            if text := self._edited(request, obj):
                address = self._address(obj)
                protected = [*protected, format_html('<a href="{}">{}</a>: {}', address, obj, text)]
        return to_delete, counts, perms, protected

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        """In the list, the rows that somebody else edits are not changed."""
        form = super().get_changelist_form(request, **kwargs)

        class Listed(form):  # type: ignore[misc,valid-type]
            def clean(listed) -> Any:  # noqa: N805 - self is the admin
                cleaned = super().clean()
                if listed.has_changed() and (text := self._edited(request, listed.instance)):
                    listed.add_error(None, ValidationError(text, code="edit_lock"))
                return cleaned

        Listed.__name__ = form.__name__
        return Listed

    def _edited(self, request: HttpRequest, obj: Model) -> str:
        """Who edits it, if it is somebody else."""
        standing = Editing(request, obj).lock.look()
        return texts.state(standing) if standing.editor is not None and standing.editor.who == "somebody" else ""

    def _address(self, obj: Model) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        return reverse(name, args=(quote(obj.pk),), current_app=self.admin_site.name)


def _editing(request: HttpRequest) -> Editing | None:
    found: Editing | None = getattr(request, _EDITING, None)
    return found


def _is_readonly(request: HttpRequest) -> bool:
    editing = _editing(request)
    return editing is not None and editing.readonly


def _unless_readonly(method: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(method)
    def guarded(self: EditLockMixin, request: HttpRequest, *args: Any, **kwargs: Any) -> bool:
        return not _is_readonly(request) and method(self, request, *args, **kwargs)

    return guarded


def _may_change(inline: Any) -> bool:
    return bool(inline.has_change_permission or inline.has_delete_permission)


def _rows(formset: Any) -> list[tuple[Model, list[str]]]:
    return [(form.instance, list(form.fields)) for form in formset.initial_forms]


def _refusing(form: Any, editing: Editing) -> Any:
    """The same form, which is never valid."""

    class Refusing(form):  # type: ignore[misc]
        def clean(self) -> Any:
            cleaned = super().clean()
            editing.refuse(self)
            return cleaned

    Refusing.__name__ = form.__name__
    return Refusing
