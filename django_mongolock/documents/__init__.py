"""Locks kept inside business documents."""

from . import counts as _counts  # noqa: F401 - it registers itself with the inspection
from .batch import Batch
from .document_lock import DocumentLock, declared
from .hold import Hold
from .holding import HeldDocument
from .queryset import DocumentQuerySet
from .snapshot import DocumentSnapshot
from .sweep import Swept

__all__ = [
    "Batch",
    "DocumentLock",
    "DocumentQuerySet",
    "DocumentSnapshot",
    "HeldDocument",
    "Hold",
    "Swept",
    "declared",
]
