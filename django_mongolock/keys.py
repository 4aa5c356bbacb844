"""The keys of locks, made from text, model instances, or a template such as ``"order:{order_id}"`` and a call."""

from __future__ import annotations

import difflib
import inspect
import operator
import re
import string
import unicodedata
import uuid
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final, Self
from urllib.parse import quote

from django.apps import apps
from django.core.exceptions import ValidationError
from django.core.validators import validate_slug
from django.db import DEFAULT_DB_ALIAS, router
from django.db.models import Model, OneToOneField

from .conf import SEPARATORS
from .engine.text_checks import MAX_TEXT_LENGTH, check_length
from .exceptions import LockKeyInvalid

__all__ = ["lock_key"]

# A separator stands between two fields of a template. In a value it is escaped, so that values with different texts
# never make the same key.
_ESCAPES: Final = {ord(character): f"%{ord(character):02X}" for character in "%" + SEPARATORS}


def escape(value: object) -> str:
    """Return the text of a value in a key, with the separators escaped.

    Raise TypeError for values without a text of their own (None, containers, bytes, model instances, objects that only
    show their address). Two processes would not agree on such a text, or two values would share it. Raise ValueError
    for text that is too long for a key.
    """
    if value is None or isinstance(value, (bytes, bytearray, memoryview, dict, list, set, frozenset, tuple)):
        raise TypeError(f"a value of type {type(value).__name__} cannot be part of a key")
    if isinstance(value, Model):
        raise TypeError(f"a {type(value).__name__} instance cannot be part of a key: use its .pk")
    text = str(value)
    check_length("a lock key", text)
    # Compose first, then escape. For example, composing turns U+037E into a semicolon.
    text = unicodedata.normalize("NFC", text)
    if not isinstance(value, str) and " at 0x" in text:
        raise TypeError(f"a {type(value).__name__} has no text of its own that could be part of a key")
    # A combining character at the start would change the separator before it into another character.
    first = quote(text[0]) if text and unicodedata.combining(text[0]) else text[:1].translate(_ESCAPES)
    return first + text[1:].translate(_ESCAPES)


def model_key(instance: Model) -> str:
    """Return the key of a saved model instance: see `row_key`. Raise ValueError without a primary key."""
    return row_key(
        instance._meta.model, instance.pk, home_of(instance)
    )  # not type(instance): a lazy object has another


def home_of(instance: Model) -> str:
    """Return the DATABASES alias that an instance is written to. A row read from a replica has the same alias."""
    alias: str = router.db_for_write(_topmost_model(instance._meta.model), instance=instance)
    return alias


def person_id(user: Any) -> str:
    """Return the identity of a user: primary key, and alias of a database that is not the default one."""
    alias = home_of(user) if isinstance(user, Model) else DEFAULT_DB_ALIAS
    return str(user.pk) if alias == DEFAULT_DB_ALIAS else f"{alias}/{user.pk}"


def row_key(model: type[Model], pk: object, using: str = DEFAULT_DB_ALIAS) -> str:
    """Return the key of a row, such as ``"shop.order:<pk>"``.

    A composite primary key gives ``"shop.line:<first>,<second>"``. A row in another database than the default one has
    its alias at the start (``"eu/shop.order:<pk>"``).

    A row has one key, whichever model reads it. A proxy has the key of the concrete model. In multi-table inheritance,
    a child shares the primary key of its parent, and has the key of the topmost model. Raise ValueError for None.
    """
    parts = pk if isinstance(pk, tuple) else (pk,)
    if None in parts:
        raise ValueError(f"{model.__name__} has no primary key yet: save it before you lock it")
    return f"{_home(model, using)}:{','.join(map(escape, parts))}"


def row_template(model: type[Model], using: str = DEFAULT_DB_ALIAS) -> str:
    """Return the template of the keys of the rows of *model*."""
    return f"{_home(model, using)}:{{pk}}"


def _home(model: type[Model], using: str) -> str:
    label = _topmost_model(model)._meta.label_lower
    return label if using == DEFAULT_DB_ALIAS else f"{escape(using)}/{label}"


def _topmost_model(model: type[Model]) -> type[Model]:
    """Return the model whose table the primary key comes from."""
    concrete = model._meta.concrete_model or model
    link = concrete._meta.pk
    if isinstance(link, OneToOneField) and link.remote_field.parent_link:
        return _topmost_model(link.remote_field.model)
    return concrete


