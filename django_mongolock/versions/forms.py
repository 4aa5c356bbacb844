"""A form that knows the values its page showed. It reports later changes of the object instead of overwriting them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from django import forms
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db import models, router
from django.forms.formsets import DELETION_FIELD_NAME
from django.forms.utils import ErrorDict
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from ..engine.lock.transaction import out_of_commit_hook
from ..engine.logs import WARNING, log
from ..exceptions import VersionConflict
from .checking import all_or_nothing, version_field
from .saving import Saving
from .seal import (
    Page,
    changed,
    columns,
    copied,
    digest,
    is_current,
    key_of,
    name_of,
    say_changed,
    seal,
    secret_of,
    sent_back,
    show,
    show_again,
    unseal,
)

__all__ = ["SealedModelForm", "VersionedModelForm"]

#: The hidden field that carries the seal.
FIELD = "version_read"


class SealField(forms.CharField):
    """A hidden field, such as the seal of the page. It never counts as a change."""

    widget = forms.HiddenInput

    def __init__(self, **options: Any) -> None:
        super().__init__(required=False, label="", **options)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class SealedModelForm(forms.ModelForm):  # type: ignore[type-arg]
    """A ModelForm whose page carries a record of what it showed, in the hidden field `version_read`.

    The record has the version of a model with a version, and a digest of each field.

    A field that the user left alone takes the stored value. If the user changed a field, and the stored value differs
    from the one that the page showed, the form is not valid. The form then names the fields that were changed
    meanwhile. If the model has a version, any change of the object counts. The page then carries the stored state, so
    sending it again saves it. A page without a record, or with a forged one, is treated as a page that has shown
    nothing.

    A change between is_valid() and the save raises VersionConflict. `try_save` shows the same page instead.
    """

    version_read = SealField()
    #: The request that the form is a part of, if the page is one of `versions.admin` or `editing`.
    saving: ClassVar[Saving | None] = None
    #: The edited part: the object of the page, a row below it, or a row of a list.
    part: ClassVar[Literal["object", "row", "list"]] = "object"
    #: The fields that the user has left alone.
    _alone: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial = {name: copied(value) for name, value in self.initial.items()}
        if not self.instance._state.adding:
            self.initial[FIELD] = seal(self.instance, self.fields)
        #: Whether the object was changed or deleted since the page was made.
        self.conflict = False

    @property
    def changed_data(self) -> list[str]:
        """The names of the fields that the user has changed."""
        return [name for name in super().changed_data if name not in self._alone]

    def _post_clean(self) -> None:
        """Compare with the stored values, before Django puts the typed values into the instance."""
        page = unseal(self.data.get(self.add_prefix(FIELD)))
        if self.add_prefix(FIELD) not in self.data and not self.instance._state.adding:
            log(WARNING, "a form was sent without {{ form.version_read }}", place=self._meta.model._meta.label)
        if not self.instance._state.adding:
            self._compare(page)
        elif page is not None and not self._is_kept(page):
            self._errors, self.cleaned_data, self._alone = ErrorDict(), {}, frozenset(self.fields)
            return
        for text in self.saving.refusals if self.saving is not None and self.part == "object" else ():
            self._refuse(text, "edit_lock")
        is_row = self.saving is not None and self.part == "list" and self.has_changed()
        if self.saving is not None and is_row and (text := self.saving.problem_of(self.instance)):
            self._refuse(text, "edit_lock")
        if self.files and self.saving is not None and self.saving.refused and self.part == "object":
            self._refuse(_("Choose the file again: a browser does not send it twice."))
        super()._post_clean()  # type: ignore[misc]

    def try_save(self) -> bool:
        """Save, and return whether the object was saved. If another writer was faster, the form shows the conflict."""
        using = router.db_for_write(self._meta.model, instance=self.instance)
        try:
            with all_or_nothing(using):
                self.save()
                return True
        except VersionConflict as error:
            if out_of_commit_hook(error):
                raise
        stored = self._meta.model._base_manager.using(using).filter(pk=self.instance.pk).first()
        if stored is None:
            self.instance._state.adding = True
            self._show_deleted()
        else:
            self._show_conflict(unseal(self.data.get(self.add_prefix(FIELD))), stored)
            self.instance = stored
        return False

    def _compare(self, page: Page | None) -> None:
        """Keep the stored value of each field that was left alone, with its microseconds and line ends.

        Refuse to overwrite values that the page has not shown.
        """
        stored = self.instance
        page = page if page is not None and page["name"] == name_of(stored) else None
        typed = self._typed(page, stored)
        for field in columns(stored, self.cleaned_data):
            value = field.value_from_object(stored)
            if field.name in typed or digest(field, self.cleaned_data[field.name]) == digest(field, value):
                continue
            self._keep(field, value)
            self._alone |= {field.name}
            if page is not None and changed(page, stored, [field.name]) and field.name in page["fields"]:
                show_again(self, field.name, value)
                show(self.fields[FIELD], seal(stored, self.fields))
        others = set(self.changed_data) - {field.name for field in columns(stored, self.cleaned_data)}
        last = self.saving is not None and self.saving.last and self.part == "object"
        if not (typed or others or last):
            return
        whole = version_field(stored._meta.model) is not None or self.cleaned_data.get(DELETION_FIELD_NAME)
        is_same = is_current(page, stored) if whole else page is not None and not changed(page, stored, typed | others)
        if last or not is_same:
            self._show_conflict(page, stored)
        elif self._meta.model._meta.pk.name in typed:
            stored._state.adding = True  # under another key this is another object, which must be new

    def _keep(self, field: Any, value: Any) -> None:
        """Make the form write the stored value."""
        try:
            is_link = field.is_relation and not field.many_to_many
            self.cleaned_data[field.name] = getattr(self.instance, field.name) if is_link else value
        except ObjectDoesNotExist:  # the row has a dangling key, and keeps it
            del self.cleaned_data[field.name]

    def _typed(self, page: Page | None, stored: models.Model) -> set[str]:
        """Return the names of the fields of the model that the user has changed."""
        shown: Any = page or {"fields": {}, "alone": {}}
        secret = secret_of(page["secret"] if page else "")
        typed = set()
        for field in columns(stored, self.cleaned_data):
            value, mine = field.value_from_object(stored), self.cleaned_data[field.name]
            sent = digest(field, mine, secret)
            if sent in (shown["fields"].get(field.name), shown["alone"].get(field.name), digest(field, value, secret)):
                continue
            if sent != digest(field, sent_back(self.fields.get(field.name), value), secret):
                typed.add(field.name)
        return typed

    def _is_kept(self, page: Page) -> bool:
        """Report an object or a row that was deleted since the page was made. Return whether the form counts."""
        model, key = self._meta.model, key_of(page, self._meta.model)
        if self.saving is None or not (self.saving.deleted or self.part != "object"):
            if key and not model._base_manager.using(router.db_for_write(model)).filter(pk=key).exists():
                self._show_deleted()  # if the object still exists, this is "save as new"
            return True
        if self.part == "object":
            self._show_deleted()
        if self.part == "object" or self.saving.anew:
            return True
        typed = self._typed(page, self.instance) & page["fields"].keys()
        if self.part == "row" and typed and not self.cleaned_data.get(DELETION_FIELD_NAME):
            self._refuse(_("This row was deleted meanwhile. Copy what you typed, and mark the row for deletion."))
            return True
        if self.part == "list":
            said = [_("%s was deleted meanwhile.") % f"{capfirst(model._meta.verbose_name)} {key}"]
            said += [f"{self[name].label}: {self[name].value()}" for name in sorted(typed)]
            self.saving.notices.append(" ".join(said))
        return False

    def _refuse(self, text: str, code: str = "conflict") -> None:
        if self.saving is not None:
            self.saving.refused = True
        self.add_error(None, ValidationError(text, code=code))

    def _show_deleted(self) -> None:
        self.conflict = True
        if self.saving is None or not self.saving.refusals:
            show(self.fields[FIELD], "")
            text = _("Not saved: this was deleted while you were editing it. Save again to create it again.")
            self._refuse(text, "deleted")

    def _show_conflict(self, page: Page | None, stored: models.Model) -> None:
        self.conflict = True
        names = [name for name in page["fields"] if name in self.fields] if page else []
        fields = changed(page, stored, names) if page else []
        typed = self._typed(page, stored)
        for field in fields:
            if field.name not in typed and field.name in self.cleaned_data:
                show_again(self, field.name, field.value_from_object(stored))
        show(self.fields[FIELD], seal(stored, self.fields))
        self._refuse(say_changed(str(self[field.name].label) for field in fields))
        self.cleaned_data.pop(DELETION_FIELD_NAME, None)  # a formset deletes a row without looking at its errors


class VersionedModelForm(SealedModelForm):
    """The form of a model with a version.

    Any change of the object counts, even of fields that the form does not show.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if version_field(self._meta.model) is None:
            raise TypeError(f"{self._meta.model._meta.label} has no VersionField, which {type(self).__name__} needs")


def sealed(form: Any, request: Any, part: str = "object", **fields: Any) -> Any:
    """Return a form class that carries a seal, for a page of *request*, based on a form of any class.

    - fields: further form fields.
    """
    bases = (form,) if issubclass(form, SealedModelForm) else (SealedModelForm, form)
    own = {"__module__": form.__module__, "saving": Saving.of(request), "part": part, **fields}
    return type(form)(form.__name__, bases, own)
