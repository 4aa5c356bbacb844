"""The records of the external service, with its present state, and every call with its times."""

from django.db import models
from django_mongodb_backend.fields import ObjectIdAutoField

from testproject.mongo import MongoModel


class ShownAd(MongoModel):
    """One ad as the service has it now, shown with this content or withdrawn."""

    ad_id = models.CharField(primary_key=True, max_length=24, db_column="_id")
    shown = models.BooleanField(default=False)
    version = models.PositiveIntegerField(default=0)
    content = models.JSONField(default=dict)
    sequence = models.PositiveIntegerField(default=0, help_text="How many calls were applied.")

    class Meta:
        verbose_name = "shown ad"

    def __str__(self) -> str:
        return f"{self.ad_id} ({'shown' if self.shown else 'withdrawn'})"


class Call(MongoModel):
    """One call, written when it ended, in an append-only log."""

    class Kind(models.TextChoices):
        """The purpose of a call."""

        EXPORT = "export"
        WITHDRAW = "withdraw"

    id = ObjectIdAutoField(primary_key=True)
    ad_id = models.CharField(max_length=24)
    kind = models.CharField(max_length=10, choices=Kind)
    version = models.PositiveIntegerField(help_text="The version of the ad that the caller read.")
    sequence = models.PositiveIntegerField(
        null=True, help_text="Which call of this ad it was, as applied; empty if refused."
    )
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField()

    class Meta:
        ordering = ("ended_at", "id")
        indexes = (
            models.Index(fields=["ended_at"], name="call_ended"),
            models.Index(fields=["ad_id", "sequence"], name="call_order"),
        )

    def __str__(self) -> str:
        outcome = "refused" if self.sequence is None else f"call {self.sequence}"
        return f"{self.kind} of {self.ad_id} version {self.version}: {outcome}"
