"""The ``MONGOLOCK`` setting, and the entry of DATABASES from an environment variable.

The setting is read when it is needed, read again when it changes, and never written to. No message quotes the entry of
DATABASES, because the entry may hold a password.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, unquote_plus

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string
from pymongo.uri_parser import split_hosts, split_options

from .engine.rule.document import Limits, Terms
from .engine.rule.options import as_seconds, check_flag, check_seconds, check_wait
from .engine.text_checks import check_key

__all__ = ["database_from_url"]

NAME: Final = "MONGOLOCK"
#: The ENGINE of a MongoDB in DATABASES.
ENGINE: Final = "django_mongodb_backend"
#: The backend for tests. No database is needed.
MEMORY: Final = "django_mongolock.testing.memory.MemoryLockBackend"
#: The characters that separate the fields of a key template. A prefix ends with one of them.
SEPARATORS: Final = ":/|,;#="
#: The defaults of the engine, such as 30 seconds of lease, and queues of 1,000.
_TERMS: Final = Terms()
_LIMITS: Final = Limits()


class Prefix:
    """The setting KEY_PREFIX. If a project gives a function, the function is called each time."""

    def __get__(self, instance: Any, owner: Any = None) -> str:
        value = "" if instance is None else instance.__dict__["KEY_PREFIX"]
        if callable(value):
            value = value()
            try:
                _check_prefix(value if isinstance(value, str) else None)
            except (TypeError, ValueError) as problem:
                raise ImproperlyConfigured(f'{NAME}["KEY_PREFIX"] has returned {value!r}: {problem}') from None
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__["KEY_PREFIX"] = value


@dataclass(frozen=True)
class LockSettings:
    """The project's settings, with their defaults. Times are in seconds. A project may give each as a `timedelta`.

    - DATABASE: DATABASES alias of the MongoDB that stores the locks. Required.
    - BACKEND: for tests. Dotted path of the class that stores the locks.
    - KEY_PREFIX: start of every key, so that several sites can share a database. The start ends with one of
      `: / | , ; # =`, and contains it only once. A function may return the start, such as that of the current tenant.
    - LEASE: how long a lock lives after its process has died. A live process renews it. A lease of 20 or more outlasts
      a failover.
    - WAIT: how long to wait for a lock. `0` means a single attempt. `None` means no limit.
    - CLOCK_MARGIN: how much longer the server keeps a lease than its holder relies on it, as a part of the lease from
      0 to 1. The margin is at least one second.
    - WAITER_LEASE: how long a place in the queue is valid without renewal.
    - MAX_WAITERS: how many threads and tasks may wait for one key, from 1 to 5000. More get `LockQueueFull`.
    - RETENTION: how long the document of an unused lock is kept if someone ever waited for it, at least an hour. Other
      documents are kept for one to two hours.
    - COMMAND_TIMEOUT: how long one command to MongoDB may take. Without a server a lock fails after that, even with a
      shorter `wait`.
    - CONTENTION_STATUS: HTTP status of `on_contention="respond"`, from 400 to 599.
    - SHORT_WAIT: how long `mongo_locked` waits in a view. At most `WAIT`.
    - RETRY_OUTAGE: how long a Celery task with `on_contention="retry"` comes back while MongoDB does not answer. After
      that, it fails.
    - HISTORY: how many megabytes the history of the locks may take in MongoDB. `0` means no history.
    - EDIT_LEASE: how long the edit lock of a browser tab is valid without a beat.
    - EDIT_BEAT: time between two beats of a tab.
    - EDIT_IDLE: how long a tab may be without a key press or click until its edit lock is released. `None` means for
      ever.
    - EDIT_FAIL_CLOSED: whether changes under an edit lock are refused while MongoDB does not answer.
    """

    DATABASE: str = ""
    BACKEND: str = "django_mongolock.backends.MongoBackend"
    KEY_PREFIX: str = Prefix()  # type: ignore[assignment]
    LEASE: float = _TERMS.lease
    WAIT: float | None = 10.0
    CLOCK_MARGIN: float = _TERMS.clock_margin
    WAITER_LEASE: float = _TERMS.waiter_lease
    MAX_WAITERS: int = _LIMITS.waiters
    RETENTION: float = _LIMITS.retention / 1000
    COMMAND_TIMEOUT: float = 5.0
    CONTENTION_STATUS: int = 423
    SHORT_WAIT: float = 1.0
    RETRY_OUTAGE: float = 600.0
    HISTORY: int = 0
    EDIT_LEASE: float = 120.0
    EDIT_BEAT: float = 5.0
    EDIT_IDLE: float | None = 1_800.0
    EDIT_FAIL_CLOSED: bool = False

    @property
    def short_wait(self) -> float:
        """The seconds to wait where a wait should not block a worker for long."""
        return self.SHORT_WAIT if self.WAIT is None else min(self.SHORT_WAIT, self.WAIT)


KNOWN: Final = frozenset(field.name for field in fields(LockSettings))
_check_seconds = partial(check_seconds, "it")


def _check_short_wait(value: object) -> None:
    if check_wait(value) is None:
        raise ValueError("it must have an end: give seconds, or 0 for a single try")


def _check_prefix(value: object) -> None:
    if value == "" or callable(value):  # a function's result is checked at each call
        return
    prefix = check_key(value)
    if prefix[-1] not in SEPARATORS or prefix[-1] in prefix[:-1]:
        raise ValueError(
            f"it must end with one of {SEPARATORS} that is nowhere else in it, so that it cannot meet another prefix"
        )


def _check_margin(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError("it must be a part of the lease, from 0 to 1")


def _whole(least: int, most: int) -> Callable[[object], None]:
    def check(value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"it must be a whole number from {least} to {most}")

    return check


def _check_retention(value: object) -> None:
    if check_seconds("it", value) < 3_600:
        raise ValueError("it must be at least an hour, so that fencing tokens keep growing")


def _check_idle(value: object) -> None:
    if value is not None:
        check_seconds("it", value)


def _check_backend(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError("it must be a dotted path")
    try:
        if not hasattr(import_string(value), "new_session"):
            raise TypeError(f"{value} is no backend of locks")
    except ImportError as error:
        raise ValueError(f"it cannot be imported: {value} ({error})") from None


#: The checks by setting. Each has an id, a function that refuses wrong values, and a description of a right one.
VALUES: Final[dict[str, tuple[str, Callable[[object], object], str]]] = {
    "LEASE": ("E005", _check_seconds, "seconds that a lock lives without renewal, for example 30"),
    "WAIT": ("E006", check_wait, "seconds to wait for a lock, for example 10; 0 for a single try, None without end"),
    "KEY_PREFIX": ("E007", _check_prefix, 'text before every key, for example "shop-production:"'),
    "CLOCK_MARGIN": ("E008", _check_margin, "a part of the lease, for example 0.1"),
    "WAITER_LEASE": ("E009", _check_seconds, "seconds that a place in the queue lives without renewal, for example 10"),
    "MAX_WAITERS": ("E010", _whole(1, 5_000), "how long a queue may be, for example 1000"),
    "RETENTION": ("E011", _check_retention, "seconds that an unused lock document is kept, for example 7 * 86400"),
    "COMMAND_TIMEOUT": ("E012", _check_seconds, "seconds that one command may take, for example 5"),
    "BACKEND": ("E013", _check_backend, f"the dotted path of a backend class, for example {LockSettings().BACKEND!r}"),
    "CONTENTION_STATUS": ("E014", _whole(400, 599), "an HTTP status, for example 423 or 409"),
    "SHORT_WAIT": ("E015", _check_short_wait, "seconds to wait in a view, for example 1; 0 for a single try"),
    "RETRY_OUTAGE": ("E022", _check_short_wait, "seconds for which tasks come back, for example 600; 0 for not at all"),
    "HISTORY": ("E020", _whole(0, 1_000_000), "megabytes for the history, for example 100; 0 for no history"),
    "EDIT_LEASE": ("E080", _check_seconds, "seconds that the edit lock of a tab lives without a beat, for example 120"),
    "EDIT_BEAT": ("E081", _check_seconds, "seconds between two beats of a tab, for example 5"),
    "EDIT_IDLE": ("E082", _check_idle, "seconds without a key or a click, for example 1800; None for no limit"),
    "EDIT_FAIL_CLOSED": ("E083", partial(check_flag, "it"), "True or False"),
}


def find_wrong(raw: Mapping[str, Any]) -> Iterator[checks.Error]:
    """Yield the errors of the checks for the settings in *raw* that have a wrong value."""
    for name, (id_, check, cure) in VALUES.items():
        if name in raw:
            try:
                check(raw[name])
            except (TypeError, ValueError) as problem:
                yield error(id_, f'{NAME}["{name}"] is wrong: {problem}.', f"Give {cure}.")


#: The values of a test that override the project's settings.
_overrides: dict[str, Any] = {}


def override(values: Mapping[str, Any]) -> dict[str, Any]:
    """Override the project's settings by *values*. Return the overrides that these replace.

    `override_settings` would not do. If a test changes MONGOLOCK as well and undoes that later, it restores this one.
    """
    before = dict(_overrides)
    _overrides.clear()
    _overrides.update(values)
    get_settings.cache_clear()
    return before


def raw_settings() -> Mapping[str, Any]:
    """Return the setting of the project, with times in seconds. The project may give JSON.

    Raise ImproperlyConfigured if the setting is no dictionary.
    """
    raw = getattr(settings, NAME, {})
    if isinstance(raw, str):
        raw = _read_json(raw)
        if not isinstance(raw, Mapping):
            raise ImproperlyConfigured(f"{NAME} is JSON, but not an object")
    if not isinstance(raw, Mapping):
        raise ImproperlyConfigured(f"{NAME} must be a dictionary, not {type(raw).__name__}")
    return {name: as_seconds(value) for name, value in {**raw, **_overrides}.items()}


def _read_json(text: str) -> Any:
    """Return the value of a JSON text, as from an environment variable. No error quotes the text."""
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        where = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ImproperlyConfigured(f"{NAME} is text, but not JSON{where}") from None


@cache
def get_settings() -> LockSettings:
    """Return the project's settings. Raise ImproperlyConfigured for wrong ones, because servers run no checks."""
    raw = raw_settings()
    if unknown := sorted(map(str, set(raw) - KNOWN)):
        raise ImproperlyConfigured(
            f"{NAME} has unknown settings: {', '.join(unknown)}. Known: {', '.join(sorted(KNOWN))}"
        )
    alias = raw.get("DATABASE") or ""
    if not is_alias(alias) or not (alias or raw.get("BACKEND") == MEMORY):
        raise ImproperlyConfigured(
            f'{NAME}["DATABASE"] is not set to an alias: name the DATABASES alias of your MongoDB, '
            f'for example {NAME} = {{"DATABASE": "locks"}}'
        )
    for wrong in find_wrong(raw):
        raise ImproperlyConfigured(f"{wrong.msg} {wrong.hint}")
    return LockSettings(**raw)


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == NAME:
        get_settings.cache_clear()


