"""The dashboard: a page about all locks at this moment that refreshes itself."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..exceptions import printable
from ..inspection import display
from ..inspection.pictures import NOTHING, draw_graph, draw_lanes, pasts
from ..inspection.snapshot import Verdict
from ..inspection.status import PERMISSION, Alarm, Problem, Status, current_status
from ..inspection.verdict import obstacle_text
from ..models.lock_model import Lock, LockDashboard
from .lock_actions import LockActions
from .pages import Pages, in_own_encoding, unless_away

#: The conditions that are no problem yet, and worth a look.
UNUSUAL: Final = (Verdict.SLOW, Verdict.ASKED, Verdict.SILENT)
#: Seconds between two refreshes.
REFRESH_SECONDS: Final = 5


@admin.register(LockDashboard)
class LockDashboardAdmin(Pages):
    """A line in the admin's index for everybody who may view locks. The line leads to the dashboard of the admin of
    locks.
    """

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("django_mongolock.view_lock")

    def get_urls(self) -> list[URLPattern]:
        """Return the single address of the dashboard."""

        def view(request: HttpRequest) -> HttpResponse:
            locks: Any = self.admin_site.get_model_admin(Lock)
            return in_own_encoding(locks.dashboard_view)(request)

        return [path("", self.admin_site.admin_view(view), name="django_mongolock_lockdashboard_changelist")]


class Dashboard(LockActions):
    """The dashboard page in the admin of locks."""

    @unless_away
    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show problems, waits, holders, processes and servers. With ``?part=live``, show only the part that a refresh
        replaces.
        """
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        name = "dashboard_live" if request.GET.get("part") == "live" else "dashboard"
        context = {
            "title": _("Lock dashboard"),
            "every": REFRESH_SECONDS,
            "may_read_status": request.user.has_perm(PERMISSION),
            "may_ask": self.has_ask_release_permission(request),
            "may_force": self.has_force_release_permission(request),
            **facts(current_status()),
        }
        return self.page(request, name, context)


def facts(status: Status) -> dict[str, Any]:
    """Return the context of the templates."""
    locks = status.locks
    left = [lock for lock in locks.present if lock.verdict is Verdict.STALE and lock.waiting]
    told = next((read(locks.shown) for read in pasts), NOTHING)
    return {
        "locks": locks,
        "server": status.server,
        "problems": [(each, _text(each, status)) for each in status.problems],
        "rows": status.rows,
        "unusual": [r for r in status.rows if r.lock.verdict in UNUSUAL or r.lock.obstacle or r.lock in left],
        "harmless": locks.stale - len(left),
        "gave_up": told.deadlocks,
        "recent": draw_lanes(locks.shown, locks.now, told),
        "graph": draw_graph(locks.waited_for),
        "contended": [
            (lock, lock.waited_ms / lock.contended / 1_000, lock.longest_wait_ms / 1_000)
            for lock in locks.contended
            if lock.contended > 0
        ],
        "others_held": sum(each.held for each in status.others),
        "others": [each for each in status.others if each.held or each.stale or each.damaged or each.error],
    }


#: The text of each problem and of its cure. `time` is the amount, if the amount is in seconds.
TEXTS: Final = {
    Alarm.SERVER: gettext_lazy("MongoDB cannot be used: %(about)s"),
    Alarm.DEADLOCK: gettext_lazy(
        "Deadlock: threads or tasks wait for one another. The youngest of them gives up in a moment."
    ),
    Alarm.DAMAGED: gettext_lazy("Damaged: “%(about)s”%(more)s. Nobody can acquire it until its document is repaired."),
    Alarm.HANGS: gettext_lazy("Hangs: “%(about)s”%(more)s. Its process lives, and does not release it."),
    Alarm.LONG_WAIT: gettext_lazy("A waiter has been waiting for “%(about)s” for %(time)s."),
    Alarm.STALE_OTHERS: gettext_lazy("Stale locks of “%(about)s”: %(count)s. A flow that held one has died or hangs."),
    Alarm.DAMAGED_OTHERS: gettext_lazy(
        "Damaged locks of “%(about)s”: %(count)s. Nobody can acquire one until it is repaired."
    ),
    Alarm.OTHERS_AWAY: gettext_lazy("Locks of another kind cannot be read: %(about)s"),
    Alarm.INDEXES: gettext_lazy("Indexes are missing: %(about)s. Run manage.py migrate."),
    Alarm.STANDALONE: gettext_lazy("MongoDB is not a replica set: a lock may not survive a crash of the server."),
    Alarm.POLLING: gettext_lazy(
        "No bell wakes a waiter: they look at intervals, which takes longer. Run manage.py migrate."
    ),
}


def _text(problem: Problem, status: Status) -> str:
    about = display.sentence(problem.about) if problem.alarm is Alarm.SERVER else printable(problem.about)
    count = int(problem.amount)
    facts = {
        "about": about,
        "more": display.more(count - 1),
        "count": f"≥ {count}" if problem.more else str(count),
        "time": display.duration(problem.amount),
    }
    obstacles = (obstacle_text(row.lock) for row in status.rows if row.key == problem.about)
    return " ".join([TEXTS[problem.alarm] % facts, *filter(None, obstacles)])
