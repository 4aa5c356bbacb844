"""What people read about a lock: who has it, where, for how long. For the admin and for the commands."""

from __future__ import annotations

import unicodedata
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol

from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..context import BROWSER
from ..engine.document import UNLIMITED, UNPRINTABLE
from ..engine.history import Happened
from .snapshot import Entry, Seen, State

if TYPE_CHECKING:
    from ..models.lock_event import LockEvent

STATES: Final = {
    State.HELD: gettext_lazy("held"),
    State.STALE: gettext_lazy("stale"),
    State.FREE: gettext_lazy("free"),
    State.DAMAGED: gettext_lazy("damaged"),
}


class Somebody(Protocol):
    """A holder, one who waits, or who something happened to."""

    @property
    def label(self) -> str | None: ...
    @property
    def place(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def owner(self) -> str | None: ...
    @property
    def host(self) -> str | None: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def thread(self) -> str | None: ...


EVENTS: Final = {
    Happened.GRANTED: gettext_lazy("granted"),
    Happened.RELEASED: gettext_lazy("released"),
    Happened.LOST: gettext_lazy("lost"),
    Happened.DEADLOCK: gettext_lazy("deadlock"),
    Happened.ASKED: gettext_lazy("asked to release"),
    Happened.FORCED: gettext_lazy("release forced"),
    Happened.CLEARED: gettext_lazy("cleared"),
}
#: An event is told by word and by shape as well.
SHAPES: Final = {
    Happened.GRANTED: "●",
    Happened.RELEASED: "○",
    Happened.LOST: "◐",
    Happened.DEADLOCK: "▲",
    Happened.ASKED: "?",
    Happened.FORCED: "✕",
    Happened.CLEARED: "◌",
}


def who(entry: Somebody) -> str:
    """On whose behalf: label, view or task, user, owner. Of an edit lock no view, and no owner, which is a hash."""
    edits = entry.host == BROWSER
    words = [word for word in (entry.label, "" if edits else entry.place) if word]
    words += [_("user %s") % entry.user] if entry.user else []
    words += [_("owner %s") % entry.owner] if entry.owner and not edits else []
    return " · ".join(words) or _("somebody")


def where(entry: Somebody) -> str:
    """Host, process, thread or asyncio task."""
    words = [entry.host or "", _("pid %s") % entry.pid if entry.pid is not None else "", entry.thread or ""]
    return " · ".join(word for word in words if word) or "?"


def mode(entry: Entry) -> str:
    """Alone, with others, or one of so many."""
    if entry.mode == "semaphore" and entry.capacity is not None and entry.capacity < UNLIMITED:
        return _("one of %s permits") % entry.capacity
    return _("shared") if entry.mode == "shared" else _("exclusive") if entry.mode == "exclusive" else entry.mode or "?"


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    seconds = abs(seconds)
    if seconds < 59.5:
        return _("%s s") % (f"{seconds:.1f}" if seconds < 9.95 else f"{seconds:.0f}")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return _("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": rest}
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return _("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": minutes}
    return _("%(days)d d %(hours)d h") % {"days": hours // 24, "hours": hours % 24}


def moment(value: datetime) -> str:
    """Date and time to the second, in the current time zone."""
    return f"{timezone.localtime(value):%Y-%m-%d %H:%M:%S}"


def ago(value: datetime, now: datetime) -> str:
    """How long before *now*, both by the server's clock."""
    return _("%s ago") % duration((now - value).total_seconds())


def left(end: datetime, now: datetime) -> str:
    """How long a lease still runs, or for how long it has been over."""
    seconds = (end - now).total_seconds()
    return duration(seconds) if seconds > 0 else _("over for %s") % duration(seconds)


def counters(seen: Seen) -> list[tuple[str, str]]:
    """What the document counts, for people: name and value."""
    ended = seen.acquisitions - seen.holding
    return [
        (_("acquisitions"), str(seen.acquisitions)),
        (_("of these, had to wait"), str(seen.contended)),
        (_("mean wait of these"), duration(seen.waited_ms / seen.contended / 1000) if seen.contended else "–"),
        (_("longest wait"), duration(seen.longest_wait_ms / 1000) if seen.longest_wait_ms else "–"),
        (_("mean time held"), duration(seen.held_ms / ended / 1000) if ended > 0 else "–"),
        (_("longest time held"), duration(seen.longest_hold_ms / 1000) if seen.longest_hold_ms else "–"),
        (_("leases that ended without a release"), str(seen.expired)),
        (_("last fencing token"), str(seen.token or "?")),
        (_("document kept until"), moment(seen.purge_at) if seen.purge_at else "?"),
    ]


def plain(text: object) -> str:
    """*text* for a terminal: what would steer it, or turn the direction of writing, is shown as its code."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in {*UNPRINTABLE, "Cf"} else c for c in str(text))


def what(event: LockEvent) -> SafeString:
    """What happened, by word and by shape."""
    known = next((each for each in Happened if each.value == event.event), None)
    if known is None:
        return format_html("{}", event.event or "?")
    return format_html(
        '<span class="mongolock-event mongolock-event-{}"><span aria-hidden="true">{}</span> {}</span>',
        known.value,
        SHAPES[known],
        EVENTS[known],
    )


def _short(milliseconds: int) -> str:
    return _("%d ms") % milliseconds if milliseconds < 1_000 else duration(milliseconds / 1_000)


def details(event: LockEvent) -> str:
    """How long it waited and held; who did it, and why."""
    facts = [_("waited %s") % _short(event.waited_ms)] if event.waited_ms else []
    facts += [_("held %s") % _short(event.held_ms)] if event.held_ms is not None else []
    facts += [_("by %s") % event.by] if event.by else []
    facts += [event.reason] if event.reason else []
    return " · ".join(facts) or "–"
