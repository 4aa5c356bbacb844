"""Version checks of a model: the version read, the version stored, and the wrappers around methods of the model.

A save puts the version that was read into the filter of its own update, so that the database decides. A delete raises
the version if it is still the one that was read. The deletion follows in the same transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any

from django.db import DatabaseError, connections, router, transaction
from django.db.models import F, Field, Model, Q, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from .. import signals
from ..engine.lock.transaction import out_of_commit_hook
from ..exceptions import VersionConflict
from ..transactions import mongo_atomic
from .retry import is_overtaken


def version_field(model: type[Model]) -> Field[Any, Any] | None:
    """Return the VersionField of *model*, its own or a parent's, or None."""
    return find_version(model._meta.concrete_fields)


def is_version_field(field: object) -> bool:
    """Return whether it is a VersionField."""
    return getattr(field, "is_version", False) is True


def find_version(fields: Iterable[Field[Any, Any]]) -> Field[Any, Any] | None:
    """Return the VersionField among *fields*, if there is one."""
    return next(filter(is_version_field, fields), None)


def version_read(instance: Model, field: Field[Any, Any]) -> int | None:
    """Return the version in which *instance* was read, None if the row had none. Raises ValueError if no version was
    read.
    """
    try:
        version = instance.__dict__[field.attname]
    except KeyError:
        raise ValueError(
            f"{instance._meta.label} {instance.pk!r} was read without its version, so a change since then would go "
            f"unnoticed: add {field.name!r} to only(), or take it out of defer()"
        ) from None
    if version is None or (isinstance(version, int) and not isinstance(version, bool)):
        return version
    raise ValueError(
        f"{field.name} of {instance._meta.label} counts by itself: leave it as it was read, not {version!r}"
    )


@contextmanager
def raising_versions(instances: Sequence[Model], field: Field[Any, Any], using: str) -> Iterator[None]:
    """Raise the versions of *instances*, each from the one that was read, and run the block in the same transaction.

    If the block fails, everything is as before. Raises VersionConflict before the block. On a MongoDB without
    transactions (a standalone server) another writer may come in between. There, and inside a transaction of MongoDB,
    the versions stay raised.
    """
    read = [(instance, version_read(instance, field)) for instance in instances]
    _refuse_unread(instances, field, using)
    block, done = all_or_nothing(using), False
    try:
        with block:
            _raise_versions(read, field, using)
            for instance, version in read:
                setattr(instance, field.attname, (version or 0) + 1)
            yield
            done = True
    except BaseException as error:
        if done and out_of_commit_hook(error):
            raise
        for instance, version in [] if isinstance(block, nullcontext) else read:
            setattr(instance, field.attname, version)
        if isinstance(error, _VersionsDiffer):
            raise _find_conflict(read, field, using) from None
        if isinstance(error, DatabaseError) and is_overtaken(error):
            raise lost_race(*read[0]) from error
        raise


def _refuse_unread(instances: Sequence[Model], field: Field[Any, Any], using: str) -> None:
    """Raise VersionConflict for an instance that was not read. Raise ValueError if two instances are the same row.

    One of two such instances would overwrite the other, in any version.
    """
    found: dict[Any, Model] = {}
    for instance in instances:
        if instance._state.adding:
            raise conflict(instance, None, using, problem="it was not read before")
        if found.setdefault(instance._get_pk_val(field.model._meta), instance) is not instance:
            raise ValueError(
                f"{instance._meta.label} {instance.pk!r} is in the list twice, as two instances: only one could be "
                "written. Read each row once"
            )


class _VersionsDiffer(Exception):
    """The error if a row is not in the version in which it was read."""


def all_or_nothing(using: str) -> AbstractContextManager[Any]:
    """Return a transaction, also on MongoDB, where Django's own atomic() does nothing.

    Return a null context where no separate rollback is possible. MongoDB has no savepoints, and a standalone server has
    no transactions.
    """
    connection: Any = connections[using]
    if connection.vendor != "mongodb":
        return transaction.atomic(using=using)
    if connection.in_atomic_block_mongo or not connection.features._supports_transactions:
        return nullcontext()
    return mongo_atomic(using)


