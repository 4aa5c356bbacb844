"""`EditLockMixin`: a change page of the admin that only one tab at a time may edit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin, messages
from django.contrib.admin.options import InlineModelAdmin
from django.contrib.admin.utils import flatten_fieldsets, quote, unquote
from django.core import checks
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import HttpRequest, HttpResponseRedirect
from django.template.loader import select_template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..backends import mongo_store
from ..conf import get_settings, missing_app
from ..engine.text_checks import check_key
from ..exceptions import LockBackendFailed, printable
from ..inspection import display, queries
from ..inspection.snapshot import LockSnapshot, ShownState
from ..transactions import PendingRelease, open_transactions
from ..versions.admin import SealedPages
from ..versions.seal import Fields, begin_apart, from_primary, keep_what_no_page_shows, say_deleted
from . import texts
from .edit_lock import EditLockStatus, edit_key
from .page import Editing
from .page_request import ACTION, SEAL

__all__ = ["EditLockMixin"]

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

#: Where a request keeps its `Editing`.
_EDITING: Final = "_mongolock_editing"
#: How long a list waits for MongoDB, in seconds: it is of use without the column of the editors.
_LIST_TIMEOUT: Final = 2.0
#: Where a request keeps the answer that MongoDB is away: of many objects, one waits for it.
_AWAY: Final = "_mongolock_editing_away"
#: Where an object of a list keeps the text of that column.
_EDITOR: Final = "_mongolock_editor"
_TEMPLATE: Final = "django_mongolock/editing/change_form.html"


class EditLockMixin(SealedPages, ModelAdmin):
    """Put it before ModelAdmin: ``class OrderAdmin(EditLockMixin, admin.ModelAdmin)``.

    The tab that opens a change page takes the lock of the object; other pages of it are for reading until it is free.
    What is saved must be what was shown, according to the version of a model that has one, else to a digest of each
    value of the form and of its inlines. So no change is overwritten without a word, even if the lock was lost: the
    page then says what was changed.

    Locked are the change page, the page that deletes, `list_editable` and the action that deletes. What does not go
    through this admin is not locked.
    """

    seal_field = SEAL

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, InlineModelAdmin):
            raise TypeError(f"{cls.__name__}: EditLockMixin goes on the ModelAdmin; its inlines are locked with it")
        for name in ("has_change_permission", "has_delete_permission"):
            if own := cls.__dict__.get(name):  # it need not call super()
                setattr(cls, name, _unless_readonly(own))

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also that the app is installed."""
        return [*super().check(**kwargs), *missing_app("django_mongolock.editing", type(self).__name__, type(self))]

    # Which page this is

    def changeform_view(self, request: HttpRequest, object_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Show or save the page, for one tab at a time."""
        is_message = request.method == "POST" and ACTION in request.GET
        if object_id is None or (not is_message and "_saveasnew" in request.POST):
            return super().changeform_view(request, object_id, *args, **kwargs)
        obj = self._get(request, object_id)
        if obj is None or not self.has_change_permission(request, obj):
            if is_message:
                return Editing(request, self.model(pk=unquote(object_id))).gone()
            return super().changeform_view(request, object_id, *args, **kwargs)
        editing = Editing.open(request, obj, respond=False)
        if is_message:
            return editing.respond(obj, *self._shown(request, obj)) if editing.page.takes else editing.respond()
        setattr(request, _EDITING, editing)
        if request.method != "POST":
            return super().changeform_view(request, object_id, *args, **kwargs)

        def attempt(_stored: object) -> tuple[bool, Any]:
            if (found := self._get(request, object_id)) is not None:  # as the admin's get_queryset() has it
                editing.check(found, *self._shown(request, found))
            response = super(EditLockMixin, self).changeform_view(request, object_id, *args, **kwargs)
            return not editing.shown, response

        return editing.save(attempt)

    def _get_obj_does_not_exist_redirect(self, request: HttpRequest, *args: Any) -> Any:
        editing = Editing(request, f"{self.opts.label_lower}:new")
        editing.deleted = True
        if request.POST.get(SEAL):
            editing.refusals.append(say_deleted())
        setattr(request, _EDITING, editing)
        return super()._get_obj_does_not_exist_redirect(request, *args)

    # What a page shows

    def _shown(self, request: HttpRequest, obj: Any) -> tuple[Any, list[tuple[Model, Fields]]]:
        """Return the fields of the form for *obj*, and the rows of its inlines that the user may change or delete."""
        fields = flatten_fieldsets(self.get_fieldsets(request, obj))
        form = self.get_form(request, obj, change=True, fields=fields)
        rows = list[tuple[Model, Fields]]()
        for formset, inline in self.get_formsets_with_inlines(request, obj):
            if inline.has_change_permission(request, obj) or inline.has_delete_permission(request, obj):
                given = self.get_formset_kwargs(request, obj, inline, formset.get_default_prefix())
                rows += _rows(formset(**{**given, "data": None, "files": None}))
        return form.base_fields, rows

    def get_formset_kwargs(self, request: HttpRequest, *args: Any) -> dict[str, Any]:
        """When saving, read the rows from the primary, too."""
        given: dict[str, Any] = super().get_formset_kwargs(request, *args)
        return {**given, "queryset": from_primary(request, given["queryset"])}

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return a form that says why, if what was sent is not to be saved; and that writes only what was typed."""
        form = super().get_form(request, obj, change=change, **kwargs)
        return _keeping(form, _editing(request))

    def get_formsets_with_inlines(self, request: HttpRequest, obj: Any = None) -> Iterator[Any]:
        """See get_form()."""
        for formset, inline in super().get_formsets_with_inlines(request, obj):
            formset.form = _keeping(formset.form, _editing(request), row=True)
            yield formset, inline

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], add: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Show who is editing above the form."""
        editing = _editing(request)
        if editing is None:
            return super().render_change_form(request, context, add, *args, **kwargs)
        editing.shown = True
        form, inlines = context["adminform"].form, context["inline_admin_formsets"]
        if not form.is_bound and not editing.readonly:
            may_change = [each.formset for each in inlines if each.has_change_permission or each.has_delete_permission]
            editing.show(form.instance, form.fields, [row for formset in may_change for row in _rows(formset)])
        if editing.readonly and not add:
            context |= dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        response: Any = super().render_change_form(request, context, add, *args, **kwargs)
        names = response.template_name
        response.context_data |= {
            "edit_lock": editing,
            "edit_lock_base": select_template([names] if isinstance(names, str) else list(names)),
            "edit_lock_form": f"{self.opts.model_name}_form",
            "save_as": response.context_data["save_as"] and not editing.readonly,
        }
        response.template_name = _TEMPLATE
        return response

    # Who may what

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse on a page that is for reading, since someone else is editing."""
        return not _is_readonly(request) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """See has_change_permission()."""
        return not _is_readonly(request) and super().has_delete_permission(request, obj)

    # Deleting, and the list

    def get_list_display(self, request: HttpRequest) -> Any:
        """Add the column that says who is editing."""
        columns = super().get_list_display(request)
        return columns if "edited_by" in columns else [*columns, "edited_by"]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read who is editing the objects of this page of the list."""
        changes = super().get_changelist_instance(request)
        if "edited_by" in changes.list_display:
            _note_editors(changes.result_list)
        return changes

    @admin.display(description=gettext_lazy("being edited by"))
    def edited_by(self, obj: Model) -> str:
        """Return who is editing the object of a row, and since when."""
        return getattr(obj, _EDITOR, "–")

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """Delete under the lock: what someone else is editing is not deleted."""
        obj = self._get(request, object_id)
        if obj is None or not self.has_delete_permission(request, obj):
            return super().delete_view(request, object_id, extra_context)
        editing = Editing(request, obj)
        editing.status = status = editing.lock.take() if request.method == "POST" else editing.lock.read()
        if _is_closed(status):
            self.message_user(request, _("Not deleted. %s") % texts.state(status), messages.ERROR)
            return HttpResponseRedirect(self._address(obj))
        try:
            response = super().delete_view(request, object_id, extra_context)
            if request.method == "POST" and status.editor and not (status.held or self._is_stored(request, object_id)):
                editing.status = editing.lock.take_over(status.editor.token)  # from another tab of this user
            return response
        finally:
            if editing.held and (opened := open_transactions()):
                PendingRelease(editing.done, lambda: None).wait(opened)
            elif editing.held:
                editing.done()

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Count what someone else is editing as protected."""
        to_delete, counts, perms, protected = super().get_deleted_objects(objs, request)
        for obj in objs:
            if text := self._edited(request, obj):
                address = self._address(obj)
                protected = [*protected, format_html('<a href="{}">{}</a>: {}', address, obj, text)]
        return to_delete, counts, perms, protected

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        """Refuse to change rows of the list that someone else is editing."""
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
        """Say who is editing it, if that keeps this user from changing it."""
        status: EditLockStatus = getattr(request, _AWAY, None) or Editing(request, obj).lock.read()
        if status.problem:
            setattr(request, _AWAY, status)
        return texts.state(status) if _is_closed(status) else ""

    def _address(self, obj: Model) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        return reverse(name, args=(quote(obj.pk),), current_app=self.admin_site.name)


