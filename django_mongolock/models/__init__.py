"""The model of the locks. The model is read and never written."""

from ..inspection.snapshot import LockSnapshot, Party
from .lock_model import Lock, LockQuerySet
from .reading import Entry

__all__ = ["Entry", "Lock", "LockQuerySet", "LockSnapshot", "Party"]
