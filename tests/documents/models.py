"""Models with document locks, in a registry of their own, so that no migration and no other test sees them."""

# ruff: noqa: DJ008 - they are never shown, and documents have nulls

from __future__ import annotations

from typing import Any

from django.apps.registry import Apps
from django.db import models
from django_mongodb_backend.fields import ArrayField, EmbeddedModelArrayField, EmbeddedModelField, ObjectIdAutoField
from django_mongodb_backend.models import EmbeddedModel

from django_mongolock.versions import VersionedManager, VersionField

registry = Apps(["tests.documents"])


class Locked(models.Model):
    """The fields of the lock, and others."""

    state = models.CharField(max_length=20, default="new", db_column="exportStatus", null=True)
    version = VersionField(db_column="documentVersion")
    holder = models.CharField(max_length=64, null=True, db_column="lockedBy")
    time = models.DateTimeField(null=True, db_column="lockTimestamp")
    price = models.IntegerField(default=5)
    title = models.CharField(max_length=50, default="")
    body = models.CharField(max_length=50, default="")
    opted_in = models.BooleanField(default=True)
    tags: Any = ArrayField(models.CharField(max_length=10), default=list)

    objects = VersionedManager()

    class Meta:
        abstract = True
        app_label = "documents"
        apps = registry
        base_manager_name = "objects"


class Advert(Locked):
    """The usual case."""

    id = ObjectIdAutoField(primary_key=True)


class LongAdvert(Locked):
    """An advert with an `_id` of 64 bits, as in the ad system."""

    number = models.BigIntegerField(primary_key=True, db_column="_id")


class CodedAdvert(Locked):
    """An advert with a primary key in another column than `_id`."""

    code = models.CharField(max_length=10, primary_key=True)


class Settings(EmbeddedModel):  # type: ignore[misc]
    """The embedded settings of an advert."""

    opted_in = models.BooleanField(default=True, db_column="in")

    class Meta:
        app_label = "documents"
        apps = registry


class EmbeddingAdvert(Locked):
    """An advert with embedded models, and with a relation."""

    id = ObjectIdAutoField(primary_key=True)
    other = models.ForeignKey("self", on_delete=models.CASCADE, null=True)
    settings: Any = EmbeddedModelField(Settings, null=True)
    empty: Any = EmbeddedModelField(Settings, null=True)
    several: Any = EmbeddedModelArrayField(Settings, default=list)


class Proxied(Locked):
    """Only its proxy has a lock."""

    id = ObjectIdAutoField(primary_key=True)


class ProxyAdvert(Proxied):
    """The proxy."""

    class Meta:
        proxy = True
        app_label = "documents"
        apps = registry
