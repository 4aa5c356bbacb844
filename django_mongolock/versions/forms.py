"""A form that knows what its page showed, and says what has changed since instead of overwriting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import models, router
from django.forms.formsets import DELETION_FIELD_NAME

from .checking import UnlessOvertaken, version_field
from .seal import (
    Fields,
    Pages,
    begin_apart,
    columns,
    digest,
    is_unchanged,
    keep_what_no_page_shows,
    keys_of,
    name_of,
    say_changed,
    say_deleted,
    seal,
    show,
    show_stored,
    unseal,
)

__all__ = ["SealedModelForm", "VersionedModelForm"]

if TYPE_CHECKING:
    ModelForm = forms.ModelForm[Any]
else:
    ModelForm = forms.ModelForm

#: The hidden field that carries the seal.
FIELD = "version_read"


class SealField(forms.CharField):
    """The seal of the page. It never counts as a change."""

    widget = forms.HiddenInput

    def __init__(self) -> None:
        super().__init__(required=False, label="")

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class SealedModelForm(ModelForm):
    """A ModelForm whose page carries what it showed, in the hidden field `version_read`: the version of a model that
    has one, and a digest of each field.

    If that is not what is stored when the page comes back, the form is not valid: it says which fields were changed
    meanwhile. What was typed stays in its field; a field that the user had not changed takes the stored value. The page
    then carries what is stored, so sending it again saves it. A page that does not say, or with a forged text, is
    treated as one that has shown nothing.

    A change between is_valid() and the save raises VersionConflict; `try_save` shows the same page instead.
    """

    version_read = SealField()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        begin_apart(self)
        if not self.instance._state.adding:
            self.initial[FIELD] = seal([(self.instance, self.fields)])
        #: Whether the object was changed or deleted since the page was made.
        self.conflict = False

    def _post_clean(self) -> None:
        """Compare the versions before Django puts the typed values into the instance."""
        pages = self._pages()
        keep_what_no_page_shows(self)
        if self.instance._state.adding:
            model = self._meta.model
            keys = keys_of(pages or {}, model)
            if keys and not model._base_manager.using(router.db_for_write(model)).filter(pk__in=keys).exists():
                self._show_deleted()  # where it is still there, this is "save as new"
        elif not is_unchanged(pages, [(self.instance, self._shown(pages))]) and self._writes_anything():
            self._show_conflict(self.instance)
        super()._post_clean()  # type: ignore[misc]

    def try_save(self) -> bool:
        """Save, and return whether it was saved. If another writer was faster, the form shows the conflict."""
        using = router.db_for_write(self._meta.model, instance=self.instance)
        with UnlessOvertaken(using):
            self.save()
            return True
        stored = self._meta.model._base_manager.using(using).filter(pk=self.instance.pk).first()
        if stored is None:
            self.instance._state.adding = True
            self._show_deleted()
        else:
            self._show_conflict(stored)
            self.instance = stored
        return False

    def _writes_anything(self) -> bool:
        """Return whether the form differs from what is stored. (`has_changed` compares with `initial`.)"""
        own = columns(self.instance, self.fields)
        others = set(self.changed_data) - {field.name for field in own}
        same = all(
            field.name in self.cleaned_data
            and digest(field, self.cleaned_data[field.name]) == digest(field, field.value_from_object(self.instance))
            for field in own
        )
        return bool(others) or not same

    def _pages(self) -> Pages | None:
        pages: Pages | None = unseal(self.data.get(self.add_prefix(FIELD)))
        return pages

    def _shown(self, pages: Pages | None) -> Fields:
        """Return the fields that the page has shown. A formset has added others since."""
        return dict.fromkeys(pages[name]["fields"]) if pages and (name := name_of(self.instance)) in pages else {}

    def _show_deleted(self) -> None:
        self.conflict = True
        show(self.fields[FIELD], "")
        self.add_error(None, ValidationError(say_deleted(), code="deleted"))

    def _show_conflict(self, stored: models.Model) -> None:
        self.conflict = True
        page = (self._pages() or {}).get(name_of(stored))
        names = show_stored(self, page, stored) if page else []
        show(self.fields[FIELD], seal([(stored, self.fields)]))
        self.add_error(None, ValidationError(say_changed(names), code="conflict"))
        self.cleaned_data.pop(DELETION_FIELD_NAME, None)  # a formset deletes a row without looking at its errors


class VersionedModelForm(SealedModelForm):
    """The form of a model with a version: any change of the object counts, also of what the form does not show."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if version_field(self._meta.model) is None:
            raise TypeError(f"{self._meta.model._meta.label} has no VersionField, which {type(self).__name__} needs")
