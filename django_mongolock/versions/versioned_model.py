"""The field, queryset, manager and model that save and delete only rows that are still as they were read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from django.core import checks
from django.db import models
from django.db.models.query_utils import DeferredAttribute

from ..conf import missing_app
from .checking import HOOKS, is_version_field, next_version, raising_versions, version_field
from .retry import open_transaction, retry_on_conflict

M = TypeVar("M", bound=models.Model)

if TYPE_CHECKING:
    BigIntegerField = models.BigIntegerField[int, int]
else:
    BigIntegerField = models.BigIntegerField


class VersionAttribute(DeferredAttribute):
    """The version of an instance. If the query left the version out, it is looked up, but does not count as read."""

    def __get__(self, instance: models.Model | None, cls: Any = None) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self.field.attname]
        except KeyError:
            rows = type(instance)._base_manager.using(instance._state.db).filter(pk=instance.pk)
            return rows.values_list(self.field.attname, flat=True).first()


class VersionField(BigIntegerField):
    """The number of times that a row was written. The model saves and deletes only rows still in the version read.

    The first save sets the version to 1. Each later save adds one. If the row was changed or deleted, or existed before
    an instance that was never read, the save raises VersionConflict and writes nothing. A stored version of 0 or null
    is from before the field was added.

    Not checked: `QuerySet.update()` (raises the version where the manager is a VersionedManager), `QuerySet.delete()`,
    cascades, fixtures, an instance that your code gives the key of another, and writes that do not go through this
    model. Many-to-many rows have no version.
    """

    descriptor_class = VersionAttribute
    #: The mark that `checking.find_version` looks for.
    is_version = True

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
        """Wrap the methods that have to check the version. Derived classes inherit the wrappers."""
        super().contribute_to_class(cls, name, private_only)
        if hasattr(cls, "_history_excluded_fields"):
            self.is_version = False  # history rows keep the version of their object
        elif not hasattr(cls, "_checks_version"):
            cls._checks_version = True  # type: ignore[attr-defined]
            for method, hook in HOOKS.items():
                setattr(cls, method, hook(getattr(cls, method)))

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the first version. An update does not write this value."""
        if not self.is_version:
            return super().pre_save(model_instance, add)
        if add:
            setattr(model_instance, self.attname, 1)
        return 1

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check also that the model has one version, in its topmost table, and that update() raises it."""
        missing = missing_app("django_mongolock.versions", f"The VersionField of {self.model._meta.label}", self)
        return [*super().check(**kwargs), *missing, *(self._check_model() if self.is_version else ())]

    def _check_model(self) -> Iterator[checks.CheckMessage]:
        options = self.model._meta
        versions = [field.name for field in options.fields if is_version_field(field)]
        if len(versions) > 1:
            message = f"{options.label} has more than one version: {', '.join(versions)}."
            yield checks.Error(message, hint="Keep one.", obj=self, id="mongolock.E071")
        if options.order_with_respect_to:
            message = f"{options.label} has order_with_respect_to, whose set_..._order() writes what was not read."
            hint = "Take it out, and order by a field of your own."
            yield checks.Error(message, hint=hint, obj=self, id="mongolock.E074")
        for manager in dict.fromkeys((options.default_manager, options.base_manager)):
            if manager is not None and not isinstance(manager.get_queryset(), VersionedQuerySet):
                message = f"{manager} does not raise versions: what it changes, a later save may write over unseen."
                hint = (
                    "Use VersionedManager, or derive the queryset of your manager from VersionedQuerySet; and name one "
                    "in Meta.base_manager_name, by which Django writes SET_NULL and related add()."
                )
                yield checks.Warning(message, hint=hint, obj=self, id="mongolock.W071")
        if options.parents:
            message = f"{options.label} shares a table with its parents, which do not know its version."
            hint = "Give the version to the topmost parent: derive that from VersionedModel."
            yield checks.Warning(message, hint=hint, obj=self, id="mongolock.W072")


class VersionedQuerySet(models.QuerySet[M, M]):
    """A queryset that raises the versions of changed rows, and checks the versions of written instances."""

    @property
    def _version(self) -> models.Field[Any, Any]:
        if (field := version_field(self.model)) is None:
            raise TypeError(
                f"{self.model._meta.label} has no VersionField: derive it from VersionedModel, or give it one"
            )
        return field

    def only(self, *fields: str) -> Self:
        """Load the version as well. Without the version, nothing could be saved."""
        return super().only(*fields, *([self._version.name] if fields else []))

    def defer(self, *fields: str | None) -> Self:
        """Defer the fields, except for the version."""
        kept: list[Any] = [field for field in fields if field != self._version.name]
        return super().defer(*kept)

    def update(self, **values: Any) -> int:
        """Change all rows, whatever their version is. Instances that were read before can no longer be saved."""
        field = self._version
        if values and field.name not in values:
            values[field.name] = next_version(field)
        return super().update(**values)

    def bulk_update(self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None) -> int:
        """Write *fields* of all *objs*.

        Raise VersionConflict unless each is still in the version in which it was read.
        """
        # Skip columns that belong to something else than the saving code, such as a document lock.
        columns = getattr(self.model, "never_saved", ())
        kept = {field.name for field in self.model._meta.concrete_fields if field.column in columns}
        objs, names = tuple(objs), [name for name in fields if name not in {self._version.name, *kept}]
        self._for_write = True
        plain = models.QuerySet[M](self.model, using=self.db)  # of a filter too: what is left out would go unwritten
        if not objs or not all(obj.pk is not None for obj in objs):
            return plain.bulk_update(objs, names, batch_size)
        with raising_versions(objs, self._version, self.db):
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
        """Insert all of them. Raise ValueError for update_conflicts, because an upsert does not know what was read."""
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
        """Try again after a conflict if no transaction is open. Some databases have no row locks."""
        self._for_write = True
        if open_transaction(self.db):
            return super().update_or_create(*args, **kwargs)
        return retry_on_conflict(super().update_or_create, using=self.db)(*args, **kwargs)


_Manager = models.Manager.from_queryset(VersionedQuerySet)


class VersionedManager(_Manager[M]):
    """The manager of models with a version. For one of your own: `VersionedManager.from_queryset(...)`."""


class VersionedModel(models.Model):
    """A model that is saved and deleted only in the version in which it was read. See `VersionField`.

    For a version with another name or column, put a VersionField and a VersionedManager into any model. Name the
    manager as `base_manager_name`.
    """

    version = VersionField("version")

    objects = VersionedManager()
    #: The manager that Django itself uses, for instance to set foreign keys to null. It raises versions as well.
    versioned = VersionedManager()

    class Meta:
        abstract = True
        base_manager_name = "versioned"
