"""The locks and their server at one moment, and the problems that need a person. Monitoring gets the same as JSON.

Moments are in ISO 8601, by the server's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ..backends import mongo_store
from ..conf import get_settings
from ..exceptions import LockBackendFailed
from .kinds import Counts, count_all, other_kinds, starting
from .named_locks import LockRow, counts_of, party_as_json, row_of
from .overview import Overview, overview
from .server import ServerFacts, known_server
from .snapshot import COUNTERS, LockSnapshot, Verdict

Json = dict[str, Any]

#: A wait of more seconds than this is a problem.
LONG_WAIT: Final = 60.0


class Alarm(StrEnum):
    """The kinds of problems, the most urgent first. A stale lock needs no person, so it is counted and no problem.

    - OTHERS: problems with locks of other kinds, such as document locks.
    """

    SERVER = "server"
    DEADLOCK = "deadlock"
    DAMAGED = "damaged"
    HANGS = "hangs"
    LONG_WAIT = "long_wait"
    STALE_OTHERS = "stale_others"
    DAMAGED_OTHERS = "damaged_others"
    OTHERS_AWAY = "others_away"
    INDEXES = "indexes"
    STANDALONE = "standalone"
    POLLING = "polling"


@dataclass(frozen=True)
class Problem:
    """A problem that needs a person.

    - amount: count, or a number of seconds.
    - about: key, a name, or words.
    - more: whether there may be more.
    """

    alarm: Alarm
    amount: float
    about: str = ""
    more: bool = False

    def as_json(self) -> Json:
        """Return the problem as JSON for programs."""
        return {"alarm": self.alarm, "amount": round(self.amount, 3), "about": self.about}


@dataclass(frozen=True)
class Status:
    """The locks, their server, and the number of locks of each other kind.

    - rows: present locks.
    """

    locks: Overview
    server: ServerFacts
    others: tuple[Counts, ...] = ()
    rows: Sequence[LockRow] = ()

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems, the most urgent first."""
        return [*_of_locks(self.locks), *_of_others(self.others), *_of_server(self.server)]


def current_status() -> Status:
    """Return the status of the locks of this project. Raises LockBackendFailed."""
    settings = get_settings()
    store = mongo_store()
    locks = overview(store, starting(settings.KEY_PREFIX), settings.COMMAND_TIMEOUT)
    rows = tuple(map(row_of, locks.present))
    return Status(locks, known_server(store, settings.COMMAND_TIMEOUT), count_all(other_kinds()), rows)


def _of_locks(locks: Overview) -> Iterator[Problem]:
    if locks.deadlocks:
        yield Problem(Alarm.DEADLOCK, len(locks.deadlocks))
    if locks.damaged:
        yield Problem(Alarm.DAMAGED, len(locks.damaged), locks.damaged[0])
    if hanging := [lock for lock in locks.present if lock.verdict is Verdict.HANGS]:
        worst = next((lock for lock in hanging if lock.obstacle is None), hanging[0])
        yield Problem(Alarm.HANGS, len(hanging), worst.key)
    if locks.longest_wait > LONG_WAIT:
        longest = next(lock.key for lock in locks.waited_for if lock.longest_wait == locks.longest_wait)
        yield Problem(Alarm.LONG_WAIT, locks.longest_wait, longest)


def _of_others(found: Iterable[Counts]) -> Iterator[Problem]:
    for counts in found:
        if counts.stale:
            yield Problem(Alarm.STALE_OTHERS, counts.stale, counts.kind, counts.more)
        if counts.damaged:
            yield Problem(Alarm.DAMAGED_OTHERS, counts.damaged, counts.kind, counts.more)
        if counts.error:
            yield Problem(Alarm.OTHERS_AWAY, 1, f"{counts.kind}: {counts.error}")


def _of_server(facts: ServerFacts) -> Iterator[Problem]:
    if facts.problem:
        yield Problem(Alarm.SERVER, 1, facts.problem)
        return
    if facts.missing_indexes:
        yield Problem(Alarm.INDEXES, len(facts.missing_indexes), ", ".join(facts.missing_indexes))
    if facts.standalone:
        yield Problem(Alarm.STANDALONE, 1)
    if facts.bells and not facts.new:
        yield Problem(Alarm.POLLING, 1)


def status_as_json(status: Status) -> Json:
    """Return the locks, their server, and the problems."""
    found, server = status.locks, status.server
    rows = {row.key: row.as_json() for row in status.rows}
    return {
        "problems": [problem.as_json() for problem in status.problems],
        "now": found.now.isoformat(),
        "counts": {
            "held": found.held,
            "kept": found.kept,
            "waited_for": found.waited,
            "waiting": found.waiting,
            "stale": found.stale,
            "deadlocks": len(found.deadlocks),
            "more_held": found.capped,
        },
        "longest_wait_seconds": round(found.longest_wait, 3),
        "held": [rows[lock.key] for lock in found.longest_held],
        "waited_for": [rows[lock.key] | {"waiters": _queue(lock)} for lock in found.waited_for],
        "stale": [rows[lock.key] for lock in found.left_behind],
        "contended": [
            {"key": lock.key, "waiting": lock.waiting} | {name: getattr(lock, name) for name in COUNTERS}
            for lock in found.contended
        ],
        "deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found.deadlocks],
        "kinds": [
            asdict(each) | {"longest_held_seconds": round(each.longest_held_seconds, 3), "error": each.error or None}
            for each in (counts_of(found), *status.others)
        ],
        "server": {
            "replica_set": server.set_name or None,
            "members": server.members,
            "primary": server.address or None,
            "version": server.version or None,
            "bells": not server.bells,
            "problem": server.problem or None,
        },
    }


def _queue(lock: LockSnapshot) -> list[Json]:
    return [
        party_as_json(waiter, waiter.since)
        | {"waited_seconds": round(lock.age(waiter.since), 3) if waiter.since else None, "behind": waiter.behind}
        for waiter in lock.waiters
    ]


PERMISSION: Final = "django_mongolock.view_lock_status"


@never_cache
@require_safe
def lock_status(request: HttpRequest) -> HttpResponse:
    """Report the status of the locks to a user with the permission ``django_mongolock.view_lock_status``.

    The user is `request.user`, and need not be a member of staff. The admin has this view at
    ``admin:django_mongolock_lock_status``. You can also route it elsewhere.

    - 200: the status. "problems" lists everything that needs a person.
    - 403: the user lacks the permission.
    - 503: MongoDB does not answer.
    """
    user = getattr(request, "user", None)
    if user is None or not user.has_perm(PERMISSION):
        return JsonResponse({"error": f"this needs the permission {PERMISSION}"}, status=403)
    try:
        return JsonResponse(status_as_json(current_status()))
    except LockBackendFailed as error:
        problems = [Problem(Alarm.SERVER, 1, error.problem).as_json()]
        return JsonResponse({"error": error.problem, "problems": problems}, status=503)
