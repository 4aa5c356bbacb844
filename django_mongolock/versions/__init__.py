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
from typing import TYPE_CHECKING, Any, Final

from ..exceptions import VersionConflict

if TYPE_CHECKING:
    from .querysets import VersionedManager, VersionedQuerySet
    from .retry import retry_on_conflict
    from .versioned_model import VersionedModel, VersionField

__all__ = [
    "VersionConflict",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "retry_on_conflict",
]

#: Where the names are. They are imported when they are used: a model cannot be made before the apps are known.
_PLACES: Final = {
    "VersionField": "versioned_model",
    "VersionedManager": "querysets",
    "VersionedModel": "versioned_model",
    "VersionedQuerySet": "querysets",
    "retry_on_conflict": "retry",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_PLACES[name]}", __name__), name)
