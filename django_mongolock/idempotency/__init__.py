"""What is sent again is not done again. An app of its own: "django_mongolock.idempotency" in INSTALLED_APPS."""

from .decorator import idempotent

__all__ = ["idempotent"]
