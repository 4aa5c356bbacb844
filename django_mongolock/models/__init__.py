"""The models, which are read and never written: `Lock` and `LockEvent`."""

from .lock import Holder, Lock, LockQuerySet, Waiter
from .lock_event import LockEvent

__all__ = ["Holder", "Lock", "LockEvent", "LockQuerySet", "Waiter"]
