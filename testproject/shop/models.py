"""Orders in SQL, and ads and sellers in MongoDB, under the field names of their documents."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone
from django_mongodb_backend.fields import ObjectIdAutoField

from django_mongolock.documents import DocumentLock
from django_mongolock.versions import VersionedQuerySet, VersionField
from testproject.mongo import MongoModel


class Order(models.Model):
    """Something that is paid once and then shipped once."""

    class State(models.TextChoices):
        """The progress of an order."""

        NEW = "new"
        PAID = "paid"
        SHIPPED = "shipped"

    buyer = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    item = models.CharField(max_length=200)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    state = models.CharField(max_length=10, choices=State, default=State.NEW)
    charges = models.PositiveIntegerField(default=0, help_text="The number of payments taken.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"order {self.pk}: {self.item}"


class Seller(MongoModel):
    """A user's settings for all ads."""

    user_id = models.CharField(primary_key=True, max_length=64, db_column="_id")
    name = models.CharField(max_length=150, blank=True)
    exports = models.BooleanField(default=True, help_text="Show my ads at the external service.")

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name or self.user_id


class AdQuerySet(VersionedQuerySet["Ad"]):
    """The queries of the flows."""

    def alive(self) -> AdQuerySet:
        """Ads that were not deleted."""
        return self.filter(deleted=False)

    def change(self, **changes: Any) -> int:
        """Write *changes* and increase the version, in one update, and return the number of ads."""
        return self.update(
            export_status=Ad.ExportStatus.PENDING,
            updated_at=Now(),
            **changes,
        )

    def unsettled(self) -> AdQuerySet:
        """Ads whose latest version has not reached the external service."""
        behind = Q(exported_version__lt=F("document_version"))
        return self.filter(behind | Q(export_status__in=Ad.FAILURES))

    def due(self, quiet_seconds: float) -> AdQuerySet:
        """Return the ads for the retry job, which are failed exports, and changes whose event was lost."""
        long_ago = timezone.now() - timedelta(seconds=quiet_seconds)
        failed = Q(export_status__in=Ad.FAILURES)
        return self.unsettled().filter(failed | Q(updated_at__lt=long_ago))


class Ad(MongoModel):
    """An ad and the state of its export. A deleted ad stays as a document with a mark."""

    class ExportStatus(models.TextChoices):
        """The state of the ad at the external service, as far as the shop knows."""

        PENDING = "pending"
        EXPORTED = "exported"
        WITHDRAWN = "withdrawn"
        FAILED = "failed"
        # Only under the lock in the ad itself, see `ad_events`.
        EXPORTING = "exporting"
        WITHDRAWING = "withdrawing"
        WITHDRAW_FAILED = "withdraw_failed"

    FAILURES = (ExportStatus.FAILED, ExportStatus.WITHDRAW_FAILED)

    id = ObjectIdAutoField(primary_key=True)
    user_id = models.CharField("seller", max_length=64, db_column="userId")
    title = models.CharField(max_length=200)
    body = models.TextField(blank=True)
    price = models.PositiveIntegerField()
    opted_in = models.BooleanField(default=True, db_column="optedIn")
    deleted = models.BooleanField(default=False)
    document_version = VersionField("version", db_column="documentVersion", help_text="Increased by every change.")
    export_status = models.CharField(
        "export",
        max_length=16,
        choices=ExportStatus,
        default=ExportStatus.PENDING,
        db_column="exportStatus",
    )
    exported_version = models.PositiveIntegerField("exported version", default=0, db_column="exportedVersion")
    locked_by = models.CharField(max_length=64, null=True, editable=False, db_column="lockedBy")
    lock_timestamp = models.DateTimeField("locked since", null=True, editable=False, db_column="lockTimestamp")
    updated_at = models.DateTimeField("changed", auto_now=True, db_column="updatedAt")

    objects = AdQuerySet.as_manager()

    class Meta:
        base_manager_name = "objects"
        ordering = ("-updated_at",)
        indexes = (
            models.Index(fields=["user_id"], name="ad_user"),
            models.Index(fields=["-updated_at"], name="ad_updated"),
            models.Index(fields=["export_status", "lock_timestamp"], name="ad_status"),
        )

    def __str__(self) -> str:
        return self.title


#: The lock in the ad itself, for the flow that calls the external service. See `ad_events`.
ad_exports = DocumentLock(
    Ad,
    name="ad exports",
    state="export_status",
    pending={
        Ad.ExportStatus.EXPORTING: Ad.ExportStatus.FAILED,
        Ad.ExportStatus.WITHDRAWING: Ad.ExportStatus.WITHDRAW_FAILED,
    },
    final=[Ad.ExportStatus.EXPORTED, Ad.ExportStatus.WITHDRAWN],
    holder="locked_by",
    version="document_version",
    time="lock_timestamp",
    stale_after=settings.SHOP_STALE_AFTER,
)
