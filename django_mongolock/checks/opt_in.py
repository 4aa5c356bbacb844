"""Checks of document locks, edit locks and models with a version, if the project has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register

from ..conf import raw_settings
from ..decorator.calls import shared_by_all
from ..inspection.kinds import kinds
from .messages import warning
from .project import has_wrong_settings


@register()
def check_shared_locks(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that a function with arguments says which of its calls exclude one another."""
    return [
        warning(
            "W009",
            f"All calls of {name}() share one lock, whatever their arguments: its @mongo_locked has no key.",
            'Name the arguments that matter, as in @mongo_locked("order:{order_id}"). If all calls are meant, name the '
            'lock: @mongo_locked("import").',
        )
        for name in sorted(shared_by_all)
    ]


@register(Tags.database)
def check_kinds(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check what the other kinds of locks need of the server, such as an index for the sweep of document locks."""
    if not databases or has_wrong_settings():
        return []
    home = raw_settings().get("DATABASE")
    return [message for kind in kinds() if (kind.alias or home) in databases for message in kind.checks()]
