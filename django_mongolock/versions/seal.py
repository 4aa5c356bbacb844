"""The seal of a page: what it showed, signed into it; and what has changed when it comes back.

It is the version of a model that has one, and a digest of each value. It reveals no value, and cannot be forged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, TypedDict

from django import forms
from django.core import signing
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db import models, router
from django.http import HttpRequest, QueryDict
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from .checking import plain, version_field, version_read

SALT = "django_mongolock.versions"
#: Fields whose value is a key or a file, which come back as they are; to clean them, the database would be asked.
_UNCHANGED = (forms.FileField, forms.ModelChoiceField)
#: The name that a field has in a form of its own.
_NAME = "field"
#: The fields of a form, by their names.
Fields: TypeAlias = Mapping[str, forms.Field | None]
#: Objects, each with the fields that the page has for it.
Shown: TypeAlias = Iterable[tuple[models.Model, Fields]]


class Page(TypedDict):
    """What a page showed of one object: its version, and a digest of each field.

    alone: the digest of what a browser sends back of a field that is left alone, if that is not what is stored.
    """

    version: int | None
    fields: dict[str, str]
    alone: dict[str, str]


#: What a page showed, by the names of the objects.
Pages: TypeAlias = dict[str, Page]


def seal(shown: Shown) -> str:
    """Return the seal of a page that shows this."""
    return signing.dumps(pages_of(shown), salt=SALT, compress=True)


def unseal(sealed: str | None, salt: str = SALT) -> Any:
    """Return the `Pages` that were sealed, or what else was signed; None for anything else."""
    with suppress(signing.BadSignature):
        return signing.loads(sealed or "", salt=salt)
    return None


def pages_of(shown: Shown) -> Pages:
    """Return what a page shows. An object may be in it twice, with other fields."""
    pages: Pages = {}
    for instance, fields in shown:
        page = pages.setdefault(name_of(instance), {"version": _version(instance), "fields": {}, "alone": {}})
        for field in columns(instance, fields):
            value = field.value_from_object(instance)
            page["fields"][field.name] = digest(field, value)
            if (other := digest(field, sent_back(fields[field.name], value))) != page["fields"][field.name]:
                page["alone"][field.name] = other
    return pages


def is_unchanged(had: Pages | None, shown: Shown) -> bool:
    """Return whether all that the page *had* is as it was, and no object is there besides. It counts as changed if the
    page does not say."""
    now = list(shown)
    if had is None or had.keys() != {name_of(instance) for instance, _fields in now}:
        return False
    pages = [(had[name_of(instance)], instance, fields) for instance, fields in now]
    return all(page["version"] == _version(one) and not changed(page, one, fields) for page, one, fields in pages)


def changed(page: Page, instance: models.Model, names: Container[str]) -> list[models.Field[Any, Any]]:
    """Return which of these fields have another value in *instance* than the page showed."""
    shown = page["fields"]
    return [
        field
        for field in columns(instance, names)
        if shown.get(field.name) != digest(field, field.value_from_object(instance))
    ]


def show_stored(form: Any, page: Page, stored: models.Model) -> list[str]:
    """Let each field of a bound form that was left alone show what is *stored* now. Return the names, for people, of
    the fields that have changed since the page was made."""
    fields = changed(page, stored, [name for name in page["fields"] if name in form.fields])
    for field in fields:
        typed = digest(field, form.cleaned_data[field.name]) if field.name in form.cleaned_data else ""
        if typed in (page["fields"].get(field.name), page["alone"].get(field.name)):
            _show_again(form, field.name, field.value_from_object(stored))
    return [str(form[field.name].label) for field in fields]


def _show_again(form: Any, name: str, value: Any) -> None:
    """Let a field show *value*, also one of embedded documents, which asks the data of its form."""
    field = form.fields[name]
    show(field, value)
    if type(field).get_bound_field is not forms.Field.get_bound_field:
        unbound = forms.Form(initial={name: value}, prefix=form.prefix, auto_id=form.auto_id)
        form._bound_fields_cache[name] = field.get_bound_field(unbound, name)


def say_changed(names: Iterable[str]) -> str:
    """Say that something was changed since the page was made, and which fields."""
    said = [_("Not saved: this was changed while you were editing it.")]
    if listed := ", ".join(dict.fromkeys(names)):
        said.append(_("Changed meanwhile: %s.") % listed)
    return " ".join((*said, _("What you typed is still here: save again to replace what is stored.")))


def say_deleted() -> str:
    """Say that it was deleted since the page was made."""
    return _("Not saved: this was deleted while you were editing it. Save again to create it again.")


def begin_apart(form: Any) -> None:
    """Have a form begin with copies of embedded documents. django-mongodb-backend 6.1 puts what is typed into those
    that it begins with, and they are what is stored."""
    form.initial = {name: _copy(value) for name, value in form.initial.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, models.Model) and value.pk is None:
        fields = value._meta.concrete_fields
        return type(value)(**{field.attname: _copy(field.value_from_object(value)) for field in fields})
    return [_copy(each) for each in value] if isinstance(value, list) else value


def keep_what_no_page_shows(form: Any) -> None:
    """Keep what is stored, with its microseconds and line ends, if the form has what a browser sends back of it.

    What has got another key is another object, which must not be there yet.
    """
    for field in () if form.instance._state.adding else columns(form.instance, form.cleaned_data):
        stored = field.value_from_object(form.instance)
        alone, typed = digest(field, sent_back(form.fields.get(field.name), stored)), form.cleaned_data[field.name]
        if alone != digest(field, stored) and alone == digest(field, typed):
            form.cleaned_data[field.name] = stored
        elif field.primary_key and digest(field, typed) != digest(field, stored):
            form.instance._state.adding = True


def from_primary(request: HttpRequest, queryset: Any) -> Any:
    """When saving, read from the primary: a replica may be behind."""
    return queryset.using(router.db_for_write(queryset.model)) if request.method == "POST" else queryset


def show(field: forms.Field, value: Any) -> None:
    """Let a field of a bound form show *value*, whatever was sent."""
    field.bound_data = lambda *_: value  # type: ignore[method-assign]


def digest(field: models.Field[Any, Any], value: Any) -> str:
    """Return a few characters that differ where the value differs. Without the project's SECRET_KEY they say nothing of
    the value: a form need not show what it has, such as a password."""
    if isinstance(value, UploadedFile):
        text = f"new file {value.name}"  # also under the name of the one that is stored
    elif field.many_to_many:
        text = ",".join(sorted(str(getattr(one, "pk", one)) for one in value or ()))
    else:
        if isinstance(value, models.Model) and (field.is_relation or field.primary_key):
            value = getattr(value, getattr(field, "target_field", value._meta.pk).attname)
        value = plain(field, value if value is not None or field.null else "")
        text = json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)
    return salted_hmac(f"{SALT}.{field}", text.encode(errors="surrogatepass"), algorithm="sha256").hexdigest()[:12]


def columns(instance: models.Model, names: Container[str]) -> list[Any]:
    """Return the fields of the model that are among *names*."""
    options = instance._meta
    return [field for field in (*options.concrete_fields, *options.many_to_many) if field.name in names]


def name_of(instance: models.Model) -> str:
    """Return the name of an object, by model and key."""
    return f"{_prefix(instance)}{instance.pk}"


def keys_of(pages: Pages, model: type[models.Model]) -> list[str]:
    """Return the keys of the objects of *model* that a page has shown."""
    return [name.removeprefix(_prefix(model)) for name in pages if name.startswith(_prefix(model))]


def _prefix(model: models.Model | type[models.Model]) -> str:
    return f"{(model._meta.concrete_model or model)._meta.label} "


def _version(instance: models.Model) -> int | None:
    field = version_field(instance._meta.model)  # its type may be that of `request.user`, a SimpleLazyObject
    return version_read(instance, field) if field else None


def sent_back(field: forms.Field | None, value: Any) -> Any:
    """Return what the form makes of *value* after a browser has shown it; *value* itself if that is not valid.

    It is not always what is stored: a text area gets other line ends, a text field loses them, a date its microseconds;
    and the form strips what it gets.
    """
    if (
        field is None
        or isinstance(field, _UNCHANGED)
        or (isinstance(value, list) and any(isinstance(each, models.Model) for each in value))
    ):
        return value  # embedded documents in a list are forms of their own, which the widget does not show
    widget: Any = getattr(field.widget, "widget", field.widget)  # the admin wraps some
    try:
        shown = widget.get_context(_NAME, field.prepare_value(value), {})["widget"]
        data = QueryDict(mutable=True)
        _send(shown, data)
        return field.clean(widget.value_from_datadict(data, {}, _NAME))
    except (ValidationError, TypeError, ValueError, KeyError, AttributeError):  # a widget may be of any kind
        return value


def _send(shown: Mapping[str, Any], data: QueryDict) -> None:
    """Put into *data* what a browser sends of a widget, and of those that it consists of."""
    for part in shown.get("subwidgets", ()):
        _send(part, data)
    value = shown.get("value")
    if shown.get("type") == "checkbox" and "optgroups" not in shown:
        value = (value or "on") if shown["attrs"].get("checked") else None
    if "subwidgets" in shown or value is None:
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    data.setlist(shown["name"], [_as_text(each, in_line="type" in shown) for each in values])


def _as_text(value: Any, *, in_line: bool) -> str:
    """Return the text as browsers send it: an input has no line ends, a text area those of the network."""
    return re.sub(r"\r\n|\r|\n", "" if in_line else "\r\n", str(value))
