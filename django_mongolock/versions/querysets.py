"""Querysets and the manager of models with a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar

from django.db import models

from .checking import next_version, raising_versions, version_field
from .retry import open_transaction, retry_on_conflict

M = TypeVar("M", bound=models.Model)


class VersionedQuerySet(models.QuerySet[M, M]):
    """What changes rows raises their version; what writes instances checks it."""

    @property
    def _version(self) -> models.Field[Any, Any]:
        if (field := version_field(self.model)) is None:
            raise TypeError(
                f"{self.model._meta.label} has no VersionField: derive it from VersionedModel, or give it one"
            )
        return field

    def only(self, *fields: str) -> Self:
        """Load the version as well: without it nothing could be saved."""
        return super().only(*fields, *([self._version.name] if fields else []))

    def defer(self, *fields: str | None) -> Self:
        """Defer the fields, except for the version."""
        kept: list[Any] = [field for field in fields if field != self._version.name]
        return super().defer(*kept)

    def update(self, **values: Any) -> int:
        """Change all rows, whatever their version is. An instance that was read before cannot be saved any more."""
        field = self._version
        if values and field.name not in values:
            values[field.name] = next_version(field)
        return super().update(**values)

    def bulk_update(self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None) -> int:
        """Write *fields* of all *objs*, or raise VersionConflict: each has to be in the version that it was read in."""
        kept = {self._version.name, *self._never_saved()}
        objs, names = tuple(objs), [name for name in fields if name not in kept]
        self._for_write = True
        plain = models.QuerySet[M](self.model, self.query.chain(), self.db)
        if not objs or not all(obj.pk is not None for obj in objs):
            return plain.bulk_update(objs, names, batch_size)
        with raising_versions(objs, self._version, self.db):
            return plain.bulk_update(objs, names, batch_size)

    def _never_saved(self) -> list[str]:
        """The fields that belong to something else than those who save, such as a document lock."""
        columns = getattr(self.model, "never_saved", ())
        return [field.name for field in self.model._meta.concrete_fields if field.column in columns]

    def bulk_create(
        self,
        objs: Iterable[M],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        *args: Any,
        **options: Any,
    ) -> list[M]:
        """Insert all of them. ValueError for update_conflicts: an upsert does not know what was read."""
        if update_conflicts:
            raise ValueError(
                "bulk_create(update_conflicts=True) would write over versions that were not read: "
                "insert with ignore_conflicts=True, and use bulk_update() for those that were there"
            )
        made = super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, *args, **options)
        for obj in made:
            obj.__dict__[self._version.attname] = 1
            if ignore_conflicts:  # the row may have been there before
                del obj.__dict__[self._version.attname]
        return made

    def update_or_create(self, *args: Any, **kwargs: Any) -> tuple[M, bool]:
        """Try again after a conflict (where the database has no row locks), if no transaction is open."""
        self._for_write = True
        if open_transaction(self.db):
            return super().update_or_create(*args, **kwargs)
        return retry_on_conflict(super().update_or_create, using=self.db)(*args, **kwargs)


_Manager = models.Manager.from_queryset(VersionedQuerySet)


class VersionedManager(_Manager[M]):
    """The manager of models with a version. For one of your own: `VersionedManager.from_queryset(...)`."""
