"""The keys of tasks that are enqueued once: made from the name and the arguments of a task."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...keys import escape


def once_key(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key of a task with these arguments, as `@mongo_locked` binds them: by name, with the defaults.

    Those of another call make another key, also 1 and "1". Texts that Unicode calls the same (NFC) are the same, and so
    are lists and tuples, which are one to a broker. Raises TypeError for a call that the task does not take, and for
    values without a text of their own.
    """
    bound = inspect.signature(task.run).bind(*args, **kwargs)
    bound.apply_defaults()
    return call_key(task.name, bound.arguments)


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """The key of a task of this name with these arguments."""
    try:
        parts = [f"{escape(word)}={_literal(arguments[word])}" for word in sorted(arguments)]
    except TypeError as error:
        raise TypeError(f"the arguments of {name} cannot be part of a key ({error}): give one as key=") from None
    return ":".join(["once", escape(name), *parts])


def _literal(value: object) -> str:
    """The text of an argument, as it would be written in a call."""
    match value:
        case str():
            return f'"{escape(value)}"'
        case None:
            return "None"
        case bytes():
            return f"bytes({value.hex()})"
        case list() | tuple():
            return f"[{_joined(map(_literal, value))}]"
        case dict():
            return f"{{{_joined(sorted(_joined(map(_literal, item)) for item in value.items()))}}}"
    text = escape(value)
    return text if type(value) in (int, float, bool) else f"{type(value).__name__}({text})"


def _joined(texts: Iterable[str]) -> str:
    """These texts in one, of which other texts make another."""
    return ",".join(text.replace("%", "%25").replace(",", "%2C") for text in texts)
