"""Optimistic versions: nothing is locked, and what has changed since it was read is not overwritten.

    class Rate(VersionedModel):
        value = models.DecimalField(max_digits=12, decimal_places=6)

    @retry_on_conflict
    def raise_rate(pk, by):
        rate = Rate.objects.get(pk=pk)
        rate.value += by
        rate.save()                     # VersionConflict if it is not the version that was read

For every database that Django supports; neither the app nor MONGOLOCK is needed. Forms are in `versions.forms`, the
admin is in `versions.version_admin`, and `versions.collections` is for PyMongo's own collections.
"""

from ..exceptions import VersionConflict
from .collections import aversioned_update, versioned_update
from .querysets import VersionedManager, VersionedQuerySet
from .retry import retry_on_conflict, retrying_on_conflict
from .versioned_model import VersionedModel, VersionField

__all__ = [
    "VersionConflict",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "aversioned_update",
    "retry_on_conflict",
    "retrying_on_conflict",
    "versioned_update",
]
