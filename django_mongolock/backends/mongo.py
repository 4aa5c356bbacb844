"""The backend that keeps the locks in MongoDB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from ..conf import ENGINE, LockSettings
from ..engine.session.grant import Grant
from ..engine.session.notifications import Observer
from ..engine.session.session import Session
from ..engine.store.mongo import MongoStore, StoreConfig
from ..signals import signal_sender
from .base import Backend

#: What apps have done with each store: each returns what observes its sessions, or None.
observers: Final[list[Callable[[MongoStore, LockSettings], Observer | None]]] = []


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


class MongoBackend(Backend[Session]):
    """Locks in the MongoDB of one DATABASES alias, in one collection beside the project's data."""

    def __init__(self, alias: str, settings: LockSettings) -> None:
        super().__init__(alias, settings)
        self._database = database_settings(alias)
        self._name: str | None = None

    def session(self) -> Session:
        """See Backend.session(). Follows the name of the database, which test runners change."""
        if self._name is not None and self._name != self._database["NAME"]:
            self.close()
        return self._sessions.current()

    def new_session(self) -> Session:
        """See Backend.new_session()."""
        # Only the parameters of the connection: the engine has a client of its own (see MongoStore).
        parameters = connections[self.alias].get_connection_params()
        self._name = self._database["NAME"]
        store = MongoStore(StoreConfig(parameters, self._name or "", limits=self.limits))
        observer: Observer = signal_sender(self.alias)
        for observe in observers:
            if (first := observe(store, self.settings)) is not None:
                observer = _both(first, observer)
        return Session(store, self.settings.COMMAND_TIMEOUT, observer)


def _both(first: Observer, second: Observer) -> Observer:
    def observe(event: str, grant: Grant) -> None:
        try:
            first(event, grant)
        finally:
            second(event, grant)

    return observe
