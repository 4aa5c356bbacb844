"""The models, which are read and never written: `Lock` and `LockEvent`."""

from ..inspect.snapshot import LockSnapshot, Party
from .entry import Entry
from .lock import Lock, LockQuerySet
from .lock_event import LockEvent

__all__ = ["Entry", "Lock", "LockEvent", "LockQuerySet", "LockSnapshot", "Party"]
