"""The ``MONGOLOCK`` setting: read late, followed when it changes, never written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

NAME: Final = "MONGOLOCK"


@dataclass(frozen=True, slots=True)
class LockSettings:
    """What the project has set, with the defaults. Times are in seconds.

    DATABASE: the DATABASES alias of the MongoDB that keeps the locks. BACKEND: dotted path of the backend class.
    KEY_PREFIX: stands before every key, so that two sites can share a database. LEASE: how long a lock lives without
    renewal. WAIT: how long to try (None: without end).
    CLOCK_MARGIN: how much longer the server lets a lease live than its holder believes, as a part of the lease; at
    least one second. WAITER_LEASE: how long a place in the queue lives without renewal. MAX_WAITERS: how long a
    queue may be. RETENTION: how long the document of a free lock is kept. COMMAND_TIMEOUT: the bound on one command.
    CONTENTION_STATUS: the HTTP status of on_contention="respond".
    """

    DATABASE: str = ""
    BACKEND: str = "django_mongolock.backends.mongo.MongoBackend"
    KEY_PREFIX: str = ""
    LEASE: float = 30.0
    WAIT: float | None = 10.0
    CLOCK_MARGIN: float = 0.1
    WAITER_LEASE: float = 10.0
    MAX_WAITERS: int = 1_000
    RETENTION: float = 7 * 86_400.0
    COMMAND_TIMEOUT: float = 5.0
    CONTENTION_STATUS: int = 423

    def margin(self, lease: float) -> float:
        """How much longer the server lets a lease of that length live."""
        return max(1.0, lease * self.CLOCK_MARGIN)


KNOWN: Final = frozenset(field.name for field in fields(LockSettings))


def raw_settings() -> Mapping[str, Any]:
    """The setting as the project wrote it. Raises ImproperlyConfigured if it is not a dictionary."""
    raw = getattr(settings, NAME, {})
    if not isinstance(raw, Mapping):
        raise ImproperlyConfigured(f"{NAME} must be a dictionary, not {type(raw).__name__}")
    return raw


@cache
def get_settings() -> LockSettings:
    """The project's settings. Raises ImproperlyConfigured for what cannot work at all; `checks` says the rest."""
    raw = raw_settings()
    if unknown := sorted(map(str, set(raw) - KNOWN)):
        raise ImproperlyConfigured(
            f"{NAME} has unknown settings: {', '.join(unknown)}. Known: {', '.join(sorted(KNOWN))}"
        )
    if not raw.get("DATABASE"):
        raise ImproperlyConfigured(
            f'{NAME}["DATABASE"] is not set: name the DATABASES alias of your MongoDB, '
            f'for example {NAME} = {{"DATABASE": "locks"}}'
        )
    return LockSettings(**raw)


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == NAME:
        get_settings.cache_clear()


setting_changed.connect(_forget)