#: A field of a template. In a plain key, such a field was never filled.
_FIELD: Final = re.compile(r"\{[^\W\d]\w*([.\[!:][^{}]*)?\}")


class LockKey(str):
    """A key with its template. Metrics are counted by template."""

    __slots__ = ("template",)
    template: str

    def __new__(cls, key: str, template: str) -> Self:
        made = super().__new__(cls, key)
        made.template = template
        return made

    def __reduce__(self) -> tuple[type[LockKey], tuple[str, str]]:
        return LockKey, (str(self), self.template)


def as_key(source: object) -> object:
    """Return the key of a model instance. Return other values unchanged, for `check_key`.

    Raise TypeError for several keys or a model. Raise LockKeyInvalid for plain text with a field in it, because such a
    text would be one key for every value.
    """
    if isinstance(source, Model):
        return model_key(source)
    if isinstance(source, (list, tuple, set, frozenset)):
        raise TypeError(f"a lock key must be a str, not {type(source).__name__}: pass several as mongo_lock(*keys)")
    if isinstance(source, type) and issubclass(source, Model):
        raise TypeError(
            f"a lock key must be a str, not a model: pass an instance of {source.__name__}, or, as one key for all of "
            f"them, {source._meta.label_lower!r}"
        )
    if type(source) is LockKey:
        return str(source)
    if type(source) is str and (field := _FIELD.search(source[:MAX_TEXT_LENGTH])):
        text = source if len(source) <= 200 else f"{source[:200]}…"
        raise LockKeyInvalid(
            f"the key {text!r} has the field {field[0][:50]!r}, which nothing fills: make it with lock_key(template, "
            "name=value), where braces in a value are data. In a template, double braces that are text"
        )
    return source


def template_of(source: object) -> str:
    """Return the template of a key, or "" if unknown."""
    if isinstance(source, Model):
        return row_template(source._meta.model, home_of(source))
    return source.template if type(source) is LockKey else ""


