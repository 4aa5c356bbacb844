"""The admin of the locks. Django's autodiscovery imports this module; it registers `LockAdmin` and
`LockEventAdmin`."""

from .lock_admin import LockAdmin
from .lock_events import LockEventAdmin

__all__ = ["LockAdmin", "LockEventAdmin"]
