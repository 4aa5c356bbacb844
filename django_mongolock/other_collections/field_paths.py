"""Fields of other programs' documents: their names, their values, and the expressions that compare them.

A condition is an expression, because an expression compares a value as a whole. A plain query for "x" would also find
the array ["x"]. Every value of a caller is a `$literal` in it, because an expression reads the text "$price" as the
name of a field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from ..engine.text_checks import check_text

Document = dict[str, Any]

#: The largest version, far above any real one. One more is still a whole number of 64 bits.
LAST_VERSION: Final = 2**62


def check_path(what: str, name: object) -> str:
    """Return the name of a field if it can be set. Raises TypeError, ValueError."""
    text = check_text(what, name)
    if text == "_id" or not all(part and not part.startswith("$") for part in text.split(".")):
        raise ValueError(f"{what} cannot be {text!r}: it is a name, or names with dots between them, and not _id")
    return text


def check_changes(changes: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Return *changes* if none of them meets a field that is *taken*, or another of them."""
    names = [check_path("the name of a change", name) for name in changes]
    for number, name in enumerate(names):
        for other in (*taken, *names[:number]):
            if meets(name, other):
                whose = "it is the lock's own" if other in taken else f"there is {other!r} already"
                raise ValueError(f"{name!r} cannot be changed here: {whose}")
    return dict(changes)


def meets(name: str, other: str) -> bool:
    """Return whether two names are the same place, or one is inside the other."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def check_version(version: object) -> int:
    """Return *version* if it is valid. Raises TypeError, ValueError."""
    if isinstance(version, bool) or not isinstance(version, int):
        raise TypeError(f"a version is a whole number, not {type(version).__name__}: read it from the document")
    if not -LAST_VERSION < version < LAST_VERSION:
        raise ValueError(f"{version} is too large for a version, or too small")
    return int(version)


def get_path(document: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, or None if there is none. Inside an array the value is a list, as on the server."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else [] if isinstance(value, list) else None
    return value


def set_path(container: Any, path: str, value: Any) -> None:
    """Change a field of a document, or an element of an array, as `$set` does, as far as its parents are there."""
    head, _, rest = path.partition(".")
    key: Any = int(head) if isinstance(container, list) and head.isdecimal() else head
    if isinstance(container, list) and not (isinstance(key, int) and key < len(container)):
        return
    if not rest:
        container[key] = value
        return
    inner = container[key] if isinstance(container, list) else container.setdefault(key, {})
    if isinstance(inner, (dict, list)):
        set_path(inner, rest, value)


def aware(value: object) -> datetime | None:
    """Return a moment of MongoDB in UTC."""
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def literal(value: object) -> Document:
    return {"$literal": value}


def has(name: str, values: Sequence[Any]) -> Document:
    return {"$in": [f"${name}", [literal(value) for value in values]]}


def is_type(name: str, *types: str) -> Document:
    return {"$in": [{"$type": f"${name}"}, list(types)]}


def version_of(name: str) -> Document:
    """Return the expression for the version of a document, 0 if it has none."""
    return {"$ifNull": [f"${name}", 0]}


def is_version(name: str) -> Document:
    """Return the condition that the field is missing, or a whole number to which one can be added.

    A fraction, or a number that is too large, is damage.
    """
    return {"$and": [is_type(name, "int", "long", "null", "missing"), {"$lt": [version_of(name), LAST_VERSION]}]}
