"""Locks kept inside business documents."""

from .batch import Batch
from .document_lock import DocumentLock, declared
from .hold import Hold
from .holding import HeldDocument
from .sweep import StaleDocument, Swept

__all__ = [
    "Batch",
    "DocumentLock",
    "HeldDocument",
    "Hold",
    "StaleDocument",
    "Swept",
    "declared",
]
