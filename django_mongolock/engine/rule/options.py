"""How a lock is asked for and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from .document import Terms

#: A length of time: seconds, or a `timedelta`.
Seconds = float | timedelta
#: The longest time that makes sense, in seconds: ten years.
_LONGEST: Final = 10 * 365 * 86_400


class Unset:
    """The type of `UNSET`, which stands for an argument that was not given where None means something."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Options:
    """How a lock is asked for and kept. *wait*: seconds, 0 for a single try, None without end. *templates*: what the
    keys were made from, where that is known. *on_lost*, *on_release_requested*: called with the lock. *whole*: it
    begins with a whole lease, rather than with what is left of a place in the queue."""

    terms: Terms = Terms()  # noqa: RUF009 - it is frozen
    wait: float | None = 10.0
    reentrant: bool = False
    auto_renew: bool = True
    max_hold: float | None = None
    on_lost: Callable[[Any], object] | None = None
    on_release_requested: Callable[[Any], object] | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False


def as_seconds(value: Any) -> Any:
    """Return the seconds of a `timedelta`, and anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def check_seconds(name: str, value: object) -> float:
    """Return *value* in seconds if it is a time above 0. Raises TypeError, ValueError."""
    value = as_seconds(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds or a timedelta, not {type(value).__name__}")
    if not 0 < value < _LONGEST:
        raise ValueError(f"{name} must be more than 0 and less than {_LONGEST} seconds, not {value!s:.20}")
    return float(value)


def check_flag(name: str, value: object) -> None:
    """Raise TypeError if *value* is neither True nor False: "no" is true to Python."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r:.40}")


def check_wait(value: object) -> float | None:
    """Return *value* in seconds if it is a time to wait: 0 for a single try, None without end."""
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
#: What options of other libraries are here.
_FOREIGN: Final = {
    "blocking": "use wait=: wait=0 for a single try, wait=None to wait without end",
    **dict.fromkeys(("blocking_timeout", "acquire_timeout", "wait_timeout", "max_wait"), f"use {_WAIT}"),
    **dict.fromkeys(("ttl", "expire", "expires", "expiry", "lease_time"), f"use {_LEASE}"),
    **dict.fromkeys(("timeout", "lock_timeout"), f"it could mean two things: use {_LEASE} or {_WAIT}"),
}


def foreign_option(name: str) -> TypeError | None:
    """The error for an option that another library has; it names ours."""
    return TypeError(f"unexpected keyword argument {name!r}: {_FOREIGN[name]}") if name in _FOREIGN else None


def refuse_options(unknown: Mapping[str, object]) -> None:
    """Raise TypeError if `MongoLock.acquire` was given an argument that it does not have."""
    for name in unknown:
        raise foreign_option(name) or TypeError(f"unexpected keyword argument {name!r}: acquire() takes {_WAIT}")
