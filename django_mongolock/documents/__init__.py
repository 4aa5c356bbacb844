"""Locks kept inside business documents, and writes that fencing tokens guard."""

from .document_lock import DocumentLock, Hold, declared
from .fencing import afenced_write, fenced_write
from .holding import Batch, HeldDocument
from .sweep import StaleDocument, Swept

__all__ = [
    "Batch",
    "DocumentLock",
    "HeldDocument",
    "Hold",
    "StaleDocument",
    "Swept",
    "afenced_write",
    "declared",
    "fenced_write",
]
