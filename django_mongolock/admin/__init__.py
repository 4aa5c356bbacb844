"""The admin of the locks. Django's autodiscovery imports this module; it registers `LockAdmin`."""

from .locks import LockAdmin

__all__ = ["LockAdmin"]
