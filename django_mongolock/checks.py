"""System checks: a wrong setting is told by ``manage.py check``, not by a crash at night.

Ids are used once, for ever. E0xx and W0xx need no server; E1xx and W1xx ask it (``check --database``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from django.apps import AppConfig, apps
from django.conf import settings
from django.contrib.sessions.middleware import SessionMiddleware
from django.core import checks, mail
from django.core.checks import CheckMessage, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from .backends.base import get_backend, mongo_store
from .backends.mongo import ENGINE, MongoBackend, database_settings
from .conf import KNOWN, MEMORY, NAME, LockSettings, find_wrong, get_settings, raw_settings
from .documents import declared
from .exceptions import LockBackendFailed

if TYPE_CHECKING:
    from .inspect.server_facts import ServerFacts

ROUTER: Final = "django_mongolock.router.MongoLockRouter"


#: The id of each setting's check.
_IDS: Final = {
    "LEASE": "E005",
    "WAIT": "E006",
    "KEY_PREFIX": "E007",
    "CLOCK_MARGIN": "E008",
    "WAITER_LEASE": "E009",
    "MAX_WAITERS": "E010",
    "RETENTION": "E011",
    "COMMAND_TIMEOUT": "E012",
    "BACKEND": "E013",
    "CONTENTION_STATUS": "E014",
    "SHORT_WAIT": "E015",
    "HISTORY": "E020",
    "EDIT_LEASE": "E080",
    "EDIT_BEAT": "E081",
    "EDIT_IDLE": "E082",
    "EDIT_FAIL_CLOSED": "E083",
}


def _error(number: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=hint, id=f"mongolock.{number}")


def _warning(number: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=hint, id=f"mongolock.{number}")


@register()
def check_settings(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Every value of MONGOLOCK, the alias that it names, and the router."""
    try:
        raw = raw_settings()
    except ImproperlyConfigured as error:
        return [_error("E001", str(error), f'Write {NAME} = {{"DATABASE": "<alias of your MongoDB>"}}.')]
    found: list[CheckMessage] = [
        _error("E004", f"{NAME} has an unknown setting {name!r}.", f"Known: {', '.join(sorted(KNOWN))}.")
        for name in sorted(set(raw) - KNOWN, key=str)
    ]
    found += [_error(_IDS[wrong.name], f"{wrong.problem}.", f"{wrong.cure}.") for wrong in find_wrong(raw)]
    if not found:
        found += _check_times(raw)
    found += _check_contrib()
    if raw.get("BACKEND") == MEMORY:
        return found + _check_memory()
    return found + _check_database_alias(raw.get("DATABASE"))


def _check_times(raw: Mapping[str, Any]) -> list[CheckMessage]:
    lease, timeout = (raw.get(name, getattr(LockSettings(), name)) for name in ("LEASE", "COMMAND_TIMEOUT"))
    if lease > timeout:
        return []
    return [
        _warning(
            "W006",
            f'{NAME}["LEASE"] is {lease:g} s, but one command may take {timeout:g} s ("COMMAND_TIMEOUT"): a lock may '
            "be lost before the reply that grants it.",
            "Make COMMAND_TIMEOUT at most a third of LEASE.",
        )
    ]


def _check_contrib() -> list[CheckMessage]:
    """A module of `contrib` that is named without its Config does nothing, and says nothing."""
    configs = {
        "django_mongolock.contrib.opentelemetry": "OpenTelemetryConfig",
        "django_mongolock.contrib.prometheus": "PrometheusConfig",
    }
    return [
        _warning(
            "W007",
            f"INSTALLED_APPS has {config.name!r} without its Config: nothing is measured.",
            f'Write "{config.name}.{configs[config.name]}".',
        )
        for config in apps.get_app_configs()
        if type(config) is AppConfig and config.name in configs
    ]


def _check_memory() -> list[CheckMessage]:
    if hasattr(mail, "outbox"):  # Django's test environment is set up: this is what it is for
        return []
    return [
        _warning(
            "W005",
            f'{NAME}["BACKEND"] keeps the locks in the memory of each process: two processes both get the same lock.',
            "It is for tests only. Take BACKEND out of the settings that a server, worker or command runs with.",
        )
    ]


