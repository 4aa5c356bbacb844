"""The document locks of this project, by name: for the commands, the admin and the checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document_lock import DocumentLock

_declared: dict[str, DocumentLock[Any]] = {}


def declare(lock: DocumentLock[Any]) -> None:
    """Note a lock. Raises ValueError if there is another one of its name.

    One that says the same is the same, in a module that was loaded again.
    """
    other = _declared.get(lock.name)
    if other is not None and other.rules != lock.rules:
        raise ValueError(f"there is a document lock {lock.name!r} already: give this one a name= of its own")
    _declared[lock.name] = lock


def declared() -> Iterable[DocumentLock[Any]]:
    """All that were declared so far, by name."""
    return [lock for _, lock in sorted(_declared.items())]


def find(name: str) -> DocumentLock[Any]:
    """The lock of that name. Raises LookupError, which names those that there are."""
    try:
        return _declared[name]
    except KeyError:
        raise LookupError(
            f"no document lock {name!r} was declared: there are {', '.join(sorted(_declared)) or 'none'}"
        ) from None


def forget(lock: DocumentLock[Any]) -> None:
    """Take back a declaration; for tests."""
    _declared.pop(lock.name, None)
