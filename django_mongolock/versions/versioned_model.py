"""The field, and the model, that save and delete only what is still as it was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from django.core import checks
from django.db import models
from django.db.models.query_utils import DeferredAttribute

from ..conf import missing_app
from .hooks import FROM_SAVE, HOOKS
from .querysets import VersionedManager, VersionedQuerySet

if TYPE_CHECKING:
    BigIntegerField = models.BigIntegerField[int, int]
else:
    BigIntegerField = models.BigIntegerField


class VersionAttribute(DeferredAttribute):
    """The version of an instance. One that was left out of the query is looked up, but does not count as read."""

    def __get__(self, instance: models.Model | None, cls: Any = None) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self.field.attname]
        except KeyError:
            rows = type(instance)._base_manager.using(instance._state.db).filter(pk=instance.pk)
            return rows.values_list(self.field.attname, flat=True).first()


class VersionField(BigIntegerField):
    """How often a row was written. Its model saves and deletes only where this is what was read.

    The first save makes it 1, each one after that one more. Everything else raises VersionConflict, and writes nothing:
    the row was changed, it is gone, or it was there before an instance that was never read. A stored version of 0
    or null is one from before the field was added.

    Not checked: `QuerySet.update()` (raises the version where the manager is a VersionedManager), `QuerySet.delete()`,
    cascades, fixtures, and writes that do not go through this model. Many-to-many rows have no version.
    """

    descriptor_class = VersionAttribute
    #: What `checking.find_version` looks for.
    is_version: Final = True

    def __init__(self, verbose_name: Any = None, **options: Any) -> None:
        if unfit := sorted(options.keys() & {"primary_key", "unique", "choices"}):
            raise TypeError(f"a VersionField cannot be {', '.join(unfit)}: it counts how often its row was written")
        super().__init__(verbose_name, **{**options, "default": 0, "editable": False})

    def deconstruct(self) -> tuple[str, str, Sequence[Any], dict[str, Any]]:
        """Leave out the options that are always the same."""
        name, _, args, options = super().deconstruct()
        kept = {key: value for key, value in options.items() if key not in ("default", "editable")}
        return name, "django_mongolock.versions.VersionField", args, kept

    def contribute_to_class(self, cls: type[models.Model], name: str, private_only: bool = False) -> None:
        """Wrap the methods that have to check the version; classes derived from this one inherit them."""
        super().contribute_to_class(cls, name, private_only)
        if not hasattr(cls, "_checks_version"):
            cls._checks_version = True  # type: ignore[attr-defined]
            for method, hook in HOOKS.items():
                setattr(cls, method, hook(getattr(cls, method)))

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the first version for a new row, else the mark by which the update knows a save."""
        if add:
            setattr(model_instance, self.attname, 1)
            return 1
        return FROM_SAVE

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also that the model has one version, in its topmost table, and that update() raises it."""
        missing = missing_app("django_mongolock.versions", f"The VersionField of {self.model._meta.label}", self)
        return [
            *super().check(**kwargs),
            *missing,
            *self._check_alone(),
            *self._check_manager(),
            *self._check_parents(),
        ]

    def _check_alone(self) -> list[checks.CheckMessage]:
        versions = [field.name for field in self.model._meta.fields if getattr(field, "is_version", False)]
        if len(versions) < 2:
            return []
        message = f"{self.model._meta.label} has more than one version: {', '.join(versions)}."
        return [checks.Error(message, hint="Keep one.", obj=self, id="mongolock.E071")]

    def _check_manager(self) -> list[checks.CheckMessage]:
        manager = self.model._meta.default_manager
        if manager is None or isinstance(manager.get_queryset(), VersionedQuerySet):
            return []
        message = f"{manager} does not raise versions: what update() changes, a later save may write over unseen."
        hint = "Use VersionedManager, or derive the queryset of your manager from VersionedQuerySet."
        return [checks.Warning(message, hint=hint, obj=self, id="mongolock.W071")]

    def _check_parents(self) -> list[checks.CheckMessage]:
        if not self.model._meta.parents:
            return []
        message = f"{self.model._meta.label} shares a table with its parents, which do not know its version."
        hint = "Give the version to the topmost parent: derive that from VersionedModel."
        return [checks.Warning(message, hint=hint, obj=self, id="mongolock.W072")]


class VersionedModel(models.Model):
    """A model that is saved and deleted only in the version in which it was read; see `VersionField`.

    For a version with another name or column: a VersionField in a model of any kind, and a VersionedManager.
    """

    version = VersionField("version")

    objects = VersionedManager()
    #: What Django itself uses, for instance to set foreign keys to null: it raises versions as well.
    versioned = VersionedManager()

    class Meta:
        abstract = True
        base_manager_name = "versioned"
