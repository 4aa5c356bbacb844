"""The shapes of models: plain, abstract, multi-table, proxy, bare field, odd names. The registry of these models is
their own, so that no migration and no other test sees them. `make_tables` makes their tables."""

# ruff: noqa: DJ008 - they are never shown

from __future__ import annotations

import uuid
from typing import Any

from django.apps.registry import Apps
from django.db import connections, models

from django_mongolock.versions import VersionedManager, VersionedModel, VersionedQuerySet, VersionField

registry = Apps(["django.contrib.contenttypes", "tests.versioned"])


class Shape(models.Model):
    """Keys that every database can make."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False, db_column="_id")

    class Meta:
        abstract = True
        apps = registry
        app_label = "versioned"


class Topic(Shape):
    """Something without a version that things point to."""

    name = models.CharField(max_length=50)


class Thing(VersionedModel, Shape):
    """The usual case."""

    title = models.CharField(max_length=50, unique=True)
    count = models.IntegerField(default=0)
    topic = models.ForeignKey(Topic, on_delete=models.SET_NULL, null=True, blank=True, related_name="things")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta(VersionedModel.Meta, Shape.Meta):
        abstract = False


class ThingProxy(Thing):
    """The same table under another name."""

    class Meta(Shape.Meta):
        abstract = False
        proxy = True


class Part(Shape):
    """A model that is deleted with its thing."""

    thing = models.ForeignKey(Thing, on_delete=models.CASCADE, related_name="parts")


class Guard(Shape):
    """A model that keeps its thing from being deleted."""

    thing = models.ForeignKey(Thing, on_delete=models.PROTECT)


class Base(VersionedModel, Shape):
    """The version is in the parent's table."""

    name = models.CharField(max_length=50)

    class Meta(VersionedModel.Meta, Shape.Meta):
        abstract = False


class Child(Base):
    """A table of its own, and no version in it."""

    extra = models.CharField(max_length=50, unique=True)

    class Meta(Shape.Meta):
        abstract = False


class BareManager(models.Manager.from_queryset(VersionedQuerySet)):  # type: ignore[misc]
    """A manager of one's own."""

    def get_queryset(self) -> Any:
        return super().get_queryset().exclude(title="hidden")


class Bare(Shape):
    """A model with only the field, under names of its own, and with a manager that hides some rows."""

    title = models.CharField(max_length=50)
    revision = VersionField(db_column="documentVersion", null=True)  # type: ignore[misc]

    objects = BareManager()
    everything = VersionedManager()

    class Meta(Shape.Meta):
        abstract = False
        base_manager_name = "everything"


class Renamed(VersionedModel, Shape):
    """Derived, with another field as the version."""

    version = None  # type: ignore[assignment]
    revision = VersionField()
    title = models.CharField(max_length=50)

    class Meta(VersionedModel.Meta, Shape.Meta):
        abstract = False
        select_on_save = True


class Named(VersionedModel):
    """A model with a given key instead of a made one."""

    name = models.CharField(primary_key=True, max_length=50, db_column="_id")
    value = models.IntegerField(default=0)

    class Meta(VersionedModel.Meta):
        apps = registry
        app_label = "versioned"


class Pair(VersionedModel):
    """A model with a key of two columns. MongoDB has no such keys."""

    pk = models.CompositePrimaryKey("left", "right")
    left = models.IntegerField()
    right = models.IntegerField()
    value = models.IntegerField(default=0)

    class Meta(VersionedModel.Meta):
        apps = registry
        app_label = "versioned"


class Soft(Shape):
    """A model with a delete() that deletes nothing."""

    deleted = models.BooleanField(default=False)

    class Meta(Shape.Meta):
        abstract = True

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        self.deleted = True
        self.save()
        return 1, {}


class SoftThing(Soft):
    """A bare version above a delete() of the user."""

    version = VersionField()
    objects = VersionedManager()

    class Meta(Shape.Meta):
        abstract = False
        base_manager_name = "objects"


ALL = (Topic, Thing, Part, Guard, Base, Child, Bare, Renamed, Named, SoftThing)


def make_tables(alias: str) -> None:
    """Make a table for each."""
    with connections[alias].schema_editor() as editor:
        for model in ALL:
            editor.create_model(model)


def empty_tables(alias: str) -> None:
    """Take all rows out."""
    for model in reversed(ALL):
        model._base_manager.using(alias).all()._raw_delete(alias)