setting_changed.connect(_forget)


#: The apps of this package that are in use, with their users. Filled by the import of the modules that use them.
used_apps: Final[dict[str, str]] = {}


def missing_app(app: str, what: str, obj: object = None) -> list[checks.CheckMessage]:
    """Return the error that an app of this package is not installed, if that is so. *what* needs the app."""
    if apps.is_installed(app):
        return []
    hint = f'Put "{app}" into INSTALLED_APPS.'
    return [checks.Error(f"{what} needs the app {app}.", hint=hint, obj=obj, id="mongolock.E026")]


def critical(number: str, message: str, hint: str) -> checks.Critical:
    """Return an error that causes others, and is printed before them."""
    return checks.Critical(message, hint=hint, id=f"mongolock.{number}")


def error(number: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=hint, id=f"mongolock.{number}")


def info(number: str, message: str) -> checks.Info:
    return checks.Info(message, id=f"mongolock.{number}")


def warning(number: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=hint, id=f"mongolock.{number}")


SCHEMES: Final = ("mongodb", "mongodb+srv")
#: The NAME of an address without a name. MongoDB refuses it. For "", django-mongodb-backend raises before checks run.
NO_NAME: Final = " "
#: A user or a password that the driver can read.
ENCODED: Final = re.compile(r"([^@:/%]|%[0-9A-Fa-f]{2})*")
#: The options with secrets, by lower-case name. Each stands beside HOST as well.
SECRETS: Final = {_.lower(): _ for _ in ("tlsCertificateKeyFilePassword", "authMechanismProperties")}


