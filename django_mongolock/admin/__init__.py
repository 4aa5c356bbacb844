"""The admin of the locks. Django's autodiscovery imports this module; it registers `LockAdmin`."""

from .lock_admin import LockAdmin

__all__ = ["LockAdmin"]
