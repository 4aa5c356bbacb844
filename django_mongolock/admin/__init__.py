"""The admin of the locks. Django's autodiscovery imports this module, and the import registers `LockAdmin`."""

from .lock_admin import LockAdmin

__all__ = ["LockAdmin"]
