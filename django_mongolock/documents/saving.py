"""What a model with a document lock saves: never the lock's fields; and in the block, only what is still held."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.models import Model

from ..versions.checking import FromSave, conflict, is_version_field, version_read
from .held_document import HeldDocument, Holder
from .rules import Rules


def protect(model: type[Any], rules: Rules) -> None:
    """Have `save()` of a model, and so its forms and its admin, leave the fields of a lock alone. `QuerySet.update()`
    writes what it is told to."""
    own = frozenset(name for role, name in rules.fields.names().items() if role != "version")
    if "never_saved" not in vars(model):
        model._do_update = _leaving_locks_alone(model._do_update)
    model.never_saved = getattr(model, "never_saved", frozenset()) | own


def _leaving_locks_alone(do_update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_update(): the update of one table by one save."""

    @wraps(do_update)
    def checked(self: Any, base_qs: Any, using: str, pk: Any, values: Any, *rest: Any) -> Any:
        if any(is_version_field(field) and not isinstance(value, FromSave) for field, _, value in values):
            return do_update(self, base_qs, using, pk, values, *rest)  # a fixture
        kept = [value for value in values if value[0].column not in self.never_saved]
        holder: Holder | None = vars(self).get("_document_held")
        held = None if holder is None else holder.held()
        if held is None or held.ended is not None:
            return do_update(self, base_qs, using, pk, kept, *rest)
        _save_held(self, held, {field.name: value for field, _, value in kept if not is_version_field(field)}, using)
        return True if len(rest) < 3 else [()]

    return checked


def _save_held(instance: Model, held: HeldDocument[Any], changes: dict[str, Any], using: str) -> None:
    """Write what an instance has, if its document is still held, and as the instance was read. Raises VersionConflict,
    and what `HeldDocument.update` raises."""
    version: Any = held._context.source.field(held._context.rules.fields.version)
    if (read := version_read(instance, version)) != held.version:
        raise conflict(instance, read, using, changes)
    if changes:
        held.update(changes)
        setattr(instance, version.attname, held.version)
