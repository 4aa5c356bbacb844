"""The same models for every database. The key is called _id, and there is no counter, because MongoDB has none."""

from __future__ import annotations

import uuid

from django.db import models

from django_mongolock.versions import VersionedModel


class Rate(VersionedModel):
    """The latest rate of a currency. A change needs its present version."""

    name = models.CharField(primary_key=True, max_length=20, db_column="_id")
    value = models.IntegerField(help_text="Thousandths.")
    note = models.CharField(max_length=200, blank=True)

    class Meta(VersionedModel.Meta):
        ordering = ("name",)

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


class PlainRate(models.Model):
    """A rate without a version. The last save wins."""

    name = models.CharField(primary_key=True, max_length=20, db_column="_id")
    value = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


class PastRate(models.Model):
    """A rate that was replaced."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, db_column="_id")
    name = models.CharField(max_length=20)
    value = models.IntegerField()
    replaced_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"
