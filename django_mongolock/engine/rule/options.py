"""The options of a lock, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal, get_args

from ..text_checks import check_fact
from .document import MAX_HOLDERS

#: A length of time, in seconds or as a `timedelta`.
Seconds = float | timedelta
#: The longest time that makes sense, in seconds: ten years.
_LONGEST: Final = 10 * 365 * 86_400


class Unset:
    """The type of `UNSET`. UNSET stands for an argument that was not given, where None has a meaning."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


Callback = Callable[[Any], object]
#: When a lock is released whose block ends inside a transaction. None releases at the end of the block, with a warning.
Release = Literal["now", "on_commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """The choices of a caller about a lock: see `mongo_lock`, and `mongo_semaphore` for permits, weight and resize. The
    `Terms` of the lock are made from these options and the project's settings.

    Times are in seconds. Wrong values raise TypeError or ValueError.

    - wait: UNSET means the project's setting (MONGOLOCK["WAIT"]).
    - permits: None means no semaphore.
    - whole: whether the lock begins with a whole lease, rather than with the rest of its place in the queue.
    - templates: template of each key, if known.
    """

    lease: float | None = None
    wait: float | Unset | None = UNSET
    mode: Literal["exclusive", "shared"] = "exclusive"
    permits: int | None = None
    weight: int = 1
    resize: bool = False
    owner: str | None = None
    label: str | None = None
    min_hold: float = 0.0
    reentrant: bool = False
    auto_renew: bool = True
    max_hold: float | None = None
    on_lost: Callback | None = None
    on_release_requested: Callback | None = None
    release: Release | None = None
    using: str | None = None
    whole: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, time in (("lease", self.lease), ("max_hold", self.max_hold)):
            if time is not None:
                check_seconds(name, time)
        if not isinstance(self.wait, Unset):
            check_wait(self.wait)
        if self.min_hold != 0 or isinstance(self.min_hold, bool):
            check_seconds("min_hold", self.min_hold)
        for name in ("owner", "label"):
            if (fact := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_fact(name, fact))
        for name in ("resize", "reentrant", "auto_renew"):
            check_flag(name, getattr(self, name))
        for name in ("on_lost", "on_release_requested"):
            if (callback := getattr(self, name)) is not None:
                _check_callback(name, callback)
        self._check_choices()

    def _check_choices(self) -> None:
        if self.mode not in ("exclusive", "shared"):
            raise ValueError(
                f'mode is "exclusive" or "shared", not {self.mode!r}; for a semaphore use mongo_semaphore()'
            )
        if self.release is not None and self.release not in get_args(Release):
            raise ValueError(f'release is "on_commit" or "now", not {self.release!r}')
        if self.permits is not None:
            if self.mode != "exclusive":
                raise TypeError("permits= takes no mode=")
            check_number("permits", self.permits)
            check_number("weight", self.weight, self.permits)
        elif self.resize or self.weight != 1:
            raise TypeError("weight= and resize= belong to permits=, which is missing")


def check_number(name: str, value: object, most: int = MAX_HOLDERS) -> None:
    """Raise TypeError or ValueError if *value* is not a number of permits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be at least 1 and at most {most}, not {value}")


def _check_callback(name: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"{name} must be a function that takes the lock, not {type(callback).__name__}")
    if inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(getattr(callback, "__call__", None)):  # noqa: B004
        raise TypeError(f"{name} is called in a thread without an event loop: it cannot be a coroutine function")


def as_seconds(value: Any) -> Any:
    """Return the seconds of a `timedelta`, and anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def check_seconds(name: str, value: object) -> float:
    """Return *value* in seconds if it is a time above 0. Raise TypeError or ValueError if not."""
    value = as_seconds(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds or a timedelta, not {type(value).__name__}")
    if not 0 < value < _LONGEST:
        raise ValueError(f"{name} must be more than 0 and less than {_LONGEST} seconds, not {value!s:.20}")
    return float(value)


def check_age(value: object) -> float:
    """Return an age in seconds, which may be 0. Raise TypeError or ValueError for other values."""
    seconds = as_seconds(value)
    return 0.0 if seconds == 0 and not isinstance(seconds, bool) else check_seconds("older_than", seconds)


def check_flag(name: str, value: object) -> None:
    """Raise TypeError if *value* is neither True nor False. A text such as "no" is true to Python."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r:.40}")


def check_wait(value: object) -> float | None:
    """Return *value* in seconds if it is a time to wait. 0 means a single try, and None means no limit."""
    value = as_seconds(value)
    if value is None:
        return None
    if isinstance(value, bool):
        raise TypeError("wait is a number of seconds, not bool: give wait=0 for a single try, wait=None without end")
    if isinstance(value, (int, float)) and not 0 <= value < _LONGEST:
        raise ValueError(f"wait is 0 for a single try, or seconds, or None for a wait without end, not {value!s:.20}")
    return 0.0 if value == 0 else check_seconds("wait", value)


_WAIT: Final = "wait= (seconds to wait for it; 0: a single try; None: without end)"
_LEASE: Final = "lease= (seconds that a lock lives after its process has died)"
#: The options of other libraries, each with the option of this one.
_FOREIGN: Final = {
    "blocking": "use wait=: wait=0 for a single try, wait=None to wait without end",
    **dict.fromkeys(("blocking_timeout", "acquire_timeout", "wait_timeout", "max_wait"), f"use {_WAIT}"),
    **dict.fromkeys(("ttl", "expire", "expires", "expiry", "lease_time"), f"use {_LEASE}"),
    **dict.fromkeys(("permits", "capacity", "max_leases"), "use mongo_semaphore(key, permits)"),
    **dict.fromkeys(("timeout", "lock_timeout"), f"it could mean two things: use {_LEASE} or {_WAIT}"),
}


def foreign_option(name: str) -> TypeError | None:
    """Return the error for an option of another library. The error names the option of this one."""
    return TypeError(f"unexpected keyword argument {name!r}: {_FOREIGN[name]}") if name in _FOREIGN else None


def refuse_options(unknown: Mapping[str, object]) -> None:
    """Raise TypeError if `MongoLock.acquire` was given an argument that it does not have."""
    for name in unknown:
        raise foreign_option(name) or TypeError(f"unexpected keyword argument {name!r}: acquire() takes {_WAIT}")
