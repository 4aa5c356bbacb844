"""Locks kept inside business documents, and writes that fencing tokens guard."""

from .document_lock import DocumentLock, Hold
from .fencing import afenced_write, fenced_write
from .holding import Batch, HeldDocument
from .registry import declared
from .sweep import StuckDocument, Swept

__all__ = [
    "Batch",
    "DocumentLock",
    "HeldDocument",
    "Hold",
    "StuckDocument",
    "Swept",
    "afenced_write",
    "declared",
    "fenced_write",
]
