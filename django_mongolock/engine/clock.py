"""The clock of the client's side."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

#: Seconds on a clock that cannot be set and that, if the system has such a clock, goes on while the machine sleeps, as
#: a lease does. Only differences of its values within one process mean something.
now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
