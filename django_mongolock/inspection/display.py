"""Texts about a lock for the admin and the commands: the holder, its place, the time held."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Final

from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..context import BROWSER, CLAIMED
from ..engine.rule.document import UNLIMITED
from ..exceptions import printable
from .snapshot import LockSnapshot, Party, ShownState, with_local_time

#: A state or a verdict is shown by a shape and a word. Colour adds nothing to these two.
SHOWN: Final = {
    "held": ("●", gettext_lazy("held")),
    "kept": ("◇", gettext_lazy("kept")),
    "stale": ("◐", gettext_lazy("stale")),
    "free": ("○", gettext_lazy("free")),
    "damaged": ("▲", gettext_lazy("damaged")),
    "works": ("●", gettext_lazy("works")),
    "slow": ("◑", gettext_lazy("slow")),
    "asked": ("?", gettext_lazy("asked")),
    "hangs": ("▲", gettext_lazy("hangs")),
    "silent": ("◌", gettext_lazy("silent")),
}

#: Quoted forms of the keys that no address can carry. A browser resolves a path of dots to another path, and no address
#: matches an empty key. Django's `quote` never returns these texts for another key.
_DOTS: Final = {"": "_", ".": "_2E", "..": "_2E_2E"}


def state_badge(state: str | None) -> SafeString | str:
    """Return the state or the verdict of a lock as HTML."""
    return badge(f"mongolock-state mongolock-{state}", *SHOWN[state]) if state else ""


def badge(css: str, shape: str, word: object) -> SafeString:
    """Return a word with its shape as HTML."""
    return format_html('<span class="{}"><span aria-hidden="true">{}</span> {}</span>', css, shape, word)


def who(party: Party) -> str:
    """Return one line that names the party: the label, else the task or view, else the user, else the owner."""
    return printable(next(_names(party), "")) or _("unknown")


def where(party: Party) -> str:
    """Return host, process, and thread or asyncio task. For a holder that has released the lock, return its host and
    the time.
    """
    if party.released:
        return _("done %(time)s on %(host)s") % {"time": moment(party.released), "host": printable(party.host or "?")}
    if party.host == BROWSER:
        return _("a browser tab")
    words = (party.host, _("pid %s") % party.pid if party.pid is not None else "", party.thread)
    return printable(" · ".join(word for word in words if word)) or "?"


def details(party: Party) -> str:
    """Return the place of the party, and the names that `who` leaves out."""
    return " · ".join([where(party), *map(printable, islice(_names(party), 1, None))])


def _names(party: Party) -> Iterator[str]:
    """Yield the names of a holder or a waiter, none twice.

    An edit lock has neither a view nor a readable owner. Its owner is a hash.
    """
    label, place, owner = party.label or "", party.place or "", party.owner or ""
    if party.host == BROWSER:
        yield " · ".join(filter(None, (label, party.user and _("user %s") % party.user)))
        return
    task, id_ = place.rsplit(" ", 1) if place.count(" ") > 1 and place.startswith("task ") else (place, "")
    yield from filter(None, (label, "" if label and label in task else task))
    if party.user:
        yield _("user %s") % party.user
    if owner and owner != id_:
        yield _("owner %s") % owner
    if id_:
        yield _("id %s") % id_


def named(name: str, place: str) -> SafeString:
    """Return a name with its place below as HTML."""
    html = '<span class="mongolock-who"><bdi>{}</bdi></span><small class="mongolock-who"><bdi>{}</bdi></small>'
    return format_html(html, name, place)


def more(count: int) -> str:
    """Return " and 2 more" for a list that leaves out *count* of its parts, "" for a whole one."""
    text = ngettext("and %d more", "and %d more", count) % count  # xgettext does not look into an f-string
    return f" {text}" if count > 0 else ""


def others(lock: LockSnapshot) -> str:
    """Return the number of holders besides the first, and the permits in use of a semaphore."""
    text = more(lock.holding - 1)
    numbers = [each.capacity for each in lock.holders if each.mode == "semaphore" and each.capacity]
    return f"{text} ({_share(lock.permits, min(numbers))})" if numbers else text


def _share(used: int, permits: int) -> str:
    return _("%(used)d of %(permits)d permits") % {"used": used, "permits": permits}


def look_at_process(lock: LockSnapshot) -> tuple[str, str, str, str] | None:
    """Return the host and the name of the first holder, and two commands to run on that host.

    The first command shows the work of the process, the second ends the process. Return None without a process.
    """
    for holder in lock.holders:
        if holder.pid is not None and not holder.released and holder.host not in (BROWSER, CLAIMED):
            return printable(holder.host or "?"), who(holder), f"py-spy dump --pid {holder.pid}", f"kill {holder.pid}"
    return None


def mode(party: Party) -> str:
    """Return "exclusive", "shared", or the number of permits in use out of the total."""
    if party.mode == "semaphore" and party.capacity is not None and party.capacity < UNLIMITED:
        return _share(1 + party.more_permits, party.capacity)
    words = {"shared": _("shared"), "exclusive": _("exclusive")}
    return words.get(party.mode or "") or printable(party.mode or "?")


def sentence(text: object) -> str:
    """Return *text* with a punctuation mark at its end."""
    shown = printable(text)
    return shown if shown.endswith((".", "?", "!", "…")) else f"{shown}."


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
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


def milliseconds(value: float) -> str:
    """Return a length of time given in milliseconds. Times below a second are shown in milliseconds."""
    return _("%d ms") % round(value) if value < 1_000 else duration(value / 1_000)


def moment(value: datetime) -> str:
    """Return date and time to the second in the current time zone, with the name of the zone."""
    value = with_local_time(value)
    return f"{timezone.localtime(value) if timezone.is_aware(value) else value:%Y-%m-%d %H:%M:%S %Z}".rstrip()


def ago(value: datetime, now: datetime) -> str:
    """Return the time from *value* to *now*. Both are moments of the server's clock."""
    return _("%s ago") % duration((now - value).total_seconds())


