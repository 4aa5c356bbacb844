"""The model of the locks, which is read and never written."""

from ..inspection.snapshot import LockSnapshot, Party
from .fields import Entry
from .lock_model import Lock, LockQuerySet

__all__ = ["Entry", "Lock", "LockQuerySet", "LockSnapshot", "Party"]
