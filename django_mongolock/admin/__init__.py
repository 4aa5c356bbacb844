"""The admin of the locks. Django's autodiscovery imports this module; it registers `LockAdmin` and
`LockEventAdmin`."""

from ..editing.admin import EditLockMixin
from .documents import DocumentLockAdminMixin
from .events import LockEventAdmin
from .locks import LockAdmin

__all__ = ["DocumentLockAdminMixin", "EditLockMixin", "LockAdmin", "LockEventAdmin"]
