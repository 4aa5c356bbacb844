"""The events of a history."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..inspection.display import badge


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


#: An event is shown by word and by shape; colour only comes on top.
EVENTS: Final = {
    Happened.GRANTED: ("●", _("granted")),
    Happened.RELEASED: ("○", _("released")),
    Happened.LOST: ("◐", _("lost")),
    Happened.DEADLOCK: ("▲", _("deadlock")),
    Happened.ASKED: ("?", _("asked to release")),
    Happened.FORCED: ("✕", _("release forced")),
    Happened.CLEARED: ("◌", _("cleared")),
}


def event_badge(event: str | None) -> SafeString:
    """Return what happened, as HTML."""
    known = next((each for each in Happened if each.value == event), None)
    if known is None:
        return format_html("{}", event or "?")
    shape, word = EVENTS[known]
    return badge(f"mongolock-event mongolock-event-{known.value}", shape, word)
