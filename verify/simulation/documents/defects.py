"""Known ways to break document locks, put back one at a time: the simulation has to find each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from django_mongolock.documents import held_document, hold, steps, updates
from django_mongolock.documents.held_document import HeldDocument
from django_mongolock.documents.updates import Own, Statement
from django_mongolock.other_collections.courier import Steps, send
from django_mongolock.other_collections.field_paths import Document, has

Patch = Callable[[], AbstractContextManager[Any]]
ALWAYS: Final[Document] = {"$literal": True}


def _patch(value: Callable[..., Any], *targets: tuple[object, str]) -> Patch:
    def patch() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for target, name in targets:
            stack.enter_context(mock.patch.object(target, name, value))
        return stack

    return patch


def _acquiring(change: Callable[[Statement], Statement], whole: Any = updates.acquiring) -> Patch:
    return _patch(lambda *given: change(whole(*given)), (updates, "acquiring"))


def _without_version(statement: Statement) -> Statement:
    whole, _, available = statement.condition["$and"]
    return replace(statement, condition={"$and": [whole, available]})


def _not_raised(statement: Statement) -> Statement:
    return replace(statement, update={name: each for name, each in statement.update.items() if name != "$inc"})


def _renewing_nothing(
    self: Own, rules: Any, values: Any, token: str, *, renew: bool = False, whole: Any = Own.writing
) -> Statement:
    made: Statement = whole(self, rules, values, token)
    return made


def _denying(
    self: HeldDocument[Any], found: Any, *, maybe_written: bool = False, whole: Any = HeldDocument._why_not
) -> Exception:
    made: Exception = whole(self, found)
    return made


def _certain(command: Any, unanswered: object = None) -> Steps[Any]:
    return send(command)


#: Each with the words of the violation that shows it.
DEFECTS: Final[dict[str, tuple[str, Patch]]] = {
    "a write only asks for the owner": (
        "does not hold it",
        _patch(lambda self, fields: has(fields.holder, [self.owner]), (Own, "is_as_left")),
    ),
    "a living run of the owner is resumed": (
        "held twice",
        _patch(
            lambda seen, owner: str(seen.token) if seen.holder == owner else None,
            (steps, "dead_run"),
            (hold, "dead_run"),
        ),
    ),
    "all that is held is stale": ("held twice", _patch(lambda *_: ALWAYS, (updates, "is_stale"))),
    "a renewal leaves the time": ("held twice", _patch(_renewing_nothing, (Own, "writing"))),
    "a grant does not raise the version": ("without a new version", _acquiring(_not_raised)),
    "any version is granted": ("not read", _acquiring(_without_version)),
    "what may have been written is denied": ("which was denied", _patch(_denying, (HeldDocument, "_why_not"))),
    "nothing is put back": (
        "stays pending",
        _patch(lambda *_: None, (steps, "put_back"), (hold, "put_back"), (held_document, "put_back")),
    ),
    "an unknown outcome is no doubt": ("stays pending", _patch(_certain, (steps, "send"), (hold, "send"))),
}
