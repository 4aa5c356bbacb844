"""The backend that keeps the locks in MongoDB."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from ..conf import LockSettings
from ..engine.document import milliseconds
from ..engine.grant import Grant
from ..engine.mongo_store import MongoStore, StoreConfig
from ..engine.session.per_process import Sessions
from ..engine.session.session import Observer, Session
from ..engine.step import Limits
from .base import signal_sender

ENGINE = "django_mongodb_backend"


def database_settings(alias: str) -> dict[str, Any]:
    """The DATABASES entry of *alias*. Raises ImproperlyConfigured if it is not there or is not MongoDB."""
    try:
        found: dict[str, Any] = connections.settings[alias]
    except (KeyError, ConnectionDoesNotExist):
        raise ImproperlyConfigured(
            f"there is no DATABASES alias {alias!r} to keep locks in: see MONGOLOCK['DATABASE'] and using="
        ) from None
    if found["ENGINE"] != ENGINE:
        raise ImproperlyConfigured(
            f"the DATABASES alias {alias!r} is not MongoDB: its ENGINE is {found['ENGINE']!r}, not {ENGINE!r}"
        )
    return found


class MongoBackend:
    """Locks in the MongoDB of one DATABASES alias, in one collection beside the project's data."""

    def __init__(self, alias: str, settings: LockSettings) -> None:
        self.alias = alias
        self.settings = settings
        self._database = database_settings(alias)
        self._name: str | None = None
        self._sessions = Sessions(self._make_session)

    def session(self) -> Session:
        """See Backend.session(). Follows the database's name, which test runners change."""
        if self._name is not None and self._name != self._database["NAME"]:
            self._sessions.close()
        return self._sessions.current()

    def close(self) -> None:
        """See Backend.close()."""
        self._sessions.close()

    def _make_session(self) -> Session:
        # Only the parameters of the connection: the engine has a client of its own (see MongoStore).
        parameters = connections[self.alias].get_connection_params()
        self._name = self._database["NAME"]
        limits = Limits(waiters=self.settings.MAX_WAITERS, retention=milliseconds(self.settings.RETENTION))
        config = StoreConfig(parameters, self._name or "", limits=limits, history=self.settings.HISTORY * 1_000_000)
        store = MongoStore(config)
        observer = signal_sender(self.alias)
        if store.history is not None:
            observer = _both(store.history.observe, observer)
        return Session(store, self.settings.COMMAND_TIMEOUT, observer)


def _both(first: Observer, second: Observer) -> Observer:
    def observe(event: str, grant: Grant) -> None:
        try:
            first(event, grant)
        finally:
            second(event, grant)

    return observe
