"""The dashboard: all about the locks at this moment, on one page that refreshes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.generic import RedirectView

from ..inspection import display
from ..inspection.overview import Overview
from ..inspection.past import pasts
from ..inspection.snapshot import LockSnapshot
from ..inspection.status import PERMISSION, Alarm, Problem, Status, current_status
from ..inspection.verdict import Verdict
from ..models.lock_model import LockDashboard
from . import graph, lanes
from .lock_actions import LockActions
from .pages import Pages

#: Seconds between two refreshes.
REFRESH_SECONDS: Final = 5


@admin.register(LockDashboard)
class LockDashboardAdmin(Pages):
    """A line in the admin's index, for everybody who may view locks."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("django_mongolock.view_lock")

    def get_urls(self) -> list[URLPattern]:
        """One address, which leads to the dashboard."""
        view = RedirectView.as_view(pattern_name="admin:django_mongolock_lock_dashboard")
        return [path("", self.admin_site.admin_view(view), name="django_mongolock_lockdashboard_changelist")]


def view(lock_admin: LockActions, request: HttpRequest) -> HttpResponse:
    """The page; with ``?part=live`` only what a refresh replaces."""
    if not lock_admin.has_view_permission(request) or request.method not in ("GET", "HEAD"):
        raise PermissionDenied
    name = "dashboard_live" if request.GET.get("part") == "live" else "dashboard"
    context = {
        "title": _("Lock dashboard"),
        "every": REFRESH_SECONDS,
        "may_read_status": request.user.has_perm(PERMISSION),
        "may_ask": lock_admin.has_ask_release_permission(request),
        "may_force": lock_admin.has_force_release_permission(request),
        **facts(current_status()),
    }
    return lock_admin.page(request, name, context)


def facts(status: Status) -> dict[str, Any]:
    """The context of the templates. What is stale needs no person: it is listed last, and is no problem here."""
    locks = status.locks
    candidates = _candidates(locks)
    told = pasts[-1].told(candidates.values())
    return {
        "locks": locks,
        "server": status.server,
        "problems": [
            (problem, TEXTS[problem.alarm](problem)) for problem in status.problems if problem.alarm is not Alarm.STALE
        ],
        "judged": status.judged,
        "unusual": [each for each in status.judged if each.verdict in _UNUSUAL],
        "gave_up": told.deadlocks,
        "recent": lanes.draw(candidates.values(), locks.now, told),
        "graph": graph.draw(locks.waited_for),
        "contended": [
            (lock, lock.waited_ms / lock.contended / 1_000, lock.longest_wait_ms / 1_000)
            for lock in locks.contended
            if lock.contended > 0
        ],
        "documents": [each for each in status.documents if each.held or each.stale or each.damaged or each.error],
    }


#: What is worth a look, and no problem yet.
_UNUSUAL: Final = (Verdict.SLOW, Verdict.ASKED, Verdict.SILENT)
#: Each problem, and what to do about it, in a sentence or two.
TEXTS: Final[dict[Alarm, Callable[[Problem], str]]] = {
    Alarm.SERVER: lambda problem: _("MongoDB cannot be used: %s.") % problem.about,
    Alarm.DEADLOCK: lambda problem: (
        ngettext(
            "%d deadlock: its members wait for one another. The youngest of them gives up in a moment.",
            "%d deadlocks: their members wait for one another. The youngest of each gives up in a moment.",
            int(problem.amount),
        )
        % problem.amount
    ),
    Alarm.DAMAGED: lambda problem: (
        ngettext(
            "The document of “%(key)s” is damaged: the lock cannot be acquired until the document is repaired.",
            "%(count)d documents are damaged, such as that of “%(key)s”: their locks cannot be acquired until they are "
            "repaired.",
            int(problem.amount),
        )
        % {"count": problem.amount, "key": problem.about}
    ),
    Alarm.HANGS: lambda problem: (
        ngettext(
            "“%(key)s” hangs: its process lives, and does not release it.",
            "%(count)d locks hang, such as “%(key)s”: their processes live, and do not release them.",
            int(problem.amount),
        )
        % {"count": problem.amount, "key": problem.about}
    ),
    Alarm.LONG_WAIT: lambda problem: (
        _("A waiter has been waiting for “%(key)s” for %(time)s.")
        % {"key": problem.about, "time": display.duration(problem.amount)}
    ),
    Alarm.STALE_DOCUMENTS: lambda problem: (
        ngettext(
            "%(count)d document of “%(lock)s” is stale: the flow that held it has died or hangs.",
            "%(count)d documents of “%(lock)s” are stale: the flows that held them have died or hang.",
            int(problem.amount),
        )
        % {"count": problem.amount, "lock": problem.about}
    ),
    Alarm.DAMAGED_DOCUMENTS: lambda problem: (
        ngettext(
            "%(count)d document of “%(lock)s” is damaged: it cannot be acquired until it is repaired.",
            "%(count)d documents of “%(lock)s” are damaged: they cannot be acquired until they are repaired.",
            int(problem.amount),
        )
        % {"count": problem.amount, "lock": problem.about}
    ),
    Alarm.DOCUMENTS_AWAY: lambda problem: _("Documents cannot be read: %s") % problem.about,
    Alarm.INDEXES: lambda problem: _("Indexes are missing: %s. Run manage.py migrate.") % problem.about,
    Alarm.STANDALONE: lambda _problem: _("MongoDB is not a replica set: a lock may not survive a crash of the server."),
    Alarm.POLLING: lambda _problem: _(
        "No bell wakes a waiter: they look at intervals, which takes longer. Run manage.py migrate."
    ),
}


def _candidates(locks: Overview) -> dict[str, LockSnapshot]:
    """The locks that may get a lane, by key."""
    found = (*locks.waited_for, *locks.contended, *locks.longest_held, *locks.recent)
    return {lock.key: lock for lock in found}
