"""What a lock is named by: text, a key that was made from a template, or a model instance."""

from __future__ import annotations

import re
from typing import Final, Self

from django.db.models import Model

from ..engine.text_checks import MAX_TEXT_LENGTH
from ..exceptions import LockKeyInvalid
from .rows import model_key, row_template

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