def is_alias(value: object) -> bool:
    """Return whether *value* may be an alias. An address, and an entry of DATABASES, may have a password."""
    return isinstance(value, str) and "://" not in value


class Address(NamedTuple):
    """The parts of a connection string. A string of MongoDB may name several servers, and urllib cannot read that."""

    scheme: str
    user: str = ""
    password: str = ""
    hosts: str = ""
    database: str = ""
    options: tuple[str, ...] = ()


def database_from_url(url: str) -> dict[str, Any]:
    """Return the entry of DATABASES for ``mongodb://user:password@host1,host2/name?replicaSet=rs0&tls=true``.

    User, password and options with secrets stand beside HOST, where Django's debug page hides them. If an address has
    no name, NAME is a blank. This function never raises, because the checks of the app report problems with the
    address.
    """
    address, secrets, plain = _read_address(url), dict[str, str](), list[str]()
    for option in address.options:
        name, _, value = option.partition("=")
        if name.lower() in SECRETS:
            secrets[SECRETS[name.lower()]] = unquote_plus(value)
        else:
            plain.append(option)
    # The name of the database stays in HOST, because users may be stored there.
    host = f"{address.scheme}://{address.hosts}/{address.database}{'?' if plain else ''}{'&'.join(plain)}"
    entry: dict[str, Any] = {"ENGINE": ENGINE, "HOST": host, "NAME": address.database or NO_NAME}
    entry |= {"OPTIONS": secrets} if secrets else {}
    return {**entry, "USER": unquote(address.user), "PASSWORD": unquote(address.password)} if address.user else entry


