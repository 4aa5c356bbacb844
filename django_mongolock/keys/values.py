"""What a lock is named by: text, a value in a key, a row, a model instance."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Self
from urllib.parse import quote

from django.db.models import Model, OneToOneField

from ..conf import SEPARATORS
from ..engine.text_checks import MAX_TEXT_LENGTH, check_length
from ..exceptions import LockKeyInvalid

# A separator stands between two fields of a template. In a value it is escaped, so that values with different texts
# never make the same key.
_ESCAPES: Final = {ord(character): f"%{ord(character):02X}" for character in "%" + SEPARATORS}


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


#: A field of a template. In a plain key, it was never filled.
_FIELD: Final = re.compile(r"\{[^\W\d]\w*([.\[!:][^{}]*)?\}")


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


def as_key(source: object) -> object:
    """The key of a model instance; anything else is returned as it is, for `check_key`.

    Raises TypeError for several keys or a model, and LockKeyInvalid for plain text with a field in it, which would be
    one key for every value.
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
    """The template of a key; "" if unknown."""
    if isinstance(source, Model):
        return row_template(source._meta.model)
    return source.template if type(source) is LockKey else ""
