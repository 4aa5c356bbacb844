"""The clock of the client's side, and the pauses between attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

#: Seconds on a clock that cannot be set and that, if the system has such a clock, goes on while the machine sleeps, as
#: a lease does. Only differences of its values within one process mean something.
now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


def backoff(attempt: int, first: float = 0.05, longest: float = 1.0) -> float:
    """Return how many seconds to wait after *attempt* (1, 2, and so on): a random time, up to a limit that is *first*
    seconds, doubles each time, and is at most *longest* (full jitter)."""
    return random.uniform(0, min(longest, first * 2.0 ** min(attempt - 1, 60)))  # noqa: S311 - spreads load
