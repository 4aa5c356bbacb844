"""Keys from model instances, and from templates such as ``"order:{order_id}"``."""

from __future__ import annotations

import difflib
import inspect
import string
import unicodedata
from collections.abc import Iterable
from typing import Any, Final, Self
from urllib.parse import quote

from django.db.models import Model, OneToOneField

from .conf import SEPARATORS
from .engine.text_checks import check_length

# A separator stands between two fields of a template. In a value it is escaped, so that two different calls never make
# the same key.
_ESCAPES: Final = {ord(character): f"%{ord(character):02X}" for character in "%" + SEPARATORS}


def model_key(instance: Model) -> str:
    """The key of a saved model instance: see `row_key`. Raises ValueError if it has no primary key."""
    return row_key(instance._meta.model, instance.pk)  # not its type: it may be a lazy object


def row_key(model: type[Model], pk: object) -> str:
    """The key of a row: ``"shop.order:<pk>"``, or ``"shop.line:<first>,<second>"`` for a composite primary key.

    A row has one key, through whichever model it is read: that of the concrete model for a proxy, and that of the
    topmost model for multi-table inheritance, where a child shares the primary key of its parent. Raises ValueError
    for None.
    """
    parts = pk if isinstance(pk, tuple) else (pk,)
    if None in parts:
        raise ValueError(f"{model.__name__} has no primary key yet: save it before you lock it")
    return f"{_topmost_model(model)._meta.label_lower}:{','.join(map(escape, parts))}"


def row_template(model: type[Model]) -> str:
    """The template of the keys of the rows of *model*."""
    return f"{_topmost_model(model)._meta.label_lower}:{{pk}}"


def _topmost_model(model: type[Model]) -> type[Model]:
    """The model whose table the primary key comes from."""
    concrete = model._meta.concrete_model or model
    link = concrete._meta.pk
    if isinstance(link, OneToOneField) and link.remote_field.parent_link:
        return _topmost_model(link.remote_field.model)
    return concrete


def as_key(source: object) -> object:
    """The key of a model instance; anything else is returned as it is, for `check_key`."""
    if isinstance(source, Model):
        return model_key(source)
    if isinstance(source, (list, tuple, set, frozenset)):
        raise TypeError(f"a lock key must be a str, not {type(source).__name__}: pass several as mongo_lock(*keys)")
    if isinstance(source, type) and issubclass(source, Model):
        raise TypeError(
            f"a lock key must be a str, not a model: pass an instance of {source.__name__}, or, as one key for all of "
            f"them, {source._meta.label_lower!r}"
        )
    return str(source) if type(source) is LockKey else source


def template_of(source: object) -> str:
    """The template of a key; "" if unknown."""
    if isinstance(source, Model):
        return row_template(source._meta.model)
    return source.template if type(source) is LockKey else ""


def escape(value: object) -> str:
    """The text of a value in a key, with the separators escaped.

    Raises TypeError for values without a text of their own (None, containers, bytes, model instances, objects that only
    show their address): two processes would not agree on it, or two values would share it. Raises ValueError for text
    that is too long for a key.
    """
    if value is None or isinstance(value, (bytes, bytearray, memoryview, dict, list, set, frozenset, tuple)):
        raise TypeError(f"a value of type {type(value).__name__} cannot be part of a key")
    if isinstance(value, Model):
        raise TypeError(f"a {type(value).__name__} instance cannot be part of a key: use its .pk")
    text = str(value)
    check_length("a lock key", text)
    # Compose first, then escape: composing turns U+037E, for example, into a semicolon.
    text = unicodedata.normalize("NFC", text)
    if not isinstance(value, str) and " at 0x" in text:
        raise TypeError(f"a {type(value).__name__} has no text of its own that could be part of a key")
    # A combining character at the start would change the separator before it into another character.
    first = quote(text[0]) if text and unicodedata.combining(text[0]) else text[:1].translate(_ESCAPES)
    return first + text[1:].translate(_ESCAPES)


class LockKey(str):
    """A string that carries the template of the key, by which metrics are counted."""

    __slots__ = ("template",)
    template: str

    def __new__(cls, key: str, template: str) -> Self:
        made = super().__new__(cls, key)
        made.template = template
        return made

    def __reduce__(self) -> tuple[type[LockKey], tuple[str, str]]:
        return LockKey, (str(self), self.template)


class KeyTemplate(string.Formatter):
    """A template that makes keys from the arguments of a call: ``"sync:{account.pk}:{kind}"``.

    Fields are names of parameters, with attributes, items and formats as in `str.format`.
    Raises ValueError for a template with an unnamed field, or without a separator between two fields.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self.names: set[str] = set()
        try:
            parts = list(self.parse(template))
        except ValueError as error:
            raise ValueError(f"key template {template!r}: {error}") from None
        between: str | None = None
        for literal, name, spec, _ in parts:
            between = None if between is None else between + literal
            if name is None:
                continue
            if between is not None and not set(between) & set(SEPARATORS):
                raise ValueError(
                    f"key template {template!r}: put one of {SEPARATORS} between two fields, or two different calls "
                    "could make the same key"
                )
            for used in (name, *(inner for _, inner, _, _ in self.parse(spec or "") if inner is not None)):
                self._add_name(used)
            between = ""

    def _add_name(self, field_name: str) -> None:
        first = field_name.partition(".")[0].partition("[")[0]
        if not first.isidentifier():
            raise ValueError(f"key template {self.template!r}: name a parameter in each {{}}, not {field_name!r}")
        self.names.add(first)

    def check(self, signature: inspect.Signature, function: str) -> None:
        """Raise TypeError if the template uses a name that the function has no parameter of."""
        parameters = signature.parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        if missing := sorted(self.names - set(parameters)):
            raise TypeError(
                f"key template {self.template!r}: {function} has no parameter {', '.join(missing)}; "
                f"it has {', '.join(parameters) or 'none'}"
            )

    def fill(self, arguments: dict[str, Any]) -> str:
        """The key of one call. Raises TypeError or ValueError, naming the field, if a value cannot be part of a key."""
        return self.vformat(self.template, (), arguments)

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            value, used = super().get_field(field_name, args, kwargs)
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"key template {self.template!r}: no {field_name!r} in this call ({error})") from error
        if isinstance(value, Model) or value is None:
            self._explain(field_name, value)
        return value, used

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return escape(format(value, format_spec) if format_spec else value)
        except TypeError as error:
            raise TypeError(f"key template {self.template!r}: {error}") from None

    def _explain(self, field_name: str, value: object) -> None:
        hint = f"use {{{field_name}.pk}}" if isinstance(value, Model) else "calls without a value would share one key"
        raise TypeError(f"key template {self.template!r}: {field_name!r} is {type(value).__name__}: {hint}")


def call_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults, and with ``**kwargs`` unpacked."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments = {**arguments.pop(name), **arguments}
    return arguments


def unexpected(name: str, known: Iterable[str]) -> TypeError:
    """The error for an unknown keyword argument: it names the closest known one, and all others."""
    near = difflib.get_close_matches(name, known, n=1)
    meant = f": did you mean {near[0]}=?" if near else "."
    return TypeError(f"unexpected keyword argument {name!r}{meant} Known: {', '.join(sorted(known))}")


def lock_key(template: str, **values: Any) -> LockKey:
    """The key that ``@mongo_locked(template)`` makes from these values, for a `mongo_lock` on the same key.

    Separators in values are escaped, so ``"x:{a}"`` with ``a="b:c"`` is not ``"x:b:c"``.
    Raises TypeError or ValueError for values that cannot be part of a key.
    """
    return LockKey(KeyTemplate(template).fill(values), template)
