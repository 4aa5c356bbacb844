"""The seal of a form: a signed record of what its page showed of one object, and the comparison when the page comes
back.

A seal has the version of a model that has one, and a digest of each value. It reveals no value, and cannot be forged.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeAlias, TypedDict

from django import forms
from django.conf import settings
from django.core import signing
from django.core.files.uploadedfile import UploadedFile
from django.db import models, router
from django.http import HttpRequest, QueryDict
from django.utils import timezone
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from .checking import version_field

SALT = "django_mongolock.versions"
#: Fields with a key or a file as value. Browsers send such values back as they are. Cleaning them would query the
#: database.
_UNCHANGED = (forms.FileField, forms.ModelChoiceField)
#: The name of a field in a form of its own.
_NAME = "field"
#: The fields of a form, by their names.
Fields: TypeAlias = Mapping[str, forms.Field | None]


class Page(TypedDict):
    """A record of what a page showed of one object.

    - name: model and key.
    - secret: name of the secret key for the digests.
    - version: version of the object.
    - fields: digest of each field.
    - alone: digest of the value that a browser sends back for an untouched field, if that differs from the stored
      value.
    """

    name: str
    secret: str
    version: int | None
    fields: dict[str, str]
    alone: dict[str, str]


def seal(instance: models.Model, fields: Fields) -> str:
    """Return the seal of a form that shows these fields of *instance*."""
    return signing.dumps(page_of(instance, fields), salt=SALT, compress=True)


def page_of(instance: models.Model, fields: Fields) -> Page:
    """Return the record of what a form shows."""
    secret = secret_name(settings.SECRET_KEY)
    page = Page(name=name_of(instance), secret=secret, version=_version(instance), fields={}, alone={})
    for field in columns(instance, fields):
        value = field.value_from_object(instance)
        page["fields"][field.name] = digest(field, value)
        if (other := digest(field, sent_back(fields[field.name], value))) != page["fields"][field.name]:
            page["alone"][field.name] = other
    return page


def unseal(sealed: str | None) -> Page | None:
    """Return the sealed page, or None for any other text."""
    with suppress(signing.BadSignature):
        page: Page = signing.loads(sealed or "", salt=SALT)
        return page
    return None


def is_current(page: Page | None, instance: models.Model) -> bool:
    """Return whether *instance* is as the page showed it. A page without a record is outdated."""
    return (
        page is not None
        and page["name"] == name_of(instance)
        and page["version"] == _version(instance)
        and not changed(page, instance, page["fields"])
    )


def changed(page: Page, instance: models.Model, names: Container[str]) -> list[models.Field[Any, Any]]:
    """Return which of these fields have another value in *instance* than the page showed."""
    secret = secret_of(page["secret"])
    return [
        field
        for field in columns(instance, names)
        if page["fields"].get(field.name) != digest(field, field.value_from_object(instance), secret)
    ]


def show_again(form: Any, name: str, value: Any) -> None:
    """Let a field of a bound form show *value*. A field of embedded documents reads its form's data, and needs a form
    of its own.
    """
    field = form.fields[name]
    show(field, value)
    if type(field).get_bound_field is not forms.Field.get_bound_field:
        unbound = forms.Form(initial={name: value}, prefix=form.prefix, auto_id=form.auto_id)
        form._bound_fields_cache[name] = field.get_bound_field(unbound, name)


def say_changed(names: Iterable[str]) -> str:
    """Return the message that names the fields changed since the page was made."""
    said = [_("Not saved: this was changed while you were editing it.")]
    if listed := ", ".join(dict.fromkeys(names)):
        said.append(_("Changed meanwhile: %s.") % listed)
    return " ".join((*said, _("What you typed is still here: save again to replace what is stored.")))


def copied(value: Any) -> Any:
    """Return the initial value of a field, with copies of embedded documents.

    django-mongodb-backend 6.1 writes the typed values into the initial documents, and these are the stored ones.
    """
    if isinstance(value, models.Model) and value.pk is None:
        fields = value._meta.concrete_fields
        return type(value)(**{field.attname: copied(field.value_from_object(value)) for field in fields})
    return [copied(each) for each in value] if isinstance(value, list) else value


def from_primary(request: HttpRequest, queryset: Any) -> Any:
    """When saving, read from the primary, because a replica may be behind.

    A queryset that names its database keeps it.
    """
    if request.method != "POST" or queryset._db is not None:
        return queryset
    return queryset.using(router.db_for_write(queryset.model))


def show(field: forms.Field, value: Any) -> None:
    """Let a field of a bound form show *value*, whatever was sent."""
    field.bound_data = lambda *_: value  # type: ignore[method-assign]


def secret_name(secret: str | bytes) -> str:
    """Return the name of a secret. `secret_of` finds the secret by this name after the project has got a new one."""
    return salted_hmac(f"{SALT}.key", "", secret=secret, algorithm="sha256").hexdigest()[:8]


def secret_of(name: str) -> str | bytes:
    """Return the SECRET_KEY, or the one of SECRET_KEY_FALLBACKS, with this name. Without a match, return the present
    one.
    """
    known: tuple[str | bytes, ...] = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return next((secret for secret in known if secret_name(secret) == name), known[0])


def digest(field: models.Field[Any, Any], value: Any, secret: str | bytes | None = None) -> str:
    """Return a few characters that differ if the value differs. This never raises for a Python value of the field.

    Without the secret, the digest reveals nothing about the value. A form therefore does not reveal values such as a
    password.
    """
    if field.many_to_many:
        text = ",".join(sorted(str(getattr(one, "pk", one)) for one in value or ()))
    else:
        if isinstance(value, models.Model) and (field.is_relation or field.primary_key):
            value = getattr(value, getattr(field, "target_field", value._meta.pk).attname)
        text = _text(value)
    made = salted_hmac(f"{SALT}.{field}", text.encode(errors="surrogatepass"), secret=secret, algorithm="sha256")
    return made.hexdigest()[:12]


def _text(value: Any) -> str:
    """Return a text that is the same for equal values."""
    text = "\0" if value is None else ""
    if isinstance(value, UploadedFile):
        text = f"new file {value.name}"  # a new file may have the name of the stored one
    elif isinstance(value, models.Model):
        parts = {field.attname: field.value_from_object(value) for field in value._meta.concrete_fields}
        text = f"{value._meta.label} {_text(parts)}"
    elif isinstance(value, Mapping):
        text = f"{{{','.join(sorted(f'{_text(key)}:{_text(part)}' for key, part in value.items()))}}}"
    elif isinstance(value, (list, tuple)):
        text = f"[{','.join(map(_text, value))}]"
    elif isinstance(value, (set, frozenset)):
        text = f"[{','.join(sorted(map(_text, value)))}]"
    elif isinstance(value, datetime) and timezone.is_aware(value):
        text = str(value.astimezone(UTC))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        text = bytes(value).hex()
    elif isinstance(value, Decimal) and value.is_finite():
        text = str(value.normalize())
    elif not isinstance(value, str) and " object at 0x" in str(value):
        text = f"{type(value).__qualname__} {_text(getattr(value, '__dict__', {}))}"  # the value has no text of its own
    return text or str(value)


def columns(instance: models.Model, names: Container[str]) -> list[Any]:
    """Return the fields of the model that are among *names*."""
    options = instance._meta
    return [field for field in (*options.concrete_fields, *options.many_to_many) if field.name in names]


def name_of(instance: models.Model) -> str:
    """Return the name of an object, by model and key."""
    return f"{_prefix(instance)}{instance.pk}"


def key_of(page: Page | None, model: type[models.Model]) -> str | None:
    """Return the key of the object that a page has shown, or None if there is none or it is of another model."""
    found = page is not None and page["name"].startswith(_prefix(model))
    return page["name"].removeprefix(_prefix(model)) if page is not None and found else None


def _prefix(model: models.Model | type[models.Model]) -> str:
    return f"{(model._meta.concrete_model or model)._meta.label} "


def _version(instance: models.Model) -> int | None:
    field = version_field(instance._meta.model)  # its type may be that of `request.user`, a SimpleLazyObject
    return getattr(instance, field.attname) if field else None


def sent_back(field: forms.Field | None, value: Any) -> Any:
    """Return the form's value after a browser has shown *value* and sent it back. Return *value* itself if that is not
    valid.

    The result may differ from the stored value. A text area gets other line ends, a text field loses them, a date loses
    its microseconds. The form also strips text.
    """
    if (
        field is None
        or isinstance(field, _UNCHANGED)
        or (isinstance(value, list) and any(isinstance(each, models.Model) for each in value))
    ):
        return value  # embedded documents in a list are forms of their own
    widget: Any = getattr(field.widget, "widget", field.widget)  # the admin wraps some
    try:
        shown = widget.get_context(_NAME, field.prepare_value(value), {})["widget"]
        data = QueryDict(mutable=True)
        _send(shown, data)
        return field.clean(widget.value_from_datadict(data, {}, _NAME))
    except Exception:  # noqa: BLE001 - a ValidationError, or any error of a field or widget of any kind
        return value


def _send(shown: Mapping[str, Any], data: QueryDict) -> None:
    """Put into *data* what a browser sends for a widget and its subwidgets."""
    for part in shown.get("subwidgets", ()):
        _send(part, data)
    value = shown.get("value")
    if shown.get("type") == "checkbox" and "optgroups" not in shown:
        value = (value or "on") if shown["attrs"].get("checked") else None
    if "subwidgets" in shown or value is None:
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    line_end = "" if "type" in shown else "\r\n"  # an input has no line ends, and a text area those of the network
    data.setlist(shown["name"], [re.sub(r"\r\n|\r|\n", line_end, str(each)) for each in values])
