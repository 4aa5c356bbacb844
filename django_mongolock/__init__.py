"""Named locks shared by all processes of a Django project, kept in the MongoDB that it already runs.

This module has the names that most projects need. All others are in the module of their topic, such as
`django_mongolock.exceptions` or `django_mongolock.leaders`. Each is imported when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decorator import SKIPPED, mongo_locked, once_per
    from .exceptions import LockBackendFailed, LockError, LockLost, LockNotAcquired
    from .inspection.queries import lock_info
    from .locks import mongo_lock, mongo_semaphore

__version__ = "1.0.0"

_NAMES = {
    "decorator": ("SKIPPED", "mongo_locked", "once_per"),
    "exceptions": ("LockBackendFailed", "LockError", "LockLost", "LockNotAcquired"),
    "inspection.queries": ("lock_info",),
    "locks": ("mongo_lock", "mongo_semaphore"),
}
#: The module of each name.
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "SKIPPED",
    "LockBackendFailed",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "lock_info",
    "mongo_lock",
    "mongo_locked",
    "mongo_semaphore",
    "once_per",
]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return the names of this module, imported or not."""
    return sorted({*globals(), *__all__})
