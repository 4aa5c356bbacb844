"""Checks of document locks, edit locks and models with a version, if the project has any."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.apps import AppConfig, apps
from django.conf import settings
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.checks import CheckMessage, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.utils.module_loading import import_string

from ..backends.mongo import database_settings
from ..conf import NAME, LockSettings, get_settings, raw_settings
from ..decorator.calls import shared_by_all
from ..documents import declared
from ..exceptions import LockBackendFailed
from ..versions.checking import version_field
from .messages import error, warning
from .project import has_wrong_settings


@register()
def check_document_places(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the models of the declared document locks are in MongoDB, which a router decides late."""
    return list(_check_document_places())


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
def check_documents(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the sweep finds stale documents without reading the whole collection."""
    if not databases or has_wrong_settings():
        return []
    return list(_check_indexes(databases, raw_settings().get("DATABASE")))


def _check_indexes(databases: Sequence[str], home: Any) -> Iterator[CheckMessage]:
    for lock in declared():
        if (lock.alias or home) not in databases:
            continue
        try:
            if missing := lock.missing_rights():
                yield error(
                    "E103",
                    f"The user of MongoDB lacks rights on the documents of {lock.name!r}: {', '.join(missing)}.",
                    "Grant find and update on their collection.",
                )
                continue
            indexed = lock.has_index()
        except (LockBackendFailed, ImproperlyConfigured):  # other checks report it, or the user may not list indexes
            continue
        if not indexed:
            fields = lock.rules.fields
            yield warning(
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
    return [] if not _has_edit_locks() or has_wrong_settings() else list(_check_edit_locks(get_settings()))


def _check_edit_locks(values: LockSettings) -> Iterator[CheckMessage]:
    if values.EDIT_BEAT * 2 > values.EDIT_LEASE:
        message = f"EDIT_BEAT is {values.EDIT_BEAT:g} s and EDIT_LEASE {values.EDIT_LEASE:g} s"
        cure = "Make EDIT_LEASE at least three times EDIT_BEAT."
        yield error("E084", f"{NAME}: {message}: one missed beat loses the lock.", cure)
    elif values.EDIT_LEASE < _THROTTLED:
        message = f'{NAME}["EDIT_LEASE"] is {values.EDIT_LEASE:g} s, but a tab in the background beats once a minute.'
        yield warning("W080", message, f"Set it to at least {_THROTTLED:g}.")
    if not any(_is_session_middleware(path) for path in settings.MIDDLEWARE):
        message = "EditLockMixin is used without SessionMiddleware: a logout does not release edit locks."
        yield warning("W081", message, "Put django.contrib.sessions.middleware.SessionMiddleware first.")


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