def _editing(request: HttpRequest) -> Editing | None:
    found: Editing | None = getattr(request, _EDITING, None)
    return found


def _is_readonly(request: HttpRequest) -> bool:
    editing = _editing(request)
    return editing is not None and editing.readonly


def _is_closed(status: EditLockStatus) -> bool:
    """Return whether someone else is editing; with EDIT_FAIL_CLOSED, also if that is not known."""
    if status.problem:
        return get_settings().EDIT_FAIL_CLOSED
    return status.editor is not None and status.editor.who == "other"


def _unless_readonly(method: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(method)
    def guarded(self: EditLockMixin, request: HttpRequest, *args: Any, **kwargs: Any) -> bool:
        return not _is_readonly(request) and method(self, request, *args, **kwargs)

    return guarded


def _rows(formset: Any) -> list[tuple[Model, Fields]]:
    return [(form.instance, form.fields) for form in formset.initial_forms]


def _keeping(form: Any, editing: Editing | None, *, row: bool = False) -> Any:
    """Return the same form, which keeps what is stored where nothing was typed; never valid with refusals."""

    class Keeping(form):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            begin_apart(self)

        def _post_clean(self) -> None:
            if editing is not None:  # not in clean(), which may raise
                (editing.show_stored if row else editing.refuse)(self, self.instance)
            keep_what_no_page_shows(self)
            super()._post_clean()

    Keeping.__name__ = form.__name__
    return Keeping


def _note_editors(objects: Iterable[Model]) -> None:
    """Give each object of a list the text that says who is editing it: one read for all."""
    keys = [(check_key(edit_key(obj), get_settings().KEY_PREFIX), obj) for obj in objects]
    query = {"_id": {"$in": [key for key, _obj in keys]}, "expires_at": {"$ne": None}}
    try:
        found = queries.snapshots(mongo_store(), query, holders=1, timeout=_LIST_TIMEOUT)
        texts = {lock.key: _editor(lock) for lock in found if lock.state is ShownState.HELD}
    except LockBackendFailed:
        texts = {key: "?" for key, _obj in keys}
    for key, obj in keys:
        setattr(obj, _EDITOR, texts.get(key, "–"))


def _editor(lock: LockSnapshot) -> str:
    (holder, *_others) = lock.holders
    name = printable(holder.user or "") or _("someone else")
    return f"{name} · {display.ago(holder.acquired_at, lock.now)}" if holder.acquired_at else name
