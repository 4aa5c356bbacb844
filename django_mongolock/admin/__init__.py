"""The admin of the locks. Django's autodiscovery imports this module; it registers `LockAdmin`."""

from .documents import DocumentLockAdminMixin
from .locks import LockAdmin

__all__ = ["DocumentLockAdminMixin", "LockAdmin"]
