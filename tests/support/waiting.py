"""Waits in tests, for a condition, never for a length of time."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 10) -> bool:
    """Wait until *condition* holds, and return whether it did within *seconds*."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
