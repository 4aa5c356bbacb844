"""For your tests: locks without a MongoDB, which a test can hold as another process, lose and check.

With pytest there is the fixture `mongolock`; with unittest use `LockTestMixin` or `override_locks`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .locks import HeldLock, LockTestMixin, MemoryLocks, override_locks

__all__ = ["HeldLock", "LockTestMixin", "MemoryLocks", "override_locks"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is used: pytest imports this package before Django has its settings."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.locks"), name)
