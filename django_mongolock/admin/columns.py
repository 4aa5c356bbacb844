"""The columns of the list of locks."""

from __future__ import annotations

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..inspection import display
from ..inspection.verdict import Verdict, verdict_badge
from ..models import Lock
from .listing import Computed

_NOTHING = "–"


class Columns:
    """Each method takes a `Lock` whose `row` is set. On a narrow screen, a line is a card with labels."""

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        """The verdict; in words too, unless all is well."""
        judged = lock.row.judged
        shown = verdict_badge(judged.verdict) or display.state_badge(lock.row.state)
        text = "" if judged.verdict is Verdict.WORKS else format_html("<br><small>{}</small>", judged.text)
        return format_html('<span title="{}">{}</span>{}', judged.text, shown, text)

    @admin.display(description=_("holder"))
    def who(self, lock: Lock) -> SafeString | str:
        return display.holder(lock.row.holder, lock.row.where, lock.row.damage)

    @admin.display(description=_("held for"), ordering=Computed("since"))
    def since(self, lock: Lock) -> SafeString:
        return labelled(_("held for"), display.time_since(lock.row.since, lock.row.lock.now))

    @admin.display(description=_("lease left"), ordering="expires_at")
    def left(self, lock: Lock) -> SafeString:
        left = lock.row.left
        return labelled(_("lease left"), _NOTHING if left is None else display.seconds_left(left))

    @admin.display(description=_("waiting"), ordering=Computed("waiting").desc())
    def waiting(self, lock: Lock) -> SafeString:
        return labelled(_("waiting"), str(lock.row.lock.waiting))

    @admin.display(description=_("longest wait"), ordering=Computed("waited"))
    def waited(self, lock: Lock) -> SafeString:
        seconds = lock.row.lock.longest_wait
        return labelled(_("longest wait"), _NOTHING if seconds is None else display.duration(seconds))


def labelled(label: object, value: SafeString | str) -> SafeString:
    return format_html('<span class="mongolock-label" aria-hidden="true">{}</span> {}', label, value)
