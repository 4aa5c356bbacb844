"""The models, which are read and never written: `Lock` and `LockEvent`."""

from ..inspection.snapshot import LockSnapshot, Party
from .entry import Entry
from .lock_event import LockEvent
from .lock_model import Lock, LockQuerySet

__all__ = ["Entry", "Lock", "LockEvent", "LockQuerySet", "LockSnapshot", "Party"]
