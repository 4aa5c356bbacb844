"""The backend of each DATABASES alias, which makes the sessions that keep the locks: usually `MongoBackend`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.db.utils import load_backend
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import import_string

from .conf import ENGINE, LockSettings, get_settings
from .engine.rule.document import Limits, milliseconds
from .engine.session.grant import Grant
from .engine.session.notifications import Observer
from .engine.session.session import Session, Sessions
from .engine.store.mongo import MongoStore, StoreConfig
from .exceptions import LockBackendFailed
from .signals import signal_sender

S = TypeVar("S", bound=Session)
#: The entry of this package in INSTALLED_APPS.
APP: Final = "django_mongolock"


class Backend(ABC, Generic[S]):
    """The base of backends. A backend keeps the locks of one DATABASES alias."""

    def __init__(self, alias: str, settings: LockSettings) -> None:
        self.alias = alias
        self.settings = settings
        self.limits = Limits(waiters=settings.MAX_WAITERS, retention=milliseconds(settings.RETENTION))
        self._sessions = Sessions(self.new_session)

    @abstractmethod
    def new_session(self) -> S:
        """Return a new session, for this process."""

    def session(self) -> S:
        """Return the session of this process."""
        return self._sessions.current()

    def read_here(self, key: str) -> tuple[Mapping[str, object] | None, datetime] | None:
        """Return the document of *key* and the time, if this process keeps the locks. None if MongoDB keeps them."""
        return None

    def close(self) -> None:
        """Release the locks of this process, and disconnect."""
        self._sessions.close()


#: Functions of apps that are called with each store. Each returns an observer of the store's sessions, or None.
observers: Final[list[Callable[[MongoStore, LockSettings], Observer | None]]] = []


def database_settings(alias: str) -> dict[str, Any]:
    """Return the DATABASES entry of *alias*. Raise ImproperlyConfigured if it is missing or not MongoDB."""
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
        """See Backend.session(). If the name of the database changes, as in test runners, make a new session."""
        if self._name is not None and self._name != self._database["NAME"]:
            self.close()
        return self._sessions.current()

    def new_session(self) -> Session:
        """See Backend.new_session()."""
        # The session uses only the parameters of the connection. The engine has a client of its own (see MongoStore).
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


# The backends of this process

#: The backends by alias. There is no mutex, because a fork could leave it locked. Making a backend twice does no harm.
_backends: dict[str, Backend[Session]] = {}


def get_backend(using: str | None = None) -> Backend[Session]:
    """Return the backend of a DATABASES alias. Default: MONGOLOCK["DATABASE"]."""
    current = get_settings()
    alias = using or current.DATABASE
    if (backend := _backends.get(alias)) is not None:
        return backend
    if apps.ready and not apps.is_installed(APP):
        raise ImproperlyConfigured(
            'put "django_mongolock" into INSTALLED_APPS: it makes the indexes, and checks the settings'
        )
    return _backends.setdefault(alias, import_string(current.BACKEND)(alias, current))


def mongo_store(using: str | None = None) -> MongoStore:
    """Return the lock documents of an alias in MongoDB, for code that looks at them from outside.

    Raise LockBackendFailed if the locks are not kept in MongoDB.
    """
    store = get_backend(using).session().store
    if not isinstance(store, MongoStore):
        raise LockBackendFailed(
            "the locks are kept in the memory of each process (MONGOLOCK['BACKEND']), where neither the model Lock nor "
            "the admin nor a command can see them: in a test ask the fixture mongolock, or django_mongolock.testing: "
            "held(), waiting(key), assert_locked(key)",
            passing=False,
        )
    return store


def load_backends() -> None:
    """Import the modules of the first lock, without any I/O. Wrong settings are left to the checks.

    The import takes half a second, and a request would have to wait for it. Greenlets or threads that take their first
    locks at the same time would see half-imported modules.
    """
    with contextlib.suppress(ImproperlyConfigured, ImportError, KeyError):
        current = get_settings()
        import_string(current.BACKEND)
        load_backend(connections.settings[current.DATABASE]["ENGINE"])


def close_backends() -> None:
    """Release every lock of this process, and disconnect. The next use connects again."""
    while _backends:
        _, backend = _backends.popitem()
        backend.close()


#: Backends that are not in use for a while, with their locks.
_set_aside: list[dict[str, Backend[Session]]] = []


def set_backends_aside() -> None:
    """Use new backends until `put_backends_back` is called."""
    _set_aside.append(dict(_backends))
    _backends.clear()


def put_backends_back() -> None:
    """Close the backends in use, and return to those that were set aside last."""
    close_backends()
    _backends.update(_set_aside.pop())


def _close_after_change(*, setting: str, **kwargs: object) -> None:
    if setting in ("MONGOLOCK", "DATABASES"):
        close_backends()
        for backends in _set_aside:  # made from the earlier settings
            while backends:
                backends.popitem()[1].close()


setting_changed.connect(_close_after_change)