def _check_database_alias(alias: object) -> list[CheckMessage]:
    mongo = [name for name, entry in settings.DATABASES.items() if entry.get("ENGINE") == ENGINE]
    choices = f"MongoDB aliases in DATABASES: {', '.join(mongo) or 'none'}."
    if not alias:
        return [_error("E001", f'{NAME}["DATABASE"] is not set.', f"Name the alias of your MongoDB. {choices}")]
    if not isinstance(alias, str) or alias not in settings.DATABASES:
        return [_error("E002", f'{NAME}["DATABASE"] names {alias!r}, which is not in DATABASES.', choices)]
    if alias not in mongo:
        return [_error("E003", f'{NAME}["DATABASE"] names {alias!r}, which is not MongoDB.', choices)]
    if alias != DEFAULT_DB_ALIAS and ROUTER not in _router_names():
        return [
            _warning(
                "W001",
                f"DATABASE_ROUTERS lacks {ROUTER}: the lock model would be looked for in the default database.",
                f'Put "{ROUTER}" into DATABASE_ROUTERS.',
            )
        ]
    return []


def _router_names() -> Iterable[str]:
    for router in settings.DATABASE_ROUTERS:
        kind: type = type(router)
        yield str(router) if kind is str else f"{kind.__module__}.{kind.__qualname__}"


