"""The dashboard: all that goes on among the locks, on one page that refreshes itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..inspect import display
from ..inspect.monitoring import PERMISSION
from ..inspect.overview import Overview, living
from ..inspect.snapshot import Seen
from ..inspect.status import Alarm, Status, Trouble, current_status
from . import graph, lanes

if TYPE_CHECKING:
    from .lock_admin import LockAdmin

#: Seconds between two refreshes.
EVERY: Final = 5

ROLES: Final = {
    "primary": gettext_lazy("primary"),
    "secondary": gettext_lazy("secondary"),
    "mongos": gettext_lazy("router (mongos)"),
    "standalone": gettext_lazy("standalone server"),
    "other": gettext_lazy("neither primary nor secondary"),
    "away": gettext_lazy("does not answer"),
}


def view(admin: LockAdmin, request: HttpRequest) -> HttpResponse:
    """The page; with ``?part=live`` only what a refresh replaces."""
    if not admin.has_view_permission(request) or request.method not in ("GET", "HEAD"):
        raise PermissionDenied
    name = "dashboard_live" if request.GET.get("part") == "live" else "dashboard"
    context = {
        "title": _("Dashboard of the locks"),
        "every": EVERY,
        "may_read_status": request.user.has_perm(PERMISSION),
        **facts(current_status()),
    }
    return admin.page(request, name, context)


def facts(status: Status) -> dict[str, Any]:
    """What the templates show."""
    locks = status.locks
    return {
        "locks": locks,
        "servers": status.servers,
        "members": [(member, ROLES[member.role], _ahead(member.ahead)) for member in status.servers.members],
        "apart": None if status.servers.apart is None else _fine(status.servers.apart),
        "troubles": [(trouble, tell(trouble)) for trouble in status.troubles],
        "lately": lanes.draw(_lately(locks), locks.now),
        "queues": [(seen, first) for seen in locks.waited_for for first in living(seen)[:1]],
        "graph": graph.draw(locks.waited_for),
        "bars": _bars(locks.contended),
        "totals": json.dumps({seen.key: [seen.acquisitions, seen.contended, seen.waited_ms] for seen in locks.shown}),
        "at": locks.now.timestamp(),
    }


def tell(trouble: Trouble) -> str:
    """What needs somebody, and what to do, in a sentence or two."""
    return _TELL[trouble.alarm](trouble)


_TELL: Final[dict[Alarm, Callable[[Trouble], str]]] = {
    Alarm.SERVER: lambda trouble: _("MongoDB cannot be used as it is: %s.") % trouble.about,
    Alarm.DEADLOCK: lambda trouble: (
        ngettext(
            "%d deadlock: some wait for each other. The youngest of them gives up in a moment.",
            "%d deadlocks: some wait for each other. The youngest of each gives up in a moment.",
            int(trouble.amount),
        )
        % trouble.amount
    ),
    Alarm.DAMAGED: lambda trouble: (
        _("The document of “%s” is damaged: nobody can take that lock until it is repaired.") % trouble.about
    ),
    Alarm.LONG_WAIT: lambda trouble: (
        _("Somebody has waited for “%(key)s” for %(time)s.")
        % {"key": trouble.about, "time": display.duration(trouble.amount)}
    ),
    Alarm.STALE: lambda trouble: (
        ngettext(
            "%d lock is stale: its holder died, or hangs. Whoever asks for it next gets it.",
            "%d locks are stale: their holders died, or hang. Whoever asks for one next gets it.",
            int(trouble.amount),
        )
        % trouble.amount
    ),
    Alarm.MEMBER_AWAY: lambda trouble: (
        _("A member of the replica set does not answer: %s. Locks go on as long as a majority does.") % trouble.about
    ),
    Alarm.CLOCKS: lambda trouble: (
        _("The clocks of the members are %s apart: have them set by NTP.") % display.duration(trouble.amount)
    ),
    Alarm.INDEXES: lambda trouble: _("Indexes are missing: %s. Run manage.py migrate.") % trouble.about,
    Alarm.STANDALONE: lambda _trouble: _(
        "MongoDB is no replica set: a grant does not survive a crash of it, and those who wait look for their turn "
        "now and then."
    ),
    Alarm.POLLING: lambda _trouble: _(
        "The user of this connection may not open a change stream: those who wait look for their turn now and then."
    ),
}


def _lately(locks: Overview) -> Iterable[Seen]:
    """Those that may be worth a lane."""
    found = (*locks.waited_for, *locks.contended, *locks.longest_held, *locks.lately)
    return {seen.key: seen for seen in found}.values()


def _bars(contended: tuple[Seen, ...]) -> list[tuple[Seen, str, float]]:
    """Each with the width of its bar, and how many seconds those who had to wait did so on average."""
    counted = [seen for seen in contended if seen.contended > 0]
    most = max((seen.contended for seen in counted), default=1)
    return [(seen, f"{100 * seen.contended / most:.2f}%", seen.waited_ms / seen.contended / 1000) for seen in counted]


def _ahead(seconds: float | None) -> str | Promise:
    """How a clock is beside the primary's."""
    if seconds is None:
        return "–"
    return f"{'+' if seconds > 0 else '−' if seconds < 0 else '±'}{_fine(abs(seconds))}"


def _fine(seconds: float) -> str:
    """A difference between clocks: milliseconds, as long as they say something."""
    return display.duration(seconds) if seconds >= 1 else _("%s ms") % round(seconds * 1000)
