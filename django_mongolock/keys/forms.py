"""The form of a field in a template: ``{order_id:shop.Order}`` brings all spellings of a primary key into one.

A value from outside often has several spellings: ``1``, ``01`` and ``+1`` find the same row, and would be three keys.
"""

from __future__ import annotations

import operator
import re
import uuid
from collections.abc import Callable
from typing import Any, Final

from django.apps import apps
from django.core.exceptions import ValidationError
from django.core.validators import validate_slug
from django.db.models import Model

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


def check_form(form: str) -> None:
    """Raise LookupError for a model that does not exist, or that has no single primary key. Needs all models."""
    if form not in _FORMS:
        _primary_key(form)


def in_form(value: object, form: str) -> object:
    """Return *value* as the form has it: for a model, as its primary key. Raises ValueError if it is none."""
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
