"""Named locks shared by all processes of a Django project, kept in the MongoDB that it already runs."""

from .decorators import SKIPPED, mongo_locked
from .documents import DocumentLock, afenced_write, fenced_write
from .engine.locks import MongoLock
from .exceptions import (
    ConflictError,
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentLockLost,
    DocumentNotFound,
    FencedOff,
    LockBackendError,
    LockCancelled,
    LockDeadlock,
    LockDocumentError,
    LockError,
    LockLostError,
    LockNotAcquired,
    LockQueueFull,
    LockReentryError,
    LockStateError,
)
from .keys import lock_key
from .locks import mongo_lock, mongo_semaphore

__version__ = "0.1.0"

__all__ = [
    "SKIPPED",
    "ConflictError",
    "DocumentChanged",
    "DocumentDamaged",
    "DocumentHeld",
    "DocumentLock",
    "DocumentLockLost",
    "DocumentNotFound",
    "FencedOff",
    "LockBackendError",
    "LockCancelled",
    "LockDeadlock",
    "LockDocumentError",
    "LockError",
    "LockLostError",
    "LockNotAcquired",
    "LockQueueFull",
    "LockReentryError",
    "LockStateError",
    "MongoLock",
    "afenced_write",
    "fenced_write",
    "lock_key",
    "mongo_lock",
    "mongo_locked",
    "mongo_semaphore",
]
