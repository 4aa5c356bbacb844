"""The ``MONGOLOCK`` setting: read late, followed when it changes, never written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .engine.document import check_key
from .engine.lock import check_seconds, check_wait

NAME: Final = "MONGOLOCK"
#: The backend for tests, which needs no database.
MEMORY: Final = "django_mongolock.backends.memory.MemoryLockBackend"
#: One of these stands at the end of a prefix, and between the fields of a key template.
SEPARATORS: Final = ":/|,;#="


@dataclass(frozen=True, slots=True)
class LockSettings:
    """What the project has set, with the defaults. Times are in seconds.

    DATABASE: the DATABASES alias of the MongoDB that keeps the locks. BACKEND: dotted path of the backend class.
    KEY_PREFIX: stands before every key, so that two sites can share a database. LEASE: how long a lock lives without
    renewal. WAIT: how long to try (None: without end).
    CLOCK_MARGIN: how much longer the server lets a lease live than its holder believes, as a part of the lease; at
    least one second. WAITER_LEASE: how long a place in the queue lives without renewal. MAX_WAITERS: how long a
    queue may be. RETENTION: how long the document of a free lock is kept. COMMAND_TIMEOUT: the bound on one command.
    CONTENTION_STATUS: the HTTP status of on_contention="respond". SHORT_WAIT: how long `mongo_locked` waits where a
    worker should not be held up for long: in views, and in tasks that are retried instead; at most WAIT.
    HISTORY: how many megabytes of MongoDB the history of the locks may take; 0: none is written.
    EDIT_LEASE: how long the edit lock of a browser tab lives without a beat. EDIT_BEAT: the time between two beats.
    EDIT_IDLE: after how long without a key or a click it is given back (None: never). EDIT_FAIL_CLOSED: while MongoDB
    cannot be asked, save nothing (else: what nobody has changed meanwhile is saved).
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
    SHORT_WAIT: float = 1.0
    HISTORY: int = 0
    EDIT_LEASE: float = 120.0
    EDIT_BEAT: float = 5.0
    EDIT_IDLE: float | None = 1_800.0
    EDIT_FAIL_CLOSED: bool = False


KNOWN: Final = frozenset(field.name for field in fields(LockSettings))


def _check_seconds(value: object) -> None:
    check_seconds("it", value)


def _check_short_wait(value: object) -> None:
    if check_wait(value) is None:
        raise ValueError("it has an end: give seconds, or 0 for a single try")


def _check_prefix(value: object) -> None:
    if value == "":
        return
    prefix = check_key(value)
    if prefix[-1] not in SEPARATORS or prefix[-1] in prefix[:-1]:
        raise ValueError(
            f"it must end with one of {SEPARATORS} that is nowhere else in it, or it could meet another prefix"
        )


