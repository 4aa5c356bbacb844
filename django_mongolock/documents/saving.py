"""What `save()` of a model does with the fields of its document locks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.models import Model

from ..other_collections.places import Source
from ..versions.checking import conflict, is_version_field, version_read
from .held_document import HeldDocument, Holder
from .rules import Rules


def protect(model: type[Any], source: Source, rules: Rules) -> None:
    """Have `save()` of a model, and so its forms and its admin, leave the fields of a lock alone, and a copy be free.
    `QuerySet.update()` writes what it is told to."""
    model = model._meta.concrete_model  # a proxy has the documents of its model
    if "document_lock" not in vars(model):
        model._do_update = _leaving_locks_alone(model._do_update)
        model._do_insert = _as_free(model._do_insert)
    model.document_lock = source, rules  # there is one at most: it has the version of the model
    model.never_saved = frozenset(name for role, name in rules.fields.names().items() if role != "version")


def _leaving_locks_alone(do_update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_update(): the update of one table by one save."""

    @wraps(do_update)
    def checked(self: Any, base_qs: Any, using: str, pk: Any, values: Any, *rest: Any) -> Any:
        if self._state.raw:  # a fixture
            return do_update(self, base_qs, using, pk, values, *rest)
        kept = [value for value in values if value[0].column not in self.never_saved]
        holder: Holder | None = vars(self).get("_document_held")
        held = None if holder is None else holder()
        if held is None or held.ended is not None:
            return do_update(self, base_qs, using, pk, kept, *rest)
        source = held._context.source
        if using != source.alias or source.key(pk) != held.id:  # a copy under another key, or in another database
            return do_update(self, base_qs, using, pk, kept, *rest)
        _save_held(self, held, {field.name: value for field, _, value in kept if not is_version_field(field)}, using)
        return True if len(rest) < 3 else [()]

    return checked


def _as_free(do_insert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_insert(): the insert into one table by one save."""

    @wraps(do_insert)
    def free(self: Any, manager: Any, using: str, fields: Any, *rest: Any) -> Any:
        if not self._state.raw:
            _free(self, *self.document_lock)
        return do_insert(self, manager, using, fields, *rest)

    return free


def _free(instance: Model, source: Source, rules: Rules) -> None:
    """Have a copy of a held document begin as a new one does. A copy has the version in which it was read; a new
    instance has none, and is saved as it was made."""
    found: dict[str, Any] = {role: source.field(name) for role, name in rules.fields.names().items()}
    if not (vars(instance).get(found.pop("version").attname) and getattr(instance, found["holder"].attname)):
        return
    if getattr(instance, found["state"].attname) not in rules.pending:
        del found["state"]
    for field in found.values():
        if field is not None:  # that of the token need not be in the model
            setattr(instance, field.attname, field.get_default())


def _save_held(instance: Model, held: HeldDocument[Any], changes: dict[str, Any], using: str) -> None:
    """Write what an instance has, if its document is still held, and as the instance was read. Raises VersionConflict,
    and what `HeldDocument.update` raises."""
    version: Any = held._context.source.field(held._context.rules.fields.version)
    if (read := version_read(instance, version)) != held.version:
        raise conflict(instance, read, using, changes)
    if changes:
        held.update(changes)
        setattr(instance, version.attname, held.version)
