"""The dashboard: all about the locks at this moment, on one page that refreshes itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..inspection import display
from ..inspection.monitoring import PERMISSION
from ..inspection.overview import Overview
from ..inspection.snapshot import LockSnapshot
from ..inspection.status import Alarm, Problem, Status, current_status
from . import graph, lanes
from .lock_actions import LockActions

#: Seconds between two refreshes.
REFRESH_SECONDS: Final = 5


def view(admin: LockActions, request: HttpRequest) -> HttpResponse:
    """The page; with ``?part=live`` only what a refresh replaces."""
    if not admin.has_view_permission(request) or request.method not in ("GET", "HEAD"):
        raise PermissionDenied
    name = "dashboard_live" if request.GET.get("part") == "live" else "dashboard"
    context = {
        "title": _("Lock dashboard"),
        "every": REFRESH_SECONDS,
        "may_read_status": request.user.has_perm(PERMISSION),
        "may_ask": admin.has_ask_release_permission(request),
        "may_force": admin.has_force_release_permission(request),
        **facts(current_status()),
    }
    return admin.page(request, name, context)


def facts(status: Status) -> dict[str, Any]:
    """The context of the templates."""
    locks = status.locks
    candidates = _candidates(locks)
    history = lanes.read_history(list(candidates))
    return {
        "locks": locks,
        "server": status.server,
        "problems": [(problem, TEXTS[problem.alarm](problem)) for problem in status.problems],
        "recent": lanes.draw(candidates.values(), locks.now, history),
        "keeps_history": bool(history),
        "queues": [(lock, lock.queue[0]) for lock in locks.waited_for if lock.queue],
        "graph": graph.draw(locks.waited_for),
        "bars": _bars(locks.contended),
        "totals": json.dumps({lock.key: [lock.acquisitions, lock.contended, lock.waited_ms] for lock in locks.shown}),
        "at": locks.now.timestamp(),
        "documents": status.documents,
    }


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
    Alarm.LONG_WAIT: lambda problem: (
        _("A waiter has been waiting for “%(key)s” for %(time)s.")
        % {"key": problem.about, "time": display.duration(problem.amount)}
    ),
    Alarm.STALE: lambda problem: (
        ngettext(
            "%d lock is stale: its holder has died or hangs. The next process that asks gets the lock.",
            "%d locks are stale: their holders have died or hang. The next process that asks gets the lock.",
            int(problem.amount),
        )
        % problem.amount
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


def _bars(contended: tuple[LockSnapshot, ...]) -> list[tuple[LockSnapshot, str, float]]:
    """Each lock with the width of its bar, and the mean wait in seconds."""
    counted = [lock for lock in contended if lock.contended > 0]
    most = max((lock.contended for lock in counted), default=1)
    return [(lock, f"{100 * lock.contended / most:.2f}%", lock.waited_ms / lock.contended / 1000) for lock in counted]
