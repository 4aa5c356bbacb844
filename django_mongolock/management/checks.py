"""System checks: ``manage.py check`` reports a wrong setting before it causes an error at run time.

An id is never used for another check. E0xx and W0xx need no server; E1xx and W1xx ask it (``check --database``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import mail
from django.core.checks import CheckMessage, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.converters import PathConverter, StringConverter

from ..backends import MongoBackend, get_backend, mongo_store
from ..conf import (
    ENGINE,
    KNOWN,
    MEMORY,
    NAME,
    NO_NAME,
    LockSettings,
    address_problem,
    critical,
    database_from_url,
    error,
    find_wrong,
    get_settings,
    is_alias,
    missing_app,
    raw_settings,
    used_apps,
    warning,
)
from ..decorator import TEMPLATES
from ..decorator.calls import shared_by_all
from ..inspection.kinds import kinds
from ..inspection.server import inspect_server, told
from ..keys import KeyTemplate
from ..router import ROUTER

#: The hint for mistakes that also cause errors of django_mongodb_backend. Its own hint names another cure.
_BELOW: Final = "Errors of mongodb below come from this."
#: The characters that the name of a database may not contain.
REFUSED: Final = ' ."$/\\\0'
#: A HOST that is no address: names of servers, or the path of a socket.
HOSTS: Final = re.compile(r"[^@/?]*|/[^@?]*\.sock")
#: The similarity (difflib) from which a name counts as a typing error. BEAT and EDIT_BEAT are less similar.
SIMILAR: Final = 0.75


@register()
def check_settings(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check every value of MONGOLOCK, the alias that it names, and the router."""
    try:
        raw = raw_settings()
    except ImproperlyConfigured as problem:
        return [_unreadable(problem), *_check_contrib()]
    needed = list(_check_contrib())
    if raw.get("HISTORY"):
        needed += missing_app("django_mongolock.history", f'{NAME}["HISTORY"]')
    if raw.get("BACKEND") == MEMORY:
        kept = list(_check_memory())
    else:
        kept = list(_check_database_alias(raw.get("DATABASE"))) or list(_check_router(raw["DATABASE"]))
    return [*_check_values(raw), *needed, *kept]


def _unreadable(problem: ImproperlyConfigured) -> CheckMessage:
    if isinstance(getattr(settings, NAME), str):
        cure = 'Write an object: {"DATABASE": "<alias of your MongoDB>", "LEASE": 30}.'
        return error("E018", f"{problem}. {_BELOW}", cure)
    return critical("E001", f"{problem}. {_BELOW}", f'Write {NAME} = {{"DATABASE": "<alias of your MongoDB>"}}.')


def _check_values(raw: Mapping[str, Any]) -> list[CheckMessage]:
    found: list[CheckMessage] = [
        error("E004", f"{NAME} has an unknown setting {name!r}.", _known(name))
        for name in sorted(set(raw) - KNOWN, key=str)
    ]
    found += [
        error("E004", f"{NAME}_{name} is not read.", f'Write {NAME} = {{"{name}": …}}.')
        for name in sorted(KNOWN - set(raw))
        if hasattr(settings, f"{NAME}_{name}")
    ]
    found += find_wrong(raw)
    return found or list(_check_times(raw))


def _known(name: object) -> str:
    meant = get_close_matches(str(name).upper(), KNOWN, 1, SIMILAR)
    names = ", ".join(sorted(KNOWN))
    return f"Write {meant[0]!r}." if meant else f"Known: {names}."


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
    """Warn about a module of `contrib` that is listed without its Config. Such a module would do nothing."""
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
    choices = f"Aliases in DATABASES with the ENGINE {ENGINE!r}: {', '.join(mongo) or 'none'}."
    if not alias:
        yield critical("E001", f'{NAME}["DATABASE"] is not set. {_BELOW}', f"Name the alias of your MongoDB. {choices}")
    elif not isinstance(alias, str) or alias not in settings.DATABASES:
        problem = f"names {alias!r}, which is not" if is_alias(alias) else "must be the name of an alias"
        yield error("E002", f'{NAME}["DATABASE"] {problem} in DATABASES. {_BELOW}', choices)
    elif alias not in mongo:
        yield error("E003", f'{NAME}["DATABASE"] names {alias!r}, which is not MongoDB. {_BELOW}', choices)
    else:
        yield from _check_address(alias, settings.DATABASES[alias])