class KeyTemplate(string.Formatter):
    """A template that makes keys from the arguments of a call, such as ``"sync:{account.pk}:{kind}"``.

    Fields are names of parameters, with attributes, items and formats as in `str.format`. Instead of a format, a field
    may name a form. The value is converted to that form. ``{order_id:shop.Order}`` is the form of the model's primary
    key. Other forms are ``{number:int}``, ``{id:uuid}``, ``{name:slug}``.

    - names: parameters that the template uses.
    - plain: parameters whose text is used unchanged.

    Raises ValueError for a template with an unnamed field, or without a separator between two fields.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self.names: set[str] = set()
        self.plain: set[str] = set()
        self.forms: set[str] = set()
        try:
            parts = list(self.parse(template))
        except ValueError as error:
            raise ValueError(f"key template {template!r}: {error}") from None
        between: str | None = None
        for literal, name, spec, conversion in parts:
            between = None if between is None else between + literal
            if re.search(r"%(\(\w+\))?[sd]\b", literal):
                raise ValueError(f"key template {template!r}: name a parameter in braces, as in 'order:{{order_id}}'")
            if name is None:
                continue
            if between is not None and not set(between) & set(SEPARATORS):
                raise ValueError(
                    f"key template {template!r}: put one of {SEPARATORS} between two fields, or calls with different "
                    "values could make the same key"
                )
            for used in (name, *(inner for _, inner, _, _ in self.parse(spec or "") if inner is not None)):
                self._add_name(used)
            if not spec and not conversion:
                self.plain.add(name)
            elif spec and is_form(spec):
                self.forms.add(spec)
            between = ""
        if apps.models_ready:
            self.check_forms()

    def _add_name(self, field_name: str) -> None:
        first = field_name.partition(".")[0].partition("[")[0]
        if not first.isidentifier():
            raise ValueError(f"key template {self.template!r}: name a parameter in each {{}}, not {field_name!r}")
        self.names.add(first)

    def check_forms(self) -> None:
        """Raise ValueError for a model that does not exist, or has no single primary key. All models must be loaded."""
        for form in self.forms - _FORMS.keys():
            try:
                _primary_key(form)
            except LookupError as error:
                raise ValueError(f"key template {self.template!r}: {error.args[0]}") from None

    def check(self, signature: inspect.Signature, function: str) -> None:
        """Raise TypeError if the template uses a name that is no parameter of the function."""
        parameters = signature.parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        if missing := sorted(self.names - set(parameters)):
            raise TypeError(
                f"key template {self.template!r}: {function} has no parameter {', '.join(missing)}; "
                f"it has {', '.join(parameters) or 'none'}"
            )

    def fill(self, arguments: dict[str, Any]) -> LockKey:
        """Return the key of one call.

        Raise LockKeyInvalid for a value that makes no key, and TypeError for a type that never does.
        """
        try:
            return LockKey(self.vformat(self.template, (), arguments), self.template)
        except ValueError as error:
            raise LockKeyInvalid(f"key template {self.template!r}: {error}") from error.__cause__
        except TypeError as error:
            raise TypeError(f"key template {self.template!r}: {error}") from None

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            value, used = super().get_field(field_name, args, kwargs)
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"no {field_name!r} in this call ({error})") from error
        if value is None:
            raise ValueError(f"{field_name!r} is None: calls without a value would share one key")
        if isinstance(value, Model):
            raise TypeError(f"{field_name!r} is {type(value).__name__}: use {{{field_name}.pk}}")
        if isinstance(value, (str, bytes, bytearray)):
            check_length("a lock key", value)  # before a conversion or a format makes it longer
        return value, used

    def format_field(self, value: Any, format_spec: str) -> str:
        if is_form(format_spec):
            return escape(in_form(value, format_spec))
        if not format_spec:
            return escape(value)
        _check_format(value, format_spec)
        return escape(format(value, format_spec))


def _check_format(value: object, spec: str) -> None:
    """Raise ValueError for a format that makes a text which is too long, before that text is made."""
    check_length("a format", spec)
    numbers = [int(number) for number in re.findall(r"\d+", spec)]
    if isinstance(value, Decimal) and value.is_finite():
        numbers.append(abs(value.adjusted()))
    if max(numbers, default=0) > MAX_TEXT_LENGTH:
        raise ValueError(f"the format {spec!r:.50} makes a text that is too long for a lock key")


def call_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults, and with ``**kwargs`` unpacked."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments = {**arguments.pop(name), **arguments}
    return arguments


def unexpected(name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an unknown keyword argument. The error names the closest known one, and all others."""
    near = difflib.get_close_matches(name, known, n=1)
    meant = f": did you mean {near[0]}=?" if near else "."
    meant = ": the keys come first, without a name." if name in ("key", "keys", "name") else meant
    return TypeError(f"unexpected keyword argument {name!r}{meant} Known: {', '.join(sorted(known))}")


def lock_key(template: str, /, **values: Any) -> LockKey:
    """Return the key that ``@mongo_locked(template)`` makes from these values, for a `mongo_lock` on the same key.

    Separators in values are escaped. For example, ``"x:{a}"`` with ``a="b:c"`` is not ``"x:b:c"``.
    Raises ValueError (LockKeyInvalid) or TypeError for values that cannot be part of a key.
    """
    return KeyTemplate(template).fill(values)


_MODEL: Final = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, str) else operator.index(value)


def _to_uuid(value: Any) -> uuid.UUID:
    return value if isinstance(value, uuid.UUID) else uuid.UUID(value)


def _to_slug(value: Any) -> str:
    validate_slug(value)
    return str(value)


_FORMS: Final[dict[str, Callable[[Any], object]]] = {"int": _to_int, "uuid": _to_uuid, "slug": _to_slug}


def is_form(spec: str) -> bool:
    """Return whether a format is the name of a form, or of a model."""
    return spec in _FORMS or bool(_MODEL.fullmatch(spec))


def in_form(value: object, form: str) -> object:
    """Return *value* in the form. The form of a model is its primary key. Raise ValueError if that fails."""
    convert = _FORMS.get(form) or _primary_key(form).to_python
    try:
        return convert(value)
    except (ValidationError, TypeError, ValueError, ArithmeticError, AttributeError):
        article = "primary key of " if form not in _FORMS else ""
        raise ValueError(f"{str(value)[:50]!r} is no {article}{form}") from None


def _primary_key(label: str) -> Any:
    model: type[Model] = apps.get_model(label)
    key = model._meta.pk
    if hasattr(key, "fields"):
        raise LookupError(f"{label} has a composite primary key: give each part a field of its own")
    return key
