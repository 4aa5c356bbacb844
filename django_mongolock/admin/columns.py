"""The columns of the list of locks."""

from __future__ import annotations

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..inspection import display
from ..inspection.snapshot import State
from ..models import Lock
from .listing import Computed

_NOTHING = "–"


class Columns:
    """Each method takes a `Lock` whose `snapshot` is set. On a narrow screen, a row is a card with labels."""

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        return display.state_badge(lock.snapshot.state)

    @admin.display(description=_("holder"))
    def who(self, lock: Lock) -> SafeString | str:
        return display.holders(lock.snapshot)

    @admin.display(description=_("held for"), ordering=Computed("since"))
    def since(self, lock: Lock) -> SafeString:
        """Of a lock that is only kept, nothing: it is not held."""
        seen = lock.snapshot
        return labelled(_("held for"), display.time_since(None if seen.state is State.KEPT else seen.since, seen.now))

    @admin.display(description=_("lease left"), ordering="expires_at")
    def left(self, lock: Lock) -> SafeString:
        end = lock.snapshot.expires_at
        return labelled(_("lease left"), display.time_left(end, lock.snapshot.now) if end else _NOTHING)

    @admin.display(description=_("waiting"), ordering=Computed("waiting").desc())
    def waiting(self, lock: Lock) -> SafeString:
        return labelled(_("waiting"), str(lock.snapshot.waiting))

    @admin.display(description=_("longest wait"), ordering=Computed("waited"))
    def waited(self, lock: Lock) -> SafeString:
        seconds = lock.snapshot.longest_wait
        return labelled(_("longest wait"), _NOTHING if seconds is None else display.duration(seconds))


def labelled(label: object, value: SafeString | str) -> SafeString:
    return format_html('<span class="mongolock-label" aria-hidden="true">{}</span> {}', label, value)
