"""The check that the app is installed where `idempotent` is used."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, register


@register()
def check_installed(**kwargs: Any) -> list[CheckMessage]:
    """Check that the app is in INSTALLED_APPS, as something has imported it."""
    if apps.is_installed("django_mongolock.idempotency"):
        return []
    return [
        Error(
            "@idempotent is used, but its app is not installed: what it keeps is never removed.",
            hint='Put "django_mongolock.idempotency" into INSTALLED_APPS.',
            id="mongolock.E025",
        )
    ]
