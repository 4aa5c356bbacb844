"""A model with a version, and the manager that keeps to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar

from django.db import models

from .checking import claim, next_version, version_field
from .retry import open_transaction, retry_on_conflict
from .version_field import VersionField

M = TypeVar("M", bound=models.Model)


class VersionedQuerySet(models.QuerySet[M, M]):
    """What changes rows raises their version; what writes instances checks it."""

    @property
    def _version(self) -> VersionField:
        if (field := version_field(self.model)) is None:
            raise TypeError(
                f"{self.model._meta.label} has no VersionField: derive it from VersionedModel, or give it one"
            )
        return field

    def only(self, *fields: str) -> Self:
        """As always, and the version too: without it nothing could be saved."""
        return super().only(*fields, *([self._version.name] if fields else []))

    def defer(self, *fields: str | None) -> Self:
        """As always, but never the version."""
        kept: list[Any] = [field for field in fields if field != self._version.name]
        return super().defer(*kept)

    def update(self, **values: Any) -> int:
        """Change all of them, whatever their version is; who read one of them before cannot save it any more."""
        field = self._version
        if values and field.name not in values:
            values[field.name] = next_version(field)
        return super().update(**values)

    def bulk_update(self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None) -> int:
        """Write *fields* of all *objs*, or raise VersionConflict: each has to be in the version that it was read in."""
        objs, names = tuple(objs), [name for name in fields if name != self._version.name]
        self._for_write = True
        plain = models.QuerySet[M](self.model, self.query.chain(), self.db)
        if not objs or not all(obj.pk is not None for obj in objs):
            return plain.bulk_update(objs, names, batch_size)
        with claim(objs, self._version, self.db):
            return plain.bulk_update(objs, names, batch_size)

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
                "bulk_create(update_conflicts=True) would write over versions that nobody read: "
                "insert with ignore_conflicts=True, and use bulk_update() for those that were there"
            )
        made = super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, *args, **options)
        for obj in made:
            obj.__dict__[self._version.attname] = 1
            if ignore_conflicts:  # the row may be somebody else's
                del obj.__dict__[self._version.attname]
        return made

    def update_or_create(self, *args: Any, **kwargs: Any) -> tuple[M, bool]:
        """As always; a conflict (where the database has no row locks) is tried again outside of transactions."""
        self._for_write = True
        if open_transaction(self.db):
            return super().update_or_create(*args, **kwargs)
        return retry_on_conflict(super().update_or_create, using=self.db)(*args, **kwargs)


_Manager = models.Manager.from_queryset(VersionedQuerySet)


class VersionedManager(_Manager[M]):
    """The manager of models with a version. For one of your own: `VersionedManager.from_queryset(...)`."""


class VersionedModel(models.Model):
    """A model that is saved and deleted only in the version in which it was read; see `VersionField`.

    For a version with another name or column: a VersionField in a model of any kind, and a VersionedManager.
    """

    version = VersionField("version")

    objects = VersionedManager()
    #: What Django itself goes by, for instance to set foreign keys to null: it too raises versions.
    versioned = VersionedManager()

    class Meta:
        abstract = True
        base_manager_name = "versioned"
