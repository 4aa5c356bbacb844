"""The columns of the list of locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.contrib import admin
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ..inspect import display
from ..inspect.snapshot import Entry, Seen, State
from ..models import Lock
from ..templatetags.mongolock import time_ago

#: A state is told by word and by shape; colour only comes on top.
_SHAPES = {State.HELD: "●", State.STALE: "◐", State.FREE: "○", State.DAMAGED: "▲"}
_NOTHING = "–"


def badge(seen: Seen) -> SafeString:
    """The state of a lock."""
    return format_html(
        '<span class="mongolock-state mongolock-{}"><span aria-hidden="true">{}</span> {}</span>',
        seen.state.value,
        _SHAPES[seen.state],
        display.STATES[seen.state],
    )


class Columns:
    """Each takes a lock that was read by `survey`."""

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        return badge(lock.seen)

    @admin.display(description=_("who"))
    def who(self, lock: Lock) -> SafeString | str:
        if lock.seen.damage:
            return lock.seen.damage
        return _lines(lock.seen, lambda holder: format_html("<bdi>{}</bdi>", display.who(holder)))

    @admin.display(description=_("where"))
    def where(self, lock: Lock) -> SafeString | str:
        return _lines(lock.seen, lambda holder: format_html("<bdi>{}</bdi>", display.where(holder)))

    @admin.display(description=_("since"))
    def since(self, lock: Lock) -> SafeString | str:
        now = lock.seen.now
        return _lines(lock.seen, lambda holder: time_ago(holder.acquired_at, now))

    @admin.display(description=_("left"), ordering="expires_at")
    def left(self, lock: Lock) -> str:
        end = lock.seen.expires_at
        return display.left(end, lock.seen.now) if end else _NOTHING

    @admin.display(description=_("waiting"))
    def waiting(self, lock: Lock) -> str:
        return str(lock.seen.waiting)

    @admin.display(description=_("token"))
    def fencing_token(self, lock: Lock) -> str:
        return str(max(lock.seen.tokens, default=lock.seen.token or _NOTHING))


def _lines(seen: Seen, show: Callable[[Entry], SafeString | str]) -> SafeString | str:
    """One line for each of the first holders, and one that tells how many more there are."""
    if not seen.holders:
        return _NOTHING
    lines: Iterable[tuple[SafeString | str]] = [(show(holder),) for holder in seen.holders]
    if more := seen.holding - len(seen.holders):
        lines = [*lines, (ngettext("and %d more", "and %d more", more) % more,)]
    return format_html_join("", '<div class="mongolock-line">{}</div>', lines)