def _check_margin(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("it is a number")
    if not 0 <= value <= 1:
        raise ValueError("it is a part of the lease, from 0 to 1")


def _check_count(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 5_000:
        raise ValueError("it is a whole number from 1 to 5000")


def _check_megabytes(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000:
        raise ValueError("it is a whole number of megabytes, from 0 (no history) to 1000000")


def _check_retention(value: object) -> None:
    if check_seconds("it", value) < 3_600:
        raise ValueError("it must be at least an hour, so that fencing tokens go on growing")


def _check_status(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 400 <= value <= 599:
        raise ValueError("it is an HTTP status from 400 to 599")


def _check_idle(value: object) -> None:
    if value is not None:
        check_seconds("it", value)


def _check_flag(value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError("it is True or False")


def _check_backend(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError("it is a dotted path")
    try:
        import_string(value)
    except ImportError as error:
        raise ValueError(f"it cannot be imported: {value} ({error})") from None


#: What refuses a wrong value of each setting, and what it should be.
VALUES: Final[dict[str, tuple[Callable[[object], object], str]]] = {
    "LEASE": (_check_seconds, "seconds that a lock lives without renewal, for example 30"),
    "WAIT": (check_wait, "seconds to wait for a lock, for example 10; 0 for a single try, None without end"),
    "KEY_PREFIX": (_check_prefix, 'text before every key, for example "shop-production:"'),
    "CLOCK_MARGIN": (_check_margin, "a part of the lease, for example 0.1"),
    "WAITER_LEASE": (_check_seconds, "seconds that a place in the queue lives without renewal, for example 10"),
    "MAX_WAITERS": (_check_count, "how long a queue may be, for example 1000"),
    "RETENTION": (_check_retention, "seconds that an unused lock document is kept, for example 7 * 86400"),
    "COMMAND_TIMEOUT": (_check_seconds, "seconds that one command may take, for example 5"),
    "BACKEND": (_check_backend, f"the dotted path of a backend class, for example {LockSettings().BACKEND!r}"),
    "SHORT_WAIT": (_check_short_wait, "seconds to wait in a view, for example 1; 0 for a single try"),
    "HISTORY": (_check_megabytes, "how many megabytes the history of the locks may take, for example 100; 0 for none"),
    "EDIT_LEASE": (_check_seconds, "seconds that the edit lock of a tab lives without a beat, for example 120"),
    "EDIT_BEAT": (_check_seconds, "seconds between two beats of a tab, for example 5"),
    "EDIT_IDLE": (_check_idle, "seconds without a key or a click, for example 1800; None for no limit"),
    "EDIT_FAIL_CLOSED": (_check_flag, "True or False"),
    "CONTENTION_STATUS": (_check_status, "an HTTP status, for example 423 or 409"),
}


@dataclass(frozen=True, slots=True)
class Wrong:
    """A setting with a wrong value: what is wrong, and what would be right. Neither ends with a full stop."""

    name: str
    problem: str
    cure: str


def find_wrong(raw: Mapping[str, Any]) -> Iterator[Wrong]:
    """The settings among *raw* that have a wrong value."""
    for name, (check, cure) in VALUES.items():
        if name in raw:
            try:
                check(raw[name])
            except (TypeError, ValueError) as error:
                yield Wrong(name, f'{NAME}["{name}"] is wrong: {error}', f"Give {cure}")


#: What a test has put over the project's values for the time being.
_overlay: dict[str, Any] = {}


def put_over(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put *values* over the project's; return what had been put there before.

    Not `override_settings`: whoever changes MONGOLOCK in the same test and undoes it later would bring these back.
    """
    before = dict(_overlay)
    _overlay.clear()
    _overlay.update(values)
    get_settings.cache_clear()
    return before


def raw_settings() -> Mapping[str, Any]:
    """The setting as the project wrote it. Raises ImproperlyConfigured if it is not a dictionary."""
    raw = getattr(settings, NAME, {})
    if not isinstance(raw, Mapping):
        raise ImproperlyConfigured(f"{NAME} must be a dictionary, not {type(raw).__name__}")
    return {**raw, **_overlay} if _overlay else raw


@cache
def get_settings() -> LockSettings:
    """The project's settings. Raises ImproperlyConfigured for what `checks` calls an error: a web server runs none."""
    raw = raw_settings()
    if unknown := sorted(map(str, set(raw) - KNOWN)):
        raise ImproperlyConfigured(
            f"{NAME} has unknown settings: {', '.join(unknown)}. Known: {', '.join(sorted(KNOWN))}"
        )
    if not raw.get("DATABASE") and raw.get("BACKEND") != MEMORY:
        raise ImproperlyConfigured(
            f'{NAME}["DATABASE"] is not set: name the DATABASES alias of your MongoDB, '
            f'for example {NAME} = {{"DATABASE": "locks"}}'
        )
    for wrong in find_wrong(raw):
        raise ImproperlyConfigured(f"{wrong.problem}. {wrong.cure}.")
    return LockSettings(**raw)


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == NAME:
        get_settings.cache_clear()


setting_changed.connect(_forget)
