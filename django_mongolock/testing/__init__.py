"""Test support: locks without a MongoDB. A test can hold them as another process, lose them and check them.

With pytest, use the fixture `mongolock`. With unittest, use `LockTestMixin` or `override_locks`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .locks import HeldLock, LockTestMixin, MemoryLocks, override_locks

__all__ = ["HeldLock", "LockTestMixin", "MemoryLocks", "override_locks"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on first use, because pytest imports this package before Django has its settings."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.locks"), name)
