"""The locks and their server as JSON. Moments are in ISO 8601, according to the server's clock."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from .kinds import Counts
from .named_locks import counts_of, party_as_json, row_of
from .overview import Overview
from .server_facts import ServerFacts
from .snapshot import COUNTERS, LockSnapshot
from .status import Status
from .verdict import Judged

Json = dict[str, Any]


def status_as_json(status: Status) -> Json:
    """The locks, their server, and the problems."""
    problems = [problem_as_json(each.alarm, each.amount, each.about) for each in status.problems]
    kinds = [_counts(counts) for counts in (counts_of(status.locks), *status.documents)]
    return {
        "problems": problems,
        **_overview(status.locks, status.judged),
        "kinds": kinds,
        "server": _server(status.server),
    }


def problem_as_json(alarm: str, amount: float, about: str) -> Json:
    """A problem."""
    return {"alarm": alarm, "amount": round(amount, 3), "about": about}


def _overview(found: Overview, judged: Iterable[Judged]) -> Json:
    rows = {each.lock.key: row_of(each.lock, each).as_json() for each in judged}
    return {
        "now": found.now.isoformat(),
        "counts": {
            "held": found.held,
            "kept": found.kept,
            "waited_for": found.waited,
            "waiting": found.waiting,
            "stale": found.stale,
            "deadlocks": len(found.deadlocks),
            "more_held": found.capped,
            "looked_at": found.looked_at,
        },
        "longest_wait_seconds": round(found.longest_wait, 3),
        "held": [rows[lock.key] for lock in found.longest_held],
        "waited_for": [rows[lock.key] | {"waiters": _queue(lock)} for lock in found.waited_for],
        "stale": [rows[lock.key] for lock in found.left_behind],
        "contended": [_contended(lock) for lock in found.contended],
        "deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found.deadlocks],
    }


def _server(found: ServerFacts) -> Json:
    return {
        "replica_set": found.set_name or None,
        "members": found.members,
        "primary": found.address or None,
        "version": found.version or None,
        "bells": not found.bells,
        "problem": found.problem or None,
    }


def _queue(lock: LockSnapshot) -> list[Json]:
    return [
        party_as_json(waiter, waiter.since) | {"waited_seconds": _ago(waiter.since, lock.now), "behind": waiter.behind}
        for waiter in lock.queue
    ]


def _contended(lock: LockSnapshot) -> Json:
    return {"key": lock.key, "waiting": lock.waiting} | {name: getattr(lock, name) for name in COUNTERS}


def _counts(counts: Counts) -> Json:
    return {
        "kind": counts.lock,
        "held": counts.held,
        "stale": counts.stale,
        "damaged": counts.damaged,
        "longest_held_seconds": _rounded(counts.longest),
        "more": counts.more,
        "error": counts.error or None,
    }


def _ago(value: datetime | None, now: datetime) -> float | None:
    return None if value is None else _rounded((now - value).total_seconds())


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
