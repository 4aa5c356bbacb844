"""Checks of the project's settings. They need no server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import mail
from django.core.checks import CheckMessage, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS

from ..conf import ENGINE, KNOWN, MEMORY, NAME, SIMILAR, LockSettings, find_wrong, raw_settings
from ..environment import NO_NAME, address_problem, database_from_url
from ..inspection.check_messages import error, warning
from ..router import ROUTER

#: What the name of a database may not contain.
REFUSED: Final = ' ."$/\\\0'


@register()
def check_settings(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check every value of MONGOLOCK, the alias that it names, and the router."""
    try:
        raw = raw_settings()
    except ImproperlyConfigured as problem:
        return [_unreadable(problem), *_check_contrib()]
    kept = _check_memory() if raw.get("BACKEND") == MEMORY else _check_database(raw)
    return [*_check_values(raw), *_check_contrib(), *kept]


def _unreadable(problem: ImproperlyConfigured) -> CheckMessage:
    if isinstance(getattr(settings, NAME), str):
        return error("E018", f"{problem}.", 'Write an object: {"DATABASE": "<alias of your MongoDB>", "LEASE": 30}.')
    return error("E001", f"{problem}.", f'Write {NAME} = {{"DATABASE": "<alias of your MongoDB>"}}.')


def _check_database(raw: Mapping[str, Any]) -> list[CheckMessage]:
    return list(_check_database_alias(raw.get("DATABASE"))) or list(_check_router(raw["DATABASE"]))


def _check_values(raw: Mapping[str, Any]) -> list[CheckMessage]:
    found: list[CheckMessage] = [
        error("E004", f"{NAME} has an unknown setting {name!r}.", _known(name))
        for name in sorted(set(raw) - KNOWN, key=str)
    ]
    found += [error(wrong.id, f"{wrong.problem}.", f"{wrong.cure}.") for wrong in find_wrong(raw)]
    return found or list(_check_times(raw))


def _known(name: object) -> str:
    meant = get_close_matches(str(name).upper(), KNOWN, 1, SIMILAR)
    names = ", ".join(sorted(KNOWN))
    return (
        f"Write {meant[0]!r}." if meant else f'Known: {names}. See "What cannot be set, and why" in the documentation.'
    )


def _check_times(raw: Mapping[str, Any]) -> Iterator[CheckMessage]:
    lease, timeout = (raw.get(name, getattr(LockSettings(), name)) for name in ("LEASE", "COMMAND_TIMEOUT"))
    if lease <= timeout:
        yield warning(
            "W006",
            f'{NAME}["LEASE"] is {lease:g} s, but one command may take {timeout:g} s ("COMMAND_TIMEOUT"): a lock may '
            "be lost before the reply that grants it.",
            "Make COMMAND_TIMEOUT at most a third of LEASE.",
        )


def _check_contrib() -> Iterator[CheckMessage]:
    """Warn about a module of `contrib` that is listed without its Config: it would do nothing."""
    configs = {
        "django_mongolock.contrib.opentelemetry": "OpenTelemetryConfig",
        "django_mongolock.contrib.prometheus": "PrometheusConfig",
    }
    for config in apps.get_app_configs():
        if type(config) is AppConfig and config.name in configs:
            yield warning(
                "W007",
                f"INSTALLED_APPS has {config.name!r} without its Config: nothing is measured.",
                f'Write "{config.name}.{configs[config.name]}".',
            )


def _check_memory() -> Iterator[CheckMessage]:
    if not hasattr(mail, "outbox"):  # Django's test environment, for which this backend is made, has one
        yield warning(
            "W005",
            f'{NAME}["BACKEND"] keeps the locks in the memory of each process: two processes can hold the same lock.',
            "It is for tests only. Remove BACKEND from the settings that servers, workers and commands run with.",
        )


def _check_database_alias(alias: object) -> Iterator[CheckMessage]:
    mongo = [name for name, entry in settings.DATABASES.items() if entry.get("ENGINE") == ENGINE]
    choices = f"MongoDB aliases in DATABASES: {', '.join(mongo) or 'none'}."
    if not alias:
        yield error("E001", f'{NAME}["DATABASE"] is not set.', f"Name the alias of your MongoDB. {choices}")
    elif not isinstance(alias, str) or alias not in settings.DATABASES:
        yield error("E002", f'{NAME}["DATABASE"] names {alias!r}, which is not in DATABASES.', choices)
    elif alias not in mongo:
        yield error("E003", f'{NAME}["DATABASE"] names {alias!r}, which is not MongoDB.', choices)
    else:
        yield from _check_address(alias, settings.DATABASES[alias])


def _check_router(alias: str) -> Iterator[CheckMessage]:
    if alias != DEFAULT_DB_ALIAS and ROUTER not in _router_names():
        yield warning(
            "W001",
            f"DATABASE_ROUTERS lacks {ROUTER}: the lock model would be read from the default database.",
            f'Put "{ROUTER}" into DATABASE_ROUTERS.',
        )


def _check_address(alias: str, entry: Mapping[str, Any]) -> Iterator[CheckMessage]:
    host = entry.get("HOST") or ""
    address = host if isinstance(host, str) and "://" in host else ""
    if address and (problem := address_problem(address)):
        yield error(
            "E019",
            f"The address of DATABASES[{alias!r}] is wrong: {problem}.",
            "Write mongodb://user:password@host1,host2/name?replicaSet=rs0&tls=true.",
        )
        return
    name = str(entry.get("NAME") or database_from_url(address)["NAME"])
    refused = next((character for character in REFUSED if character in name), None)
    if refused is not None:
        problem = "has no NAME" if name == NO_NAME else f"has {refused!r} in its NAME, which MongoDB refuses"
        yield error(
            "E021",
            f"DATABASES[{alias!r}] {problem}.",
            "Name the database; in an address, it stands after the servers: mongodb://host1,host2/name.",
        )


def _router_names() -> Iterator[str]:
    for router in settings.DATABASE_ROUTERS:
        kind: type = type(router)
        yield str(router) if kind is str else f"{kind.__module__}.{kind.__qualname__}"


@register(deploy=True)
def check_deployment(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check what is fine in development and does harm in production."""
    try:
        return list(_check_deployment(raw_settings()))
    except ImproperlyConfigured:
        return []


def _check_deployment(raw: Mapping[str, Any]) -> Iterator[CheckMessage]:
    if not raw.get("KEY_PREFIX"):
        yield warning(
            "W002",
            f'{NAME}["KEY_PREFIX"] is empty: another site or stage in the same database would share the locks.',
            'Give each its own, for example "shop-production:", unless each has a database of its own.',
        )
    alias = raw.get("DATABASE")
    host = settings.DATABASES.get(alias, {}).get("HOST") if isinstance(alias, str) else None
    if isinstance(host, str) and ":" in host.partition("://")[2].rpartition("@")[0]:
        yield warning(
            "W003",
            f"The HOST of DATABASES[{alias!r}] holds a password, which Django's debug page shows in clear.",
            "Give USER and PASSWORD beside HOST instead of inside the URI.",
        )


def has_wrong_settings() -> bool:
    return any(message.is_serious() for message in check_settings(app_configs=None))
