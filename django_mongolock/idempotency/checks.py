"""The check that the app is installed where `idempotent` is used."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, register

from ..conf import missing_app


@register()
def check_installed(**kwargs: Any) -> list[CheckMessage]:
    """Check that the app is in INSTALLED_APPS, as something has imported it: it removes what is kept too long."""
    return missing_app("django_mongolock.idempotency", "@idempotent")
