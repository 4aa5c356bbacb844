"""Locks kept inside business documents."""

from .document_lock import DocumentLock, Hold, declared
from .holding import Batch, HeldDocument
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
