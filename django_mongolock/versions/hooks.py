"""Where a model checks its version: what a VersionField wraps around methods of Django's Model.

A save puts the version that was read into the filter of its own update, so that the database decides. A delete raises
the version first, where it is still the one that was read, and deletes in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from django.db import DatabaseError, router
from django.db.models import Model, QuerySet

from .checking import conflict, find_version, is_version, lost_race, raising_versions, version_field, version_read
from .passing import is_overtaken


class FromSave(int):
    """What a save (not a fixture, which is raw) asks to write: the version is to be checked and raised."""

    __slots__ = ()


#: In an insert it is the first version: the compiler of MongoDB says add=False for a copy of what was read.
FROM_SAVE: Final = FromSave(1)


def notice_copy(save_base: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model.save_base(), which every save goes through: without a key an instance is a new row."""

    @wraps(save_base)
    def checked(self: Model, *args: Any, **kwargs: Any) -> Any:
        self._state.adding = self._state.adding or self.pk is None
        return save_base(self, *args, **kwargs)

    return checked


def check_on_update(do_update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_update(): the update of one table by one save."""

    @wraps(do_update)
    def checked(self: Model, base_qs: QuerySet[Any], using: str, pk: Any, values: Any, *rest: Any) -> Any:
        field = find_version(base_qs.model._meta.local_fields)
        asked = next((value for column, _, value in values if column is field), FROM_SAVE)
        if field is None or not isinstance(asked, FromSave):
            return do_update(self, base_qs, using, pk, values, *rest)  # another table, or a fixture
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
        setattr(self, field.attname, raised)
        return updated

    return checked


def know_on_insert(do_insert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model._do_insert(): the insert into one table by one save."""

    @wraps(do_insert)
    def checked(self: Model, manager: Any, using: str, fields: Any, *rest: Any) -> Any:
        made = do_insert(self, manager, using, fields, *rest)
        field = version_field(type(self))
        if field is not None and field in fields and not rest[-1]:  # the last one is raw: a fixture
            setattr(self, field.attname, 1)
        return made

    return checked


def check_on_delete(delete: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Model.delete(), or what the class has instead of it."""

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
    """Wrap Model.refresh_from_db(): a part that is read again, also a deferred field, makes nothing else newer."""

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


#: The methods of Model that a VersionField wraps. Two are Django's own: `_do_update` has one argument more in Django 6,
#: which is passed on, and returns a list there.
HOOKS = {
    "save_base": notice_copy,
    "refresh_from_db": keep_on_refresh,
    "_do_update": check_on_update,
    "_do_insert": know_on_insert,
    "delete": check_on_delete,
}