def next_version(field: Field[Any, Any]) -> CombinedExpression:
    """Return the expression that raises a version from any value."""
    return Coalesce(F(field.attname), 0) + 1


def is_version(field: Field[Any, Any], version: int | None) -> Q:
    return Q(**({f"{field.attname}__isnull": True} if version is None else {field.attname: version}))


def _raise_versions(read: Sequence[tuple[Model, int | None]], field: Field[Any, Any], using: str) -> None:
    table = field.model
    by_version: defaultdict[int | None, set[Any]] = defaultdict(set)
    for instance, version in read:
        by_version[version].add(instance._get_pk_val(table._meta))
    size = max(1, connections[using].ops.bulk_batch_size([table._meta.pk, field], read))
    for version, keys in by_version.items():
        for start in range(0, len(keys), size):
            batch = list(keys)[start : start + size]
            rows = table._base_manager.using(using).filter(is_version(field, version), pk__in=batch)
            if rows.update(**{field.attname: next_version(field)}) != len(batch):
                raise _VersionsDiffer


def _find_conflict(read: Sequence[tuple[Model, int | None]], field: Field[Any, Any], using: str) -> VersionConflict:
    """Return the conflict of the first row that is no longer stored in the version in which it was read."""
    keys = [instance._get_pk_val(field.model._meta) for instance, _ in read]
    rows = field.model._base_manager.using(using).filter(pk__in=keys)
    stored = dict(rows.values_list("pk", field.attname))
    for instance, version in read:
        pk = instance._get_pk_val(field.model._meta)
        if pk not in stored or stored[pk] != version:
            return conflict(instance, version, using)
    return lost_race(*read[0])  # it was rolled back


def lost_race(instance: Model, read: int | None) -> VersionConflict:
    return counted(VersionConflict(instance._meta.label, instance.pk, read, problem="another transaction was faster"))


def counted(conflict: VersionConflict) -> VersionConflict:
    """Return the error after sending its signal."""
    signals.send(signals.version_conflict, what=conflict.what)
    return conflict


def conflict(
    instance: Model,
    read: int | None,
    using: str,
    names: Collection[str] | None = None,
    problem: str = "it was changed meanwhile",
) -> VersionConflict:
    """Return the error, with the stored values.

    - names: names of the fields to be written.
    """
    label, field = instance._meta.label, version_field(type(instance))
    row = type(instance)._base_manager.using(using).filter(pk=instance.pk).first()
    if row is None or field is None:
        return counted(VersionConflict(label, instance.pk, read, problem="it was deleted meanwhile"))
    never_saved = getattr(type(instance), "never_saved", ())  # the fields of a document lock are not the instance's
    changed = {
        other.name: (mine, theirs)
        for other in instance._meta.concrete_fields
        if other.attname in instance.__dict__ and (names is None or {other.name, other.attname} & set(names))
        if other is not field and not other.primary_key and not getattr(other, "auto_now", False)
        if other.column not in never_saved
        if (mine := _plain(other, instance)) != (theirs := _plain(other, row))
    }
    return counted(VersionConflict(label, instance.pk, read, row.__dict__[field.attname], changed, problem))


def _plain(field: Field[Any, Any], instance: Model) -> Any:
    """Return the value as it is stored. The values in errors must survive pickling."""
    value = field.value_from_object(instance)
    return repr(value) if hasattr(value, "resolve_expression") else plain(field, value)


def plain(field: Field[Any, Any], value: Any) -> Any:
    """Return the value as it is stored, in a comparable form. An embedded document becomes a dict."""
    value = field.get_prep_value(value)
    if isinstance(value, Model):
        parts = {each.attname: plain(each, each.value_from_object(value)) for each in value._meta.concrete_fields}
        return {"": value._meta.label, **parts}
    if isinstance(value, (list, tuple)) and isinstance(base := getattr(field, "base_field", None), Field):
        return [plain(base, each) for each in value]
    if isinstance(value, datetime) and timezone.is_aware(value):
        return value.astimezone(UTC)
    return bytes(value) if isinstance(value, memoryview) else value


