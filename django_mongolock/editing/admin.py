"""`EditLockMixin`: a change page of the admin that only one tab at a time may edit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import InlineModelAdmin
from django.contrib.admin.utils import quote, unquote
from django.core import checks
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
from ..versions.admin import Inner, SealedPages
from ..versions.forms import FIELD, SealField
from ..versions.saving import Refused, Saving
from ..versions.seal import show
from . import texts
from .edit_lock import EditLockStatus, edit_key
from .page import Editing
from .page_request import ACTION, TAB

__all__ = ["EditLockMixin"]

#: The attribute of a request for its `Editing`.
_EDITING: Final = "_mongolock_editing"
#: The seconds for which a list waits for MongoDB. The list is useful without the column of the editors.
_LIST_TIMEOUT: Final = 2.0
#: The attribute of a request for the known states of objects, by their keys. `_AWAY` is the key for an outage of
#: MongoDB.
_KNOWN: Final = "_mongolock_editing_known"
_AWAY: Final = ""
#: The attribute of a listed object for its text in the column of editors.
_EDITOR: Final = "_mongolock_editor"
_TEMPLATE: Final = "django_mongolock/editing/change_form.html"


class EditLockMixin(SealedPages):
    """A mixin for one editor at a time: ``class OrderAdmin(EditLockMixin, admin.ModelAdmin)``. Put it before
    ModelAdmin.

    The tab that opens a change page takes the lock of the object. Other pages of the object are read-only until the
    lock is free. The page is that of `VersionedAdmin`, for a model with or without a version. No change is therefore
    overwritten silently, even if the lock was lost. The page then names the changed fields.

    The lock covers the change page, the delete page, `list_editable` and the delete action. Writes outside this admin
    are not locked.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, InlineModelAdmin):
            raise TypeError(f"{cls.__name__}: EditLockMixin goes on the ModelAdmin; its inlines are locked with it")

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also that the app is installed."""
        return [*super().check(**kwargs), *missing_app("django_mongolock.editing", type(self).__name__, type(self))]

    # The change page

    def _guard_changeform_view(
        self, inner: Inner, request: HttpRequest, object_id: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Show or save the page, for one tab at a time."""
        is_message = request.method == "POST" and ACTION in request.GET
        if object_id is None or (not is_message and "_saveasnew" in request.POST):
            return super()._guard_changeform_view(inner, request, object_id, *args, **kwargs)
        obj = self._get(request, object_id)
        if obj is None or not self.has_change_permission(request, obj):
            if is_message:
                return Editing(request, self.model(pk=unquote(object_id))).gone()
            return super()._guard_changeform_view(inner, request, object_id, *args, **kwargs)
        editing = Editing.open(request, obj, respond=False)
        if is_message:
            return editing.respond(obj if editing.page.takes else None)
        editing.begin(request)
        setattr(request, _EDITING, editing)
        if request.method != "POST":
            return inner(request, object_id, *args, **kwargs)
        response = self._save(request, editing, lambda: inner(request, object_id, *args, **kwargs))
        if not (editing.shown or editing.refused):
            editing.end(obj._state.db)
        return response

    def _guard__get_obj_does_not_exist_redirect(self, inner: Inner, request: HttpRequest, *args: Any) -> Any:
        setattr(request, _EDITING, Editing(request, f"{self.opts.label_lower}:new"))
        return super()._guard__get_obj_does_not_exist_redirect(inner, request, *args)

    def _guard_render_change_form(
        self, inner: Inner, request: HttpRequest, context: Any, add: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Show the editor above the form."""
        editing, saving = _editing(request), Saving.of(request)
        if editing is None:
            return super()._guard_render_change_form(inner, request, context, add, *args, **kwargs)
        editing.deleted, editing.refused = saving.deleted, saving.refused
        if editing.readonly and not add:
            context |= dict.fromkeys(("show_save", "show_save_and_continue", "show_save_and_add_another"), False)
        response: Any = super()._guard_render_change_form(inner, request, context, add, *args, **kwargs)
        names = response.template_name
        response.context_data |= {
            "edit_lock": editing,
            "edit_lock_base": select_template([names] if isinstance(names, str) else list(names)),
            "edit_lock_form": f"{self.opts.model_name}_form",
            "save_as": response.context_data["save_as"] and not editing.readonly,
        }
        response.template_name = _TEMPLATE
        return response

    def _hidden(self, request: HttpRequest) -> dict[str, forms.Field]:
        """Add the name of the tab."""
        hidden = super()._hidden(request)
        if (editing := _editing(request)) is not None:
            hidden[TAB] = SealField(initial=editing.lock.tab)
            show(hidden[TAB], editing.lock.tab)
        return hidden

    # Permissions

    def _guard_has_change_permission(self, inner: Inner, request: HttpRequest, obj: Any = None) -> bool:
        """Return False on a page that is read-only because someone else is editing."""
        editing = _editing(request)
        return not (editing is not None and editing.readonly) and inner(request, obj)

    _guard_has_delete_permission = _guard_has_change_permission

    # Deleting, and the list

    def get_list_display(self, request: HttpRequest) -> Any:
        """Add the column with the editor."""
        columns = super().get_list_display(request)
        return columns if "edited_by" in columns else [*columns, "edited_by"]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read the editors of the objects on this page of the list."""
        changes = super().get_changelist_instance(request)
        if "edited_by" in changes.list_display:
            _note_editors(changes.result_list)
        return changes

    @admin.display(description=gettext_lazy("being edited by"))
    def edited_by(self, obj: Model) -> str:
        """Return the editor of the object in a row, and the time since which they edit."""
        return getattr(obj, _EDITOR, "–")

    def _guard_delete_view(self, inner: Inner, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """Delete under the lock. An object that someone else is editing is not deleted."""
        obj = self._get(request, object_id)
        asks = request.method != "POST" and FIELD not in request.GET  # the address gets its seal first
        if obj is None or asks or not self.has_delete_permission(request, obj):
            return super()._guard_delete_view(inner, request, object_id, extra_context)
        editing = Editing(request, obj)
        editing.status = status = editing.lock.take() if request.method == "POST" else editing.lock.read()
        _note(request, obj, status)
        if _is_closed(status):
            self.message_user(request, _("Not deleted. %s") % texts.state(status), messages.ERROR)
            return HttpResponseRedirect(self._address(obj))
        try:
            response = super()._guard_delete_view(inner, request, object_id, extra_context)
            stored = type(obj)._base_manager.using(obj._state.db).filter(pk=obj.pk)
            if request.method == "POST" and status.editor and not (status.held or stored.exists()):
                editing.status = editing.lock.take_over(status.editor.token)  # from another tab of this user
            return response
        finally:
            if editing.held and (opened := open_transactions()):
                PendingRelease(editing.done, lambda: None).wait(opened)
            elif editing.held:
                editing.done()

    def _guard_get_deleted_objects(self, inner: Inner, objs: Any, request: HttpRequest) -> Any:
        """Count objects that someone else is editing as protected."""
        to_delete, counts, perms, protected = inner(objs, request)
        for obj in objs:
            if text := self._problem_of(request, obj):
                protected = [*protected, format_html('<a href="{}">{}</a>: {}', self._address(obj), obj, text)]
        return to_delete, counts, perms, protected

    def _guard_save_model(self, inner: Inner, request: HttpRequest, obj: Any, form: Any, change: bool) -> Any:
        """Refuse to change an object that someone else is editing, in the list or by restoring an old version."""
        if change and not obj._state.adding and _editing(request) is None and (text := self._problem_of(request, obj)):
            raise Refused(f"{obj}: {text}")
        return super()._guard_save_model(inner, request, obj, form, change)

    def _guard_delete_model(self, inner: Inner, request: HttpRequest, objs: Any) -> Any:
        """Refuse to delete objects that someone else is editing, whatever the page has asked before."""
        several: Iterable[Model] = [objs] if isinstance(objs, Model) else objs
        if said := [f"{obj}: {text}" for obj in several if (text := self._problem_of(request, obj))]:
            raise Refused(*said)
        return inner(request, objs)

    _guard_delete_queryset = _guard_delete_model

    def _problem_of(self, request: HttpRequest, obj: Model) -> str:
        """Return the text about the editor, if the editor keeps this user from changing the object."""
        known: dict[str, EditLockStatus] = getattr(request, _KNOWN, {})
        status = known.get(_AWAY) or known.get(edit_key(obj)) or Editing(request, obj).lock.read()
        _note(request, obj, status)
        return texts.state(status) if _is_closed(status) else ""

    def _address(self, obj: Model) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        return reverse(name, args=(quote(obj.pk),), current_app=self.admin_site.name)


def _editing(request: HttpRequest) -> Editing | None:
    found: Editing | None = getattr(request, _EDITING, None)
    return found


def _is_closed(status: EditLockStatus) -> bool:
    """Return whether someone else is editing. With EDIT_FAIL_CLOSED, an unknown editor counts too."""
    if status.problem:
        return get_settings().EDIT_FAIL_CLOSED
    return status.editor is not None and status.editor.who == "other"


def _note(request: HttpRequest, obj: Model, status: EditLockStatus) -> None:
    """Record the status for the rest of the request. While MongoDB is away, only one query waits for it."""
    known = {**getattr(request, _KNOWN, {}), _AWAY if status.problem else edit_key(obj): status}
    setattr(request, _KNOWN, known)


def _note_editors(objects: Iterable[Model]) -> None:
    """Give each object of a list the text about its editor. One read serves all objects."""
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
