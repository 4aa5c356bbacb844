"""The local clock, and the pauses between attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

#: Seconds on a clock that cannot be set. Like a lease, the clock goes on while the machine sleeps, if the system has
#: such a clock. Only differences of two values within one process have a meaning.
now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


def backoff(attempt: int, first: float = 0.05, longest: float = 1.0) -> float:
    """Return how many seconds to wait after *attempt* (1, 2, and further).

    The pause is random, up to a limit (full jitter). The limit is *first* seconds, doubles with each attempt, and is at
    most *longest*.
    """
    return random.uniform(0, min(longest, first * 2.0 ** min(attempt - 1, 60)))  # noqa: S311 - spreads load
