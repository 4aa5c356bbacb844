"""The events of a history, and what they tell: for what writes them, and what shows them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: What an event takes over from the entry of a holder.
FACTS: Final = ("mode", "owner", "label", "place", "user", "host", "pid", "thread")


class Happened(StrEnum):
    """What happened. The first three are noted by the process that holds the lock, `DEADLOCK` by the one that gave up,
    the others by the one that did it."""

    GRANTED = "granted"
    RELEASED = "released"
    LOST = "lost"
    DEADLOCK = "deadlock"
    ASKED = "asked"
    FORCED = "forced"
    CLEARED = "cleared"
