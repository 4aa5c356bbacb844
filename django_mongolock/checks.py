"""System checks: ``manage.py check`` reports a wrong setting before it causes an error at run time.

An id is never used for another check. E0xx and W0xx need no server; E1xx and W1xx ask it (``check --database``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
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


def _error(number: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=hint, id=f"mongolock.{number}")


def _warning(number: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=hint, id=f"mongolock.{number}")


@register()
def check_settings(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check every value of MONGOLOCK, the alias that it names, and the router."""
    try:
        raw = raw_settings()
    except ImproperlyConfigured as error:
        return [_error("E001", str(error), f'Write {NAME} = {{"DATABASE": "<alias of your MongoDB>"}}.')]
    found: list[CheckMessage] = [
        _error("E004", f"{NAME} has an unknown setting {name!r}.", f"Known: {', '.join(sorted(KNOWN))}.")
        for name in sorted(set(raw) - KNOWN, key=str)
    ]
    found += [_error(wrong.id, f"{wrong.problem}.", f"{wrong.cure}.") for wrong in find_wrong(raw)]
    if not found:
        found += _check_times(raw)
    where = _check_memory() if raw.get("BACKEND") == MEMORY else _check_database_alias(raw.get("DATABASE"))
    return [*found, *_check_contrib(), *where]


