"""What is sent again is not done again. An app of its own: "django_mongolock.idempotency" in INSTALLED_APPS."""

from . import checks  # noqa: F401 - it registers itself
from .decorator import idempotent

__all__ = ["idempotent"]
