"""Checks that ask the server, for ``check --database``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register

from ..backends.base import get_backend, mongo_store
from ..backends.mongo import MongoBackend
from ..conf import get_settings
from ..inspection.kinds import kinds
from ..inspection.server_facts import inspect_server
from ..inspection.server_rules import told
from .project import has_wrong_settings


@register(Tags.database)
def check_kinds(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check what each kind of locks needs of its server: rights, indexes, a replica set."""
    if not databases or has_wrong_settings():
        return []
    return [message for kind in kinds() for message in kind.checks(databases)]


@register(Tags.database, deploy=True)
def check_server_facts(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Tell what the server said, with ``--deploy``: the tests and ``migrate`` run the other checks of the database."""
    if not databases or has_wrong_settings():
        return []
    alias = get_settings().DATABASE
    if alias not in databases or not isinstance(get_backend(alias), MongoBackend):
        return []
    return list(told(inspect_server(mongo_store(alias), get_settings().COMMAND_TIMEOUT), alias))
