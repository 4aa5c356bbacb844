"""The admin of the locks. Django's autodiscovery imports this module; it registers `LockAdmin` and
`LockEventAdmin`."""

from ..editing.listing import EditedFilter
from ..editing.mixin import EditLockMixin
from .document_locks import DocumentLockAdminMixin
from .lock_admin import LockAdmin
from .lock_events import LockEventAdmin

__all__ = ["DocumentLockAdminMixin", "EditLockMixin", "EditedFilter", "LockAdmin", "LockEventAdmin"]
