"""Named locks shared by all processes of a Django project, kept in the MongoDB that it already runs."""

from .claims import Claim, claim
from .decorator.locked_command import LockedCommand
from .decorator.mongo_locked import SKIPPED, mongo_locked
from .decorator.once_per import once_per
from .engine.lock import MongoLock
from .exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockBackendFailed,
    LockCancelled,
    LockDeadlock,
    LockDocumentDamaged,
    LockError,
    LockKeyInvalid,
    LockLost,
    LockMisused,
    LockNotAcquired,
    LockQueueFull,
    LockReentry,
    LockTransactionAborted,
    StaleToken,
    VersionConflict,
)
from .fencing import afenced_update, fenced_update
from .info import alock_info, lock_info
from .keys import lock_key
from .leaders import leader
from .locks import mongo_lock, mongo_semaphore

__version__ = "0.1.0"

__all__ = [
    "SKIPPED",
    "Claim",
    "DocumentChanged",
    "DocumentDamaged",
    "DocumentHeld",
    "DocumentLockLost",
    "DocumentNotFound",
    "DocumentRefused",
    "LockBackendFailed",
    "LockCancelled",
    "LockDeadlock",
    "LockDocumentDamaged",
    "LockError",
    "LockKeyInvalid",
    "LockLost",
    "LockMisused",
    "LockNotAcquired",
    "LockQueueFull",
    "LockReentry",
    "LockTransactionAborted",
    "LockedCommand",
    "MongoLock",
    "StaleToken",
    "VersionConflict",
    "afenced_update",
    "alock_info",
    "claim",
    "fenced_update",
    "leader",
    "lock_info",
    "lock_key",
    "mongo_lock",
    "mongo_locked",
    "mongo_semaphore",
    "once_per",
]
