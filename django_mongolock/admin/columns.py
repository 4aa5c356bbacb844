"""The columns of the list of locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.contrib import admin
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ..inspection import display
from ..inspection.snapshot import LockSnapshot, Party
from ..models import Lock

_NOTHING = "–"


class Columns:
    """Each method takes a `Lock` whose `snapshot` is set."""

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        return display.state_badge(lock.snapshot.state)

    @admin.display(description=_("holder"))
    def who(self, lock: Lock) -> SafeString | str:
        if lock.snapshot.damage:
            return lock.snapshot.damage
        return _lines(lock.snapshot, lambda holder: format_html("<bdi>{}</bdi>", display.who(holder)))

    @admin.display(description=_("where"))
    def where(self, lock: Lock) -> SafeString | str:
        return _lines(lock.snapshot, lambda holder: format_html("<bdi>{}</bdi>", display.where(holder)))

    @admin.display(description=_("held since"))
    def since(self, lock: Lock) -> SafeString | str:
        now = lock.snapshot.now
        return _lines(lock.snapshot, lambda holder: display.time_ago(holder.acquired_at, now))

    @admin.display(description=_("lease left"), ordering="expires_at")
    def left(self, lock: Lock) -> str:
        end = lock.snapshot.expires_at
        return display.time_left(end, lock.snapshot.now) if end else _NOTHING

    @admin.display(description=_("waiting"))
    def waiting(self, lock: Lock) -> str:
        return str(lock.snapshot.waiting)

    @admin.display(description=_("token"))
    def fencing_token(self, lock: Lock) -> str:
        return str(max(lock.snapshot.tokens, default=lock.snapshot.token or _NOTHING))


def _lines(lock: LockSnapshot, show: Callable[[Party], SafeString | str]) -> SafeString | str:
    """One line for each of the first holders, and one for the number of the others."""
    if not lock.holders:
        return _NOTHING
    lines: Iterable[tuple[SafeString | str]] = [(show(holder),) for holder in lock.holders]
    if more := lock.holding - len(lock.holders):
        lines = [*lines, (ngettext("and %d more", "and %d more", more) % more,)]
    return format_html_join("", '<div class="mongolock-line">{}</div>', lines)
