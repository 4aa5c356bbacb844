"""The keys of tasks that are enqueued once. Every key is valid. A short key is readable, a long one has a digest."""

from __future__ import annotations

import hashlib
import inspect
import sys
import typing
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from ...conf import get_settings
from ...engine.text_checks import MAX_KEY_BYTES, UNPRINTABLE
from ...exceptions import LockKeyInvalid
from ...keys import KeyTemplate, call_arguments, escape

#: The length in characters from which a digest replaces the text of an argument. Composing a long text (NFC) takes
#: seconds.
LONGEST: Final = 200


def once_key(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], template: str | None = None) -> str:
    """Return the key of a call: *template*, filled from the arguments, or the name of the task and its arguments.

    The arguments are bound by name, with their defaults. A dict and the pydantic model that the task makes of it give
    the same key. Short texts that Unicode calls the same (NFC) give the same key, and so do lists and tuples, because a
    broker does not tell them apart. Other arguments give other keys, also 1 and "1".
    Raises TypeError and ValueError for a call that the task does not take, and for a value without a text of its own.
    """
    signature = inspect.signature(task.run)
    if template is None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return valid_key(call_key(task.name, _with_models(task, bound.arguments)))
    filled, arguments = KeyTemplate(template), _with_models(task, call_arguments(signature, args, kwargs))
    try:
        return valid_key(filled.fill(arguments))
    except (LockKeyInvalid, TypeError):  # an argument is None, too long, or a list
        return valid_key(call_key(template, {name: arguments.get(name) for name in filled.names}))


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the key of a task of this name with these arguments."""
    parts = [f"{escape(word)}={_literal(arguments[word])}" for word in sorted(arguments)]
    return ":".join(["once", escape(name), *parts])


def valid_key(key: str) -> str:
    """Return *key* with control characters as codes.

    If the key is too long for the project's prefix, it gets a digest.
    """
    key = "".join(quote(c, errors="surrogatepass") if unicodedata.category(c) in UNPRINTABLE else c for c in key)
    encoded, room = key.encode(), MAX_KEY_BYTES - len(get_settings().KEY_PREFIX.encode())
    if len(encoded) <= room:
        return key
    return f"{encoded[: room - 33].decode(errors='ignore')}:{_digest(key)}"


def _with_models(task: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the dicts of a pydantic task by the models that the task itself makes of them."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and any(isinstance(value, dict) for value in arguments.values()):
        hints = typing.get_type_hints(inspect.unwrap(task.run))
        for name, value in arguments.items():
            for kind in (hints.get(name), *typing.get_args(hints.get(name))):
                if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                    arguments = {**arguments, name: kind.model_validate(value)}  # type: ignore[attr-defined]
    return arguments


def _literal(value: Any) -> str:
    """Return the text of an argument as a call would write it."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    match value:
        case str():
            is_long = len(value) > LONGEST
            return f"sha256({_digest(value)})" if is_long else f'"{escape(value)}"'
        case None | bytes():
            return "None" if value is None else f"bytes({_literal(value.hex())})"
        case list() | tuple():
            return f"[{_joined(map(_literal, value))}]"
        case dict():
            return f"{{{_joined(sorted(_joined(map(_literal, item)) for item in value.items()))}}}"
    text = escape(value)
    return text if type(value) in (int, float, bool) else f"{type(value).__name__}({text})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _joined(texts: Iterable[str]) -> str:
    """Join texts such that other texts give another result."""
    return ",".join(text.replace("%", "%25").replace(",", "%2C") for text in texts)