def _check_times(raw: Mapping[str, Any]) -> Iterator[CheckMessage]:
    lease, timeout = (raw.get(name, getattr(LockSettings(), name)) for name in ("LEASE", "COMMAND_TIMEOUT"))
    if lease <= timeout:
        yield _warning(
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
            yield _warning(
                "W007",
                f"INSTALLED_APPS has {config.name!r} without its Config: nothing is measured.",
                f'Write "{config.name}.{configs[config.name]}".',
            )


def _check_memory() -> Iterator[CheckMessage]:
    if not hasattr(mail, "outbox"):  # Django's test environment, for which this backend is made, has one
        yield _warning(
            "W005",
            f'{NAME}["BACKEND"] keeps the locks in the memory of each process: two processes can hold the same lock.',
            "It is for tests only. Remove BACKEND from the settings that servers, workers and commands run with.",
        )


def _check_database_alias(alias: object) -> Iterator[CheckMessage]:
    mongo = [name for name, entry in settings.DATABASES.items() if entry.get("ENGINE") == ENGINE]
    choices = f"MongoDB aliases in DATABASES: {', '.join(mongo) or 'none'}."
    if not alias:
        yield _error("E001", f'{NAME}["DATABASE"] is not set.', f"Name the alias of your MongoDB. {choices}")
    elif not isinstance(alias, str) or alias not in settings.DATABASES:
        yield _error("E002", f'{NAME}["DATABASE"] names {alias!r}, which is not in DATABASES.', choices)
    elif alias not in mongo:
        yield _error("E003", f'{NAME}["DATABASE"] names {alias!r}, which is not MongoDB.', choices)
    elif alias != DEFAULT_DB_ALIAS and ROUTER not in _router_names():
        yield _warning(
            "W001",
            f"DATABASE_ROUTERS lacks {ROUTER}: the lock model would be read from the default database.",
            f'Put "{ROUTER}" into DATABASE_ROUTERS.',
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
        yield _warning(
            "W002",
            f'{NAME}["KEY_PREFIX"] is empty: another site or stage in the same database would share the locks.',
            'Give each its own, for example "shop-production:", unless each has a database of its own.',
        )
    alias = raw.get("DATABASE")
    host = settings.DATABASES.get(alias, {}).get("HOST") if isinstance(alias, str) else None
    if isinstance(host, str) and ":" in host.partition("://")[2].rpartition("@")[0]:
        yield _warning(
            "W003",
            f"The HOST of DATABASES[{alias!r}] holds a password, which Django's debug page shows in clear.",
            "Give USER and PASSWORD beside HOST instead of inside the URI.",
        )


@register(Tags.database)
def check_server(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the server can be reached and is a replica set, and that rights and indexes are there."""
    if not databases or _has_wrong_settings():
        return []
    alias = raw_settings().get("DATABASE")
    if alias not in databases or not isinstance(get_backend(alias), MongoBackend):
        return []
    from .inspect.server_facts import inspect_server

    facts = inspect_server(mongo_store(alias), get_settings().COMMAND_TIMEOUT)
    if facts.problem:
        return [
            _error(
                "E101",
                f"The MongoDB of DATABASES[{alias!r}] cannot be used for locks: {facts.problem}.",
                "Is it running, and are HOST, USER, PASSWORD and OPTIONS right? mongosh with the same URI shows more.",
            )
        ]
    return [*_check_rights(facts, alias), *_check_replica_set(facts, alias), *_check_collections(facts, alias)]


def _has_wrong_settings() -> bool:
    return any(message.is_serious() for message in check_settings(app_configs=None))


def _check_rights(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.missing_rights:
        yield _error(
            "E102",
            f"The user of DATABASES[{alias!r}] lacks rights on the locks: {', '.join(facts.missing_rights)}.",
            "Grant find, insert and update on the collection mongolock_locks of that database.",
        )


def _check_collections(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.missing_indexes:
        yield _warning(
            "W103",
            f"The collection mongolock_locks lacks indexes: {', '.join(facts.missing_indexes)}.",
            f"Run manage.py migrate --database {alias} as a user who may create indexes.",
        )
    if facts.history:
        yield _warning(
            "W110",
            f"The history of the locks cannot be kept: {facts.history}.",
            f"Run manage.py migrate --database {alias} as a user who may create collections, or drop the wrong one.",
        )


def _check_replica_set(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.standalone:
        yield _warning(
            "W101",
            f"The MongoDB of DATABASES[{alias!r}] is a standalone server: a lock survives no failover.",
            "Run it as a replica set; one node is enough to begin with (--replSet, rs.initiate()).",
        )
    elif facts.sharded:
        yield _warning(
            "W107",
            f"DATABASES[{alias!r}] is a sharded cluster: each mongos judges leases by its own clock. Where two clocks "
            "differ by more than a lock's margin, the lock can have two holders.",
            'Keep the locks in a replica set of their own: an alias of its own, named by MONGOLOCK["DATABASE"].',
        )
    if not facts.standalone and not facts.may_watch:
        yield _warning(
            "W104",
            f"The user of DATABASES[{alias!r}] may not watch the locks: waiters poll for their turn.",
            "Grant changeStream and find on the collection mongolock_locks of that database.",
        )
    lease = raw_settings().get("LEASE", LockSettings().LEASE)
    if facts.failover and lease < facts.failover:
        yield _warning(
            "W102",
            f'{NAME}["LEASE"] is {lease:g} s, but a failover takes up to {facts.failover:g} s and loses the locks.',
            f"Set it to at least {facts.failover:g}.",
        )
    if not facts.journaled:
        yield _warning(
            "W106",
            f"The replica set of DATABASES[{alias!r}] has writeConcernMajorityJournalDefault: false.",
            "Set it to true: waiters then get their locks sooner, and your other data survives a crash of all "
            "members. Locks are safe without it: their writes wait for the journals.",
        )


@register()
def check_document_places(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the models of the declared document locks are in MongoDB, which a router decides late."""
    return list(_check_document_places())


def _check_document_places() -> Iterator[CheckMessage]:
    for lock in declared():
        try:
            if lock.alias is not None:
                database_settings(lock.alias)
        except ImproperlyConfigured as error:
            yield _error(
                "E016",
                f"The document lock {lock.name!r} is declared on a model that is not in MongoDB: {error}.",
                "Have a router send the model to MongoDB, or name the alias by using=.",
            )


@register(Tags.database)
def check_documents(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the sweep finds stale documents without reading the whole collection."""
    if not databases or _has_wrong_settings():
        return []
    return list(_check_indexes(databases, raw_settings().get("DATABASE")))


def _check_indexes(databases: Sequence[str], home: Any) -> Iterator[CheckMessage]:
    for lock in declared():
        if (lock.alias or home) not in databases:
            continue
        try:
            indexed = lock.has_index()
        except (LockBackendFailed, ImproperlyConfigured):  # other checks report it, or the user may not list indexes
            continue
        if not indexed:
            fields = lock.rules.fields
            yield _warning(
                "W105",
                f"No index serves the sweep of the document lock {lock.name!r}: it reads the whole collection.",
                f"Make one that begins with {fields.state!r}, best with {fields.time!r} after it: "
                "Meta.indexes of the model, or create_index of the collection.",
            )


#: Browsers let a tab in the background beat only once a minute. In seconds, with a reserve.
_THROTTLED: Final = 75.0


@register()
def check_edit_locks(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check what edit locks need, if the project has any."""
    return [] if not _has_edit_locks() or _has_wrong_settings() else list(_check_edit_locks(get_settings()))


def _check_edit_locks(values: LockSettings) -> Iterator[CheckMessage]:
    if values.EDIT_BEAT * 2 > values.EDIT_LEASE:
        message = f"EDIT_BEAT is {values.EDIT_BEAT:g} s and EDIT_LEASE {values.EDIT_LEASE:g} s"
        cure = "Make EDIT_LEASE at least three times EDIT_BEAT."
        yield _error("E084", f"{NAME}: {message}: one missed beat loses the lock.", cure)
    elif values.EDIT_LEASE < _THROTTLED:
        message = f'{NAME}["EDIT_LEASE"] is {values.EDIT_LEASE:g} s, but a tab in the background beats once a minute.'
        yield _warning("W080", message, f"Set it to at least {_THROTTLED:g}.")
    if not any(_is_session_middleware(path) for path in settings.MIDDLEWARE):
        message = "EditLockMixin is used without SessionMiddleware: a logout does not release edit locks."
        yield _warning("W081", message, "Put django.contrib.sessions.middleware.SessionMiddleware first.")


def _has_edit_locks() -> bool:
    """Return whether the admin has an EditLockMixin. Imports nothing that the project does not use."""
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
