"""Locks kept inside business documents. An app of its own: "django_mongolock.documents" in INSTALLED_APPS."""

from ..inspection.kinds import Swept
from . import kind as _kind  # noqa: F401 - its check registers itself
from .document_lock import DocumentLock, declared
from .held_document import HeldDocument
from .hold import Batch, Hold
from .rules import DocumentSnapshot

__all__ = ["Batch", "DocumentLock", "DocumentSnapshot", "HeldDocument", "Hold", "Swept", "declared"]
