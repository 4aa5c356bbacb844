"""The one clock that the client's side goes by."""

from __future__ import annotations

import time
from collections.abc import Callable


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


#: Seconds on a clock that nobody can set and that, where the system has such a one, runs on while the machine
#: sleeps: a lease does. Its values mean something only beside one another, in one process.
now: Callable[[], float] = _boottime if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
