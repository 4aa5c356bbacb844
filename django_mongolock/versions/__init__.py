"""Optimistic versions: nothing is locked, and what has changed since it was read is not overwritten.

    class Rate(VersionedModel):
        value = models.DecimalField(max_digits=12, decimal_places=6)

    @retry_on_conflict
    def raise_rate(pk, by):
        rate = Rate.objects.get(pk=pk)
        rate.value += by
        rate.save()                     # VersionConflict if it is not the version that was read

An app of its own: "django_mongolock.versions" in INSTALLED_APPS. For every database that Django supports; MONGOLOCK is
not needed. Forms are in `versions.forms`, the admin is in `versions.admin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..exceptions import VersionConflict
from .retry import retry_on_conflict

if TYPE_CHECKING:
    from .versioned_model import VersionedManager, VersionedModel, VersionedQuerySet, VersionField

__all__ = [
    "VersionConflict",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "retry_on_conflict",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the model's names when they are used: a model cannot be made before the apps are known."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".versioned_model", __name__), name)
