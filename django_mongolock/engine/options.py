"""How a lock is asked for and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .document import Terms

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
    keys were made from, where that is known. *on_lost*, *on_release_requested*: called with the lock."""

    terms: Terms = Terms()  # noqa: RUF009 - it is frozen
    wait: float | None = 10.0
    reentrant: bool = False
    auto_renew: bool = True
    max_hold: float | None = None
    on_lost: Callable[[Any], object] | None = None
    on_release_requested: Callable[[Any], object] | None = None
    templates: Mapping[str, str] = field(default_factory=dict)


def check_seconds(name: str, value: object) -> float:
    """Return *value* if it is a number of seconds above 0. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    if not 0 < value < _LONGEST:
        raise ValueError(f"{name} must be more than 0 and less than {_LONGEST} seconds, not {value!s:.20}")
    return float(value)


def check_wait(value: object) -> float | None:
    """Return *value* if it is a time to wait: seconds, 0 for a single try, None without end."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not 0 <= value < _LONGEST:
        raise ValueError(f"wait is 0 for a single try, or seconds, or None for a wait without end, not {value!s:.20}")
    return 0.0 if value == 0 and not isinstance(value, bool) else check_seconds("wait", value)
