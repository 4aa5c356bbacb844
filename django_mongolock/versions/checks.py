"""Checks how transactions begin where models have a version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, register
from django.db import connections, router

from ..inspection.check_messages import warning
from .checking import version_field


@register(deploy=True)
def check_versions(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check how transactions begin on SQLite, if a model with a version is stored there."""
    aliases = {router.db_for_write(model) for model in apps.get_models() if version_field(model) is not None}
    return [message for alias in sorted(aliases) for message in _check_sqlite(alias)]


def _check_sqlite(alias: str) -> Iterator[CheckMessage]:
    connection = connections[alias]
    mode = connection.settings_dict["OPTIONS"].get("transaction_mode")
    if connection.vendor == "sqlite" and str(mode).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        yield warning(
            "W073",
            f'DATABASES[{alias!r}] is SQLite: a transaction that reads and then writes fails at once ("database is '
            'locked") if another one writes. @retry_on_conflict retries it.',
            'To let it wait for the other one instead, set "OPTIONS": {"transaction_mode": "IMMEDIATE"}.',
        )