def time_ago(value: datetime | None, now: datetime | None) -> SafeString | str:
    """Return a moment, relative and absolute, as HTML. Return "?" if the moment is unknown."""
    if value is None or now is None:
        return "?"
    return format_html(
        '<time datetime="{}" class="mongolock-time">{} <small>{}</small></time>',
        value.isoformat(),
        ago(value, now),
        moment(value),
    )


def lasting(since: datetime | None, seconds: float) -> SafeString | str:
    """Return a length of time as HTML, with the moment of its start as a hint. Return "–" without such a moment."""
    if since is None:
        return "–"
    return format_html('<time datetime="{}" title="{}">{}</time>', since.isoformat(), moment(since), duration(seconds))


def time_left(end: datetime | None, now: datetime) -> str:
    """Return the time until the end of a lease, or since its end. Return "?" if the end is unknown."""
    return "?" if end is None else seconds_left((end - now).total_seconds())


def seconds_left(seconds: float) -> str:
    """Return the time until something ends, or since its end."""
    return duration(seconds) if seconds > 0 else _("ended %s ago") % duration(seconds)


def counters(lock: LockSnapshot) -> list[tuple[str, str]]:
    """Return names and values of the counters in the document of a lock."""
    ended = lock.acquisitions - lock.uncounted
    return [
        (_("acquisitions"), str(lock.acquisitions)),
        (_("acquisitions after a wait"), str(lock.contended)),
        (_("mean wait of these"), duration(lock.waited_ms / lock.contended / 1000) if lock.contended else "–"),
        (_("longest wait"), duration(lock.longest_wait_ms / 1000) if lock.longest_wait_ms else "–"),
        (_("mean time held"), duration(lock.held_ms / ended / 1000) if ended > 0 else "–"),
        (_("longest time held"), duration(lock.longest_hold_ms / 1000) if lock.longest_hold_ms else "–"),
        (_("leases that ended without a release"), str(lock.expired + (lock.state is ShownState.STALE))),
        (_("last fencing token"), str(lock.token or "?")),
        (_("document kept until"), moment(lock.purge_at) if lock.purge_at else "?"),
    ]


def lock_address(key: str, site: str | None = None) -> str:
    """Return the address of the page of a lock on the admin site with this name."""
    return reverse("admin:django_mongolock_lock_change", args=(quote_key(key),), current_app=site)


def quote_key(key: str) -> str:
    """Return *key* as a part of an address of the admin."""
    from django.contrib.admin.utils import quote  # a project without the admin imports this module too

    return _DOTS.get(key) or str(quote(key))


def unquote_key(quoted: str) -> str:
    """Return the key that was given to `quote_key`."""
    from django.contrib.admin.utils import unquote

    return next((key for key, dots in _DOTS.items() if dots == quoted), unquote(quoted))