def _check_router(alias: str) -> Iterator[CheckMessage]:
    from ..models import Lock

    try:
        found = router.db_for_read(Lock)
    except ImproperlyConfigured:  # the other checks report it
        return
    except ImportError:  # a router of DATABASE_ROUTERS, or DATABASE_ROUTERS is a text and not a list
        found = None
    if found != alias:
        yield critical(
            "E027",
            f"No router sends the lock model to {alias!r}: it would be read from the default database. {_BELOW}",
            f'Write DATABASE_ROUTERS = ["{ROUTER}"], before any router that answers for all models.',
        )


def _check_address(alias: str, entry: Mapping[str, Any]) -> Iterator[CheckMessage]:
    host = entry.get("HOST") or ""
    address = host if isinstance(host, str) and not HOSTS.fullmatch(host) else ""
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


@register(deploy=True)
def check_deployment(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check for settings that are fine in development and do harm in production."""
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


@register(Tags.database)
def check_kinds(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check the needs of each kind of locks on its server: rights, indexes, a replica set."""
    if not databases or has_wrong_settings():
        return []
    return [message for kind in kinds() for message in kind.checks(databases)]


@register(Tags.database, deploy=True)
def check_server_facts(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Report the facts of the server with ``--deploy``. Tests and ``migrate`` run the other checks of the database."""
    if not databases or has_wrong_settings():
        return []
    alias = get_settings().DATABASE
    if alias not in databases or not isinstance(get_backend(alias), MongoBackend):
        return []
    return list(told(inspect_server(mongo_store(alias), get_settings().COMMAND_TIMEOUT), alias))


#: The converters that pass text on as it was typed. Regular expressions do the same.
_AS_TYPED: Final = (StringConverter, PathConverter)


@register()
def check_apps(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the apps in use are installed."""
    _import_views()
    return [message for app, user in sorted(used_apps.items()) for message in missing_app(app, user)]


@register()
def check_shared_locks(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that a locked function with arguments has a key to tell its calls apart."""
    _import_views()
    return [
        warning(
            "W009",
            f"All calls of {name}() share one lock, whatever their arguments: its @mongo_locked has no key.",
            'Name the arguments that matter, as in @mongo_locked("order:{order_id}"). If all calls are meant, name the '
            'lock: @mongo_locked("import").',
        )
        for name in sorted(shared_by_all)
    ]


@register(Tags.urls)
def check_views(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn about locked views whose key contains a part of the address as it was typed, in any spelling."""
    found: list[CheckMessage] = []
    with contextlib.suppress(Exception):  # Django's own check reports addresses that cannot be loaded
        found += _check_patterns(_patterns(), "", frozenset())
    return found


def _import_views() -> None:
    """Import the views, so that their locks are known from now on."""
    with contextlib.suppress(Exception):
        _patterns()


def _patterns() -> Sequence[Any]:
    return get_resolver().url_patterns if getattr(settings, "ROOT_URLCONF", None) else []


def _check_patterns(patterns: Sequence[Any], start: str, typed: frozenset[str]) -> Iterator[CheckMessage]:
    for each in patterns:
        route, names = start + str(each.pattern), typed | _as_typed(each.pattern)
        if isinstance(each, URLResolver):
            yield from _check_patterns(each.url_patterns, route, names)
        elif isinstance(each, URLPattern):
            for template in _templates(each.callback):
                for name in sorted(template.plain & names):
                    yield _warning(each.lookup_str, route, template, name)


def _as_typed(pattern: Any) -> frozenset[str]:
    """Return the names of the arguments that *pattern* takes from the address as text."""
    if hasattr(pattern, "regex") and not pattern.converters:
        return frozenset(pattern.regex.groupindex)
    return frozenset(name for name, converter in pattern.converters.items() if type(converter) in _AS_TYPED)


def _templates(view: Any) -> list[KeyTemplate]:
    """Return the templates of a view, from its function, or from its class and the methods of the class."""
    cls = getattr(view, "view_class", None) or getattr(view, "cls", None)
    places = [view] if cls is None else [getattr(cls, name, None) for name in dir(cls) if not name.startswith("__")]
    return list(dict.fromkeys(template for place in places for template in getattr(place, TEMPLATES, ())))


def _warning(view: str, route: str, template: KeyTemplate, name: str) -> CheckMessage:
    return warning(
        "W010",
        f"The key of the view {view}, {template.template!r}, has {name} as it was typed into the address {route!r}: "
        "spellings of one value, such as 1 and 01, are different locks.",
        f"Bring it into one form: {{{name}:app.Model}}, {{{name}:int}}, {{{name}:uuid}} or {{{name}:slug}}; or have a "
        f"converter do so, such as <int:{name}>. If each text is a name of its own, write {{{name}!s}}.",
    )
