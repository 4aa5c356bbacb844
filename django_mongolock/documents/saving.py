"""The behavior of a model's `save()` with the fields of its document locks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.models import Model

from ..versions.checking import conflict, is_version_field, version_read
from .held_document import DELETED, HeldDocument
from .rules import Rules


def protect(model: type[Any], rules: Rules) -> None:
    """Make `save()` of a model, of its forms and of its admin leave the fields of a lock unchanged.

    `QuerySet.update()` writes all the values that it gets. The author of a copy has to clean the copy. `delete()` ends
    the block that holds the document.
    """
    model = model._meta.concrete_model  # a proxy has the documents of its model
    if "never_saved" not in vars(model):
        model._do_update = _leaving_locks_alone(model._do_update)
        model.delete = _ending_block(model.delete)
    model.never_saved = frozenset(name for role, name in rules.fields.names().items() if role != "version")


def _held_of(instance: Model, using: str | None, pk: Any) -> HeldDocument[Any] | None:
    """Return the document that the flow of *instance* holds.

    Return None for a copy under another key or in another database.
    """
    held: HeldDocument[Any] | None = (vars(instance).get("_document_held") or (lambda: None))()
    if held is None or held.ended is not None:
        return None
    source = held._context.source
    return held if using == source.alias and source.key(pk) == held.id else None


def _leaving_locks_alone(do_update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_update(), the update of one table by one save.

    A flow that holds the document writes with the lock, if the document is unchanged since the instance was read.
    """

    @wraps(do_update)
    def checked(self: Any, base_qs: Any, using: str, pk: Any, values: Any, *rest: Any) -> Any:
        if self._state.raw:  # a fixture
            return do_update(self, base_qs, using, pk, values, *rest)
        kept = [value for value in values if value[0].column not in self.never_saved]
        if (held := _held_of(self, using, pk)) is None:
            return do_update(self, base_qs, using, pk, kept, *rest)
        changes = {field.name: value for field, _, value in kept if not is_version_field(field)}
        version: Any = held._context.source.field(held._context.rules.fields.version)
        if (read := version_read(self, version)) != held.version:
            raise conflict(self, read, using, changes)
        if changes:
            held.update(changes)
            setattr(self, version.attname, held.version)
        return True if len(rest) < 3 else [()]

    return checked


def _ending_block(delete: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model.delete(), or the class's replacement for it."""

    @wraps(delete)
    def ending(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = _held_of(self, self._state.db, self.pk)
        result = delete(self, *args, **kwargs)
        if held is not None and self.pk is None:  # otherwise delete() only marks the document
            held._own.ended = DELETED
        return result

    return ending