def address_problem(host: str) -> str | None:
    """Return the problem of a connection string, or None. Quote no part of the string but the names of options."""
    address = _read_address(host)
    if host != host.strip():
        return "it begins or ends with a space or a line break"
    if not address.scheme:
        return "it does not begin with mongodb:// or mongodb+srv://"
    try:
        if not split_hosts(address.hosts):
            return "it names no server"
        is_encoded = ENCODED.fullmatch(address.user + address.password)
    except Exception:  # noqa: BLE001 - the driver raises several, whose texts quote the address
        is_encoded = None
    if not is_encoded:
        return "its servers cannot be read; percent-encode characters such as @ : / ? # % in user and password"
    for option in address.options:
        try:
            split_options(option, validate=True, warn=False)
        except Exception:  # noqa: BLE001 - see above
            return f"its option {option.partition('=')[0]!r} is unknown to MongoDB, or has a wrong value"
    return None


def _read_address(url: str) -> Address:
    scheme, _, rest = url.strip().partition("://")
    before, _, query = rest.partition("?")
    if scheme not in SCHEMES or "@" in query:  # both may be part of the password, and none of it may end up in HOST
        return Address(scheme if scheme in SCHEMES else "")
    credentials, _, place = before.rpartition("@")
    user, _, password = credentials.partition(":")
    hosts, _, database = place.partition("/")
    return Address(scheme, user, password, hosts, unquote(database), tuple(filter(None, query.split("&"))))
