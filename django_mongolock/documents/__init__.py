"""Locks kept inside business documents. An app of its own: "django_mongolock.documents" in INSTALLED_APPS."""

from ..inspection.kinds import Swept
from . import checks as _checks  # noqa: F401 - they register themselves
from .batch import Batch
from .document_lock import DocumentLock, declared
from .held_document import HeldDocument
from .hold import Hold
from .snapshot import DocumentSnapshot

__all__ = ["Batch", "DocumentLock", "DocumentSnapshot", "HeldDocument", "Hold", "Swept", "declared"]
