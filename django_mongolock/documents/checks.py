"""Checks of the declared document locks that need no server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register
from django.core.exceptions import ImproperlyConfigured

from ..backends.mongo import database_settings
from ..conf import missing_app
from ..inspection.check_messages import error
from .document_lock import declared


@register()
def check_document_places(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the models of the declared document locks are in MongoDB, which a router decides late."""
    if not declared():
        return []
    missing = missing_app("django_mongolock.documents", f"The document lock {declared()[0].name!r}")
    return [*missing, *_check_document_places()]


def _check_document_places() -> Iterator[CheckMessage]:
    for lock in declared():
        try:
            if lock.alias is not None:
                database_settings(lock.alias)
        except ImproperlyConfigured as problem:
            yield error(
                "E016",
                f"The document lock {lock.name!r} is declared on a model that is not in MongoDB: {problem}.",
                "Have a router send the model to MongoDB, or name the alias by using=.",
            )
