"""Known ways to break document locks, put back one at a time: the simulation has to find each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from django_mongolock.documents import acquiring, updates
from django_mongolock.documents.own_writes import OwnWrites
from django_mongolock.documents.updates import Acquisition, Statement

from .collection import Document

Patch = Callable[[], Any]
ALWAYS: Final[Document] = {"$literal": True}


class Certain:
    """A doubt that never remains."""

    @property
    def remains(self) -> bool:
        return False

    @remains.setter
    def remains(self, value: bool) -> None:
        pass


def _patch(target: object, name: str, value: Callable[..., Any]) -> Patch:
    return lambda: mock.patch.object(target, name, value)


def _acquiring(change: Callable[[Statement], Statement]) -> Patch:
    whole = Acquisition.acquiring
    return _patch(Acquisition, "acquiring", lambda self, *args: change(whole(self, *args)))


def _without_version(statement: Statement) -> Statement:
    whole, _, available = statement.condition["$and"]
    return replace(statement, condition={"$and": [whole, available]})


def _not_raised(statement: Statement) -> Statement:
    return replace(statement, update={name: each for name, each in statement.update.items() if name != "$inc"})


def _owner_only(rules: Any, owner: str, known: object) -> Document:
    return updates.has(rules.fields.holder, [owner])


def _renewing_nothing(
    self: OwnWrites, attempt: str, changes: Any, more: Any, *, renew: bool = False, whole: Any = OwnWrites.writing
) -> Statement:
    made: Statement = whole(self, attempt, changes, more)
    return made


def _denying(self: OwnWrites, found: Any, *, maybe_written: bool = False, whole: Any = OwnWrites.why_not) -> Exception:
    made: Exception = whole(self, found)
    return made


def _whose_owner_is(seen: Any, owner: str) -> str | None:
    return str(seen.attempt) if seen.holder == owner else None


#: Each with the words of the violation that shows it.
DEFECTS: Final[dict[str, tuple[str, Patch]]] = {
    "a write only asks for the owner": ("does not hold it", _patch(updates, "is_held", _owner_only)),
    "a living run of the owner is resumed": ("held twice", _patch(acquiring, "dead_run", _whose_owner_is)),
    "all that is held is stale": ("held twice", _patch(updates, "is_stale", lambda *args: ALWAYS)),
    "a renewal leaves the time": ("held twice", _patch(OwnWrites, "writing", _renewing_nothing)),
    "a grant does not raise the version": ("without a new version", _acquiring(_not_raised)),
    "any version is granted": ("not read", _acquiring(_without_version)),
    "what may have been written is denied": ("which was denied", _patch(OwnWrites, "why_not", _denying)),
    "nothing is put back": ("stays pending", _patch(acquiring, "put_back", lambda *args: None)),
    "an unknown outcome is no doubt": ("stays pending", _patch(acquiring, "Doubt", Certain)),
}