def notice_copy(save_base: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model.save_base(). Every save goes through this method. An instance without a key is a new row."""

    @wraps(save_base)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._state.adding = self._state.adding or self.pk is None
        self._state.version_read = {}
        return save_base(self, *args, **kwargs)

    return checked


def know_what_is_stored(save_table: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._save_table(), the writing of one table by one save.

    If the save of a child's table fails, the save of its parent's table is rolled back. A row that does not exist yet
    is written as it is.

    - raw: whether a fixture writes the row.
    """

    @wraps(save_table)
    def checked(self: Any, raw: bool = False, cls: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._state.raw = raw
        try:
            updated = save_table(self, raw, cls, *args, **kwargs)
        except BaseException:
            vars(self).update({} if raw else self._state.version_read)
            raise
        field = find_version(cls._meta.local_fields)
        if field is not None and not (updated or raw):
            setattr(self, field.attname, 1)
        return updated

    return checked


def check_on_update(do_update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_update(), the update of one table by one save."""

    @wraps(do_update)
    def checked(self: Any, base_qs: QuerySet[Any], using: str, pk: Any, values: Any, *rest: Any) -> Any:
        field = find_version(base_qs.model._meta.local_fields)
        if field is None:
            return do_update(self, base_qs, using, pk, values, *rest)
        if self._state.raw:
            update = partial(do_update, self, base_qs, using, pk)
            return _update_raw(self, field, base_qs.filter(pk=pk), values, lambda written: update(written, *rest))
        if self._state.adding:
            if base_qs.filter(pk=pk).exists():
                raise conflict(self, None, using, rest[0], "it was there before, and not read")
            return False
        read = version_read(self, field)
        raised = (read or 0) + 1
        written = [value for value in values if value[0] is not field] + [(field, None, raised)]
        try:
            updated = do_update(self, base_qs.filter(is_version(field, read)), using, pk, written, *rest)
        except DatabaseError as error:
            if not is_overtaken(error):
                raise
            raise lost_race(self, read) from error
        if not updated:
            raise conflict(self, read, using, rest[0])
        if connections[using].vendor != "mongodb":  # MongoDB rolls nothing back
            self._state.version_read = {field.attname: read}
        setattr(self, field.attname, raised)
        return updated

    return checked


def _update_raw(instance: Any, field: Any, row: QuerySet[Any], values: Any, update: Callable[[Any], Any]) -> Any:
    """Overwrite a row with the values of a fixture, in a version that is larger than both."""
    given = Value(getattr(instance, field.attname) or 0)
    raised = Greatest(Coalesce(F(field.attname), 0), given) + 1
    updated = update([value for value in values if value[0] is not field] + [(field, None, raised)])
    if updated:
        setattr(instance, field.attname, row.values_list(field.attname, flat=True).get())
    return updated


def check_on_delete(delete: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model.delete(), or the class's own replacement of it."""

    @wraps(delete)
    def checked(self: Model, using: str | None = None, *args: Any, **kwargs: Any) -> Any:
        field = version_field(type(self))
        if field is None or self.pk is None:
            return delete(self, using, *args, **kwargs)
        using = using or router.db_for_write(type(self), instance=self)
        with raising_versions([self], field, using):
            return delete(self, using, *args, **kwargs)

    return checked


def keep_on_refresh(refresh: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model.refresh_from_db(). Reading a part again, such as a deferred field, makes nothing else newer."""

    @wraps(refresh)
    def checked(self: Model, using: str | None = None, fields: Any = None, *args: Any, **kwargs: Any) -> Any:
        field = version_field(type(self))
        names = None if fields is None else set(fields)
        known = {**self.__dict__}
        refresh(self, using, names, *args, **kwargs)
        if field is not None and names is not None and field.name not in names:
            self.__dict__.pop(field.attname, None)
            self.__dict__.update({name: version for name, version in known.items() if name == field.attname})

    return checked


#: The methods of Model that a VersionField wraps. Two are private to Django. In Django 6, `_do_update` has one more
#: argument (passed on) and returns a list.
HOOKS = {
    "save_base": notice_copy,
    "refresh_from_db": keep_on_refresh,
    "_save_table": know_what_is_stored,
    "_do_update": check_on_update,
    "delete": check_on_delete,
}