@register(deploy=True)
def check_deployment(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """What is fine while developing and bites in production."""
    try:
        raw = raw_settings()
    except ImproperlyConfigured:
        return []
    found: list[CheckMessage] = []
    if not raw.get("KEY_PREFIX"):
        found.append(
            _warning(
                "W002",
                f'{NAME}["KEY_PREFIX"] is empty: another site or stage in the same database would share the locks.',
                'Give each its own, for example "shop-production:", unless each has a database of its own.',
            )
        )
    alias = raw.get("DATABASE")
    host = settings.DATABASES.get(alias, {}).get("HOST") if isinstance(alias, str) else None
    if isinstance(host, str) and ":" in host.partition("://")[2].rpartition("@")[0]:
        found.append(
            _warning(
                "W003",
                f"The HOST of DATABASES[{alias!r}] holds a password, which Django's debug page shows in clear.",
                "Give USER and PASSWORD beside HOST instead of inside the URI.",
            )
        )
    return found


@register(Tags.database)
def check_server(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """The server behind the alias: can it be reached, is it a replica set, are rights and indexes there?"""
    if not databases or any(message.is_serious() for message in check_settings(app_configs=None)):
        return []
    alias = raw_settings().get("DATABASE")
    if alias not in databases:
        return []
    if not isinstance(get_backend(alias), MongoBackend):
        return []
    from .inspect.server_facts import inspect_server

    facts = inspect_server(mongo_store(alias), get_settings().COMMAND_TIMEOUT)
    found: list[CheckMessage] = []
    if facts.problem:
        return [
            _error(
                "E101",
                f"The MongoDB of DATABASES[{alias!r}] cannot be used for locks: {facts.problem}.",
                "Is it running, and are HOST, USER, PASSWORD and OPTIONS right? mongosh with the same URI tells more.",
            )
        ]
    if facts.missing_rights:
        found.append(
            _error(
                "E102",
                f"The user of DATABASES[{alias!r}] lacks rights on the locks: {', '.join(facts.missing_rights)}.",
                "Grant find, insert and update on the collection mongolock_locks of that database.",
            )
        )
    found += _check_replica_set(facts, alias)
    if facts.missing_indexes:
        found.append(
            _warning(
                "W103",
                f"The collection mongolock_locks lacks indexes: {', '.join(facts.missing_indexes)}.",
                f"Run manage.py migrate --database {alias} as a user who may create indexes.",
            )
        )
    return found + _check_history(facts.history, alias)


def _check_replica_set(facts: ServerFacts, alias: object) -> list[CheckMessage]:
    """What the server, or the way it is set up, makes of a lock."""
    found: list[CheckMessage] = []
    if facts.standalone:
        found.append(
            _warning(
                "W101",
                f"The MongoDB of DATABASES[{alias!r}] is a standalone server: a lock survives no failover.",
                "Run it as a replica set; one node is enough to begin with (--replSet, rs.initiate()).",
            )
        )
    elif not facts.may_watch:
        found.append(
            _warning(
                "W104",
                f"The user of DATABASES[{alias!r}] may not watch the locks: who waits for one polls for its turn.",
                "Grant changeStream and find on the collection mongolock_locks of that database.",
            )
        )
    lease = raw_settings().get("LEASE", LockSettings().LEASE)
    if facts.failover and lease < facts.failover:
        found.append(
            _warning(
                "W102",
                f'{NAME}["LEASE"] is {lease:g} s, but a failover takes up to {facts.failover:g} s and loses the locks.',
                f"Set it to at least {facts.failover:g}.",
            )
        )
    if not facts.journaled:
        found.append(
            _warning(
                "W106",
                f"The replica set of DATABASES[{alias!r}] has writeConcernMajorityJournalDefault: false.",
                "Set it to true: locks then wait less for their turn, and your other data survives a crash of all "
                "members. Locks are safe without it: their writes wait for the journals.",
            )
        )
    return found


def _check_history(problem: str, alias: object) -> list[CheckMessage]:
    if not problem:
        return []
    hint = f"Run manage.py migrate --database {alias} as a user who may create collections, or drop what is there."
    return [_warning("W110", f"The history of the locks cannot be kept: {problem}.", hint)]


@register()
def check_document_places(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """The declared document locks: are their models in MongoDB? A router decides that, long after the declaration."""
    found: list[CheckMessage] = []
    for lock in declared():
        try:
            if lock.alias is not None:
                database_settings(lock.alias)
        except ImproperlyConfigured as error:
            found.append(
                _error(
                    "E016",
                    f"The document lock {lock.name!r} is declared on a model that is not in MongoDB: {error}.",
                    "Have a router send the model to MongoDB, or name the alias by using=.",
                )
            )
    return found


@register(Tags.database)
def check_documents(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """The declared document locks: can stale documents be found without reading the whole collection?"""
    if not databases or any(message.is_serious() for message in check_settings(app_configs=None)):
        return []
    home = raw_settings().get("DATABASE")
    found: list[CheckMessage] = []
    for lock in declared():
        if (lock.alias or home) not in databases:
            continue
        try:
            indexed = lock.has_index()
        except (LockBackendFailed, ImproperlyConfigured):  # other checks tell of it; or there is no right to list them
            continue
        if not indexed:
            fields = lock.rules.fields
            found.append(
                _warning(
                    "W105",
                    f"No index serves the sweep of the document lock {lock.name!r}: it reads the whole collection.",
                    f"Make one that begins with {fields.state!r}, best with {fields.time!r} after it: "
                    "Meta.indexes of the model, or create_index of the collection.",
                )
            )
    return found


#: A tab in the background may beat once a minute only: browsers see to that.
_THROTTLED: Final = 75.0


@register()
def check_edit_locks(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """What edit locks need, if the project has any."""
    if not _has_edit_locks() or any(message.is_serious() for message in check_settings(app_configs=None)):
        return []
    found: list[CheckMessage] = []
    values = get_settings()
    if values.EDIT_BEAT * 2 > values.EDIT_LEASE:
        message = f"EDIT_BEAT is {values.EDIT_BEAT:g} s and EDIT_LEASE {values.EDIT_LEASE:g} s: one lost beat loses it."
        found.append(_error("E084", f"{NAME}: {message}", "Let the lease last three beats at least."))
    elif values.EDIT_LEASE < _THROTTLED:
        message = f'{NAME}["EDIT_LEASE"] is {values.EDIT_LEASE:g} s, but a tab in the background beats once a minute.'
        found.append(_warning("W080", message, f"Set it to at least {_THROTTLED:g}."))
    if not any(_is_session_middleware(path) for path in settings.MIDDLEWARE):
        message = "EditLockMixin is used without SessionMiddleware: a logout does not give edit locks back."
        found.append(_warning("W081", message, "Put django.contrib.sessions.middleware.SessionMiddleware first."))
    return found


def _has_edit_locks() -> bool:
    """Without importing anything that the project does not use."""
    admin = sys.modules.get("django_mongolock.editing.mixin")
    sites = sys.modules.get("django.contrib.admin.sites")
    if admin is None or sites is None:
        return False
    registered = (model_admin for site in sites.all_sites for model_admin in site._registry.values())
    return any(isinstance(model_admin, admin.EditLockMixin) for model_admin in registered)


def _is_session_middleware(path: str) -> bool:
    try:
        found = import_string(path)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, SessionMiddleware)
