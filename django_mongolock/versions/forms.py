"""A form that knows the version its page was made of, and shows what has changed since instead of overwriting it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress
from datetime import UTC, datetime, time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from django import forms
from django.core import signing
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db import models, router
from django.utils import timezone
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from ..exceptions import VersionConflict
from .checking import all_or_nothing, version_field, version_read
from .sent_back import sent_back

__all__ = ["SealedModelForm", "VersionedModelForm"]

if TYPE_CHECKING:
    ModelForm = forms.ModelForm[Any]
else:
    ModelForm = forms.ModelForm

SALT = "django_mongolock.versions"
#: The hidden field that carries the version.
FIELD = "version_read"
#: The fields of a form, by their names.
Fields: TypeAlias = Mapping[str, forms.Field | None]


class Page(TypedDict):
    """What a page was made of: of which object (model and key), in which version, and a digest of each field.

    alone: the digest of what a browser sends back of a field that is left alone, if that is not what is stored.
    """

    of: list[str]
    version: int | None
    fields: dict[str, str]
    alone: dict[str, str]


class SignedVersion(forms.CharField):
    """What the page was made of, signed. It never counts as a change."""

    widget = forms.HiddenInput

    def __init__(self) -> None:
        super().__init__(required=False, label="")

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class SealedModelForm(ModelForm):
    """A ModelForm whose page carries what it was made of, in the hidden field `version_read`: the version of a model
    that has one, and a digest of each field.

    If that is not what is stored when the page comes back, the form is not valid: it says so, and shows at each
    field that has changed what is stored now. What was typed stays in its field; a field that the user had not changed
    takes the stored value. The page then carries what is stored, so sending it again saves it. A page that
    does not say, or with a forged text, is treated as one that has shown nothing.

    A change between is_valid() and the save raises VersionConflict; `try_save` shows the same page instead.
    """

    version_read = SignedVersion()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.instance._state.adding:
            self.initial[FIELD] = sign(self.instance, self.fields)
        #: Whether the object was changed or deleted since the page was made.
        self.conflict = False

    def _post_clean(self) -> None:
        """Compare the versions before Django puts the typed values into the instance."""
        page = self._page()
        keep_what_no_page_shows(self)
        if self.instance._state.adding:
            if page is not None and not self._meta.model._base_manager.filter(pk=page["of"][1]).exists():
                self._show_deleted()  # where it is still there, this is "save as new"
        elif not is_current(page, self.instance) and self._writes_anything():
            self._show_conflict(self.instance, page)
        super()._post_clean()  # type: ignore[misc]

    def try_save(self) -> bool:
        """Save, and return whether it was saved. If another writer was faster, the form shows the conflict."""
        using = router.db_for_write(self._meta.model, instance=self.instance)
        page = self._page()
        try:
            with all_or_nothing(using):
                self.save()
        except VersionConflict:
            stored = self._meta.model._base_manager.using(using).filter(pk=self.instance.pk).first()
            if stored is None:
                self.instance._state.adding = True
                self._show_deleted()
            else:
                self._show_conflict(stored, page)
                self.instance = stored
            return False
        return True

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

    def _page(self) -> Page | None:
        """Return what the page was made of; None if it does not say, or if it is about another object."""
        page: Page | None = unsign(self.data.get(self.add_prefix(FIELD)))
        return page if page and (self.instance._state.adding or page["of"] == _name(self.instance)) else None

    def _show_deleted(self) -> None:
        self.conflict = True
        show(self.fields[FIELD], "")
        message = _("This was deleted while you were editing it. Save again to create it again.")
        self.add_error(None, ValidationError(message, code="deleted"))

    def _show_conflict(self, stored: models.Model, page: Page | None) -> None:
        self.conflict = True
        typed = dict(self.cleaned_data)
        token = sign(stored, self.fields)
        show(self.fields[FIELD], token)
        message = _("This was changed while you were editing it. Look at what changed, then save again.")
        self.add_error(None, ValidationError(message, code="conflict"))
        for field in columns(stored, self.fields):
            self._show_field(field, stored, typed, page)

    def _show_field(
        self, field: models.Field[Any, Any], stored: models.Model, typed: dict[str, Any], page: Page | None
    ) -> None:
        now = field.value_from_object(stored)
        if page and digest(field, now) == page["fields"].get(field.name):
            return  # no one else changed it
        mine = digest(field, typed[field.name]) if field.name in typed else None
        if mine in (digest(field, now), digest_left_alone(field, self.fields[field.name], now)):
            return  # all agree
        if was_left_alone(page, field, mine):
            message = _("Changed meanwhile to “%(stored)s”; you had not changed it.")
            show(self.fields[field.name], now)
        else:
            message = _("Changed meanwhile to “%(stored)s”. Save again to replace it with what you wrote.")
        shown = ValidationError(message, code="conflict", params={"stored": display(field, stored)})
        self.add_error(field.name, shown)


class VersionedModelForm(SealedModelForm):
    """The form of a model with a version: any change of the object counts, also of what the form does not show."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if version_field(self._meta.model) is None:
            raise TypeError(f"{self._meta.model._meta.label} has no VersionField, which {type(self).__name__} needs")


def keep_what_no_page_shows(form: Any) -> None:
    """Keep what is stored, with its microseconds and line ends, if the form has what a browser sends back of it."""
    for field in () if form.instance._state.adding else columns(form.instance, form.cleaned_data):
        stored = field.value_from_object(form.instance)
        alone = digest_left_alone(field, form.fields.get(field.name), stored)
        if alone != digest(field, stored) and alone == digest(field, form.cleaned_data[field.name]):
            form.cleaned_data[field.name] = stored


def show(field: forms.Field, value: Any) -> None:
    """Let a field of a bound form show *value*, whatever was sent."""
    field.bound_data = lambda *_: value  # type: ignore[method-assign]


def sign(instance: models.Model, fields: Fields = MappingProxyType({})) -> str:
    """Return what a page of *instance* with the form's *fields* is made of, signed. It reveals no value."""
    return signing.dumps(page_of(instance, fields), salt=SALT)


def page_of(instance: models.Model, fields: Fields) -> Page:
    """Return what a page of *instance* with the form's *fields* is made of."""
    digests, alone = {}, {}
    for field in columns(instance, fields):
        value = field.value_from_object(instance)
        digests[field.name] = digest(field, value)
        if (other := digest_left_alone(field, fields[field.name], value)) != digests[field.name]:
            alone[field.name] = other
    return {"of": _name(instance), "version": _version(instance), "fields": digests, "alone": alone}


def was_left_alone(page: Page | None, field: models.Field[Any, Any], mine: str | None) -> bool:
    """Return whether the digest of what came back is that of what the page had shown."""
    return (
        page is not None
        and mine is not None
        and mine in (page["fields"].get(field.name), page["alone"].get(field.name))
    )


def is_current(page: Page | None, instance: models.Model, names: Container[str] | None = None) -> bool:
    """Return whether *instance* has the version and the values that the page shows. names: the fields that count."""
    if page is None or page["of"] != _name(instance) or page["version"] != _version(instance):
        return False
    shown = page["fields"]
    own = columns(instance, shown if names is None else names)
    return all(shown.get(field.name) == digest(field, field.value_from_object(instance)) for field in own)


def unsign(signed: str | None, salt: str = SALT) -> Any:
    """Return what was signed; None for anything else."""
    with suppress(signing.BadSignature):
        return signing.loads(signed or "", salt=salt)
    return None


def digest(field: models.Field[Any, Any], value: Any) -> str:
    """Return a few characters that differ where the value differs. Without the project's SECRET_KEY they say nothing of
    the value: a form need not show what it has, such as a password."""
    if isinstance(value, UploadedFile):
        text = f"new file {value.name}"  # also under the name of the one that is stored
    elif field.many_to_many:
        text = ",".join(sorted(str(getattr(one, "pk", one)) for one in value or ()))
    else:
        if isinstance(value, models.Model):
            value = getattr(value, getattr(field, "target_field", value._meta.pk).attname)
        value = field.get_prep_value(value if value is not None or field.null else "")
        text = str(value.astimezone(UTC) if isinstance(value, datetime) and timezone.is_aware(value) else value)
    return salted_hmac(f"{SALT}.{field}", text.encode(errors="surrogatepass"), algorithm="sha256").hexdigest()[:12]


def digest_left_alone(field: models.Field[Any, Any], form_field: forms.Field | None, value: Any) -> str:
    """Return the digest of what comes back of *value* if a person leaves the field alone."""
    return digest(field, value if form_field is None else sent_back(form_field, value))


def display(field: models.Field[Any, Any], instance: models.Model) -> str:
    """Return what is stored as a page shows it."""
    return in_words(field, field.value_from_object(instance) if field.many_to_many else getattr(instance, field.name))


def in_words(field: models.Field[Any, Any], value: Any) -> str:
    """Return a value as a page shows it: times in the reader's time zone, to the second, as forms have them."""
    if field.many_to_many:
        return ", ".join(map(str, value or ()))
    if isinstance(value, datetime) and timezone.is_aware(value):
        value = timezone.localtime(value)
    if isinstance(value, datetime | time):
        value = value.replace(microsecond=0, tzinfo=None)
    if isinstance(field, models.FileField):
        value = value or ""  # False: to be removed
    return "" if value is None else str(dict(field.flatchoices).get(value, value) if field.choices else value)


def columns(instance: models.Model, names: Container[str]) -> list[Any]:
    """Return the fields of the model that are among *names*."""
    options = instance._meta
    return [field for field in (*options.concrete_fields, *options.many_to_many) if field.name in names]


def _version(instance: models.Model) -> int | None:
    field = version_field(type(instance))
    return version_read(instance, field) if field else None


def _name(instance: models.Model) -> list[str]:
    return [(instance._meta.concrete_model or type(instance))._meta.label, str(instance.pk)]
