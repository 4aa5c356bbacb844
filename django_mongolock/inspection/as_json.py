"""Snapshots of locks and of the server as JSON. Moments are in ISO 8601, according to the server's clock."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from .kinds import Counts
from .overview import Overview, Process
from .server_facts import ServerFacts
from .snapshot import COUNTERS, LockSnapshot, Party
from .status import Status

Json = dict[str, Any]

_FACTS = ("label", "place", "user", "owner", "host", "pid", "thread", "mode", "token")


def as_json(lock: LockSnapshot) -> Json:
    """A lock."""
    return {
        "key": lock.key if isinstance(lock.key, str) else str(lock.key),
        "state": lock.state.value,
        "holders": [_party(holder, holder.acquired_at) for holder in lock.holders],
        "holding": lock.holding,
        "permits": lock.permits,
        "waiting": lock.waiting,
        "token": lock.token,
        "ends": _moment(lock.expires_at),
        "left_seconds": None if lock.left is None else round(max(0.0, lock.left), 3),
        "over_seconds": None if lock.left is None else round(max(0.0, -lock.left), 3),
        "damage": lock.damage,
    }


def status_as_json(status: Status) -> Json:
    """The locks, their server, and the problems."""
    problems = [problem_as_json(each.alarm, each.amount, each.about) for each in status.problems]
    documents = [_document_counts(counts) for counts in status.documents]
    return {"problems": problems, **_overview(status.locks), "documents": documents, "server": _server(status.server)}


def problem_as_json(alarm: str, amount: float, about: str) -> Json:
    """A problem."""
    return {"alarm": alarm, "amount": round(amount, 3), "about": about}


def _overview(found: Overview) -> Json:
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
        "held": _locks(found.longest_held),
        "waited_for": [as_json(lock) | {"waiters": _queue(lock)} for lock in found.waited_for],
        "stale": _locks(found.left_behind),
        "contended": [_contended(lock) for lock in found.contended],
        "deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found.deadlocks],
        "processes": [_process(process, found.now) for process in found.processes],
        "more_processes": found.more_processes,
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


def _locks(locks: Iterable[LockSnapshot]) -> list[Json]:
    return [as_json(lock) for lock in locks]


def _queue(lock: LockSnapshot) -> list[Json]:
    return [
        _party(waiter, waiter.since) | {"waited_seconds": _ago(waiter.since, lock.now), "behind": waiter.behind}
        for waiter in lock.queue
    ]


def _contended(lock: LockSnapshot) -> Json:
    return {"key": lock.key, "waiting": lock.waiting} | {name: getattr(lock, name) for name in COUNTERS}


def _document_counts(counts: Counts) -> Json:
    return {
        "lock": counts.lock,
        "held": counts.held,
        "stale": counts.stale,
        "damaged": counts.damaged,
        "longest_held_seconds": _rounded(counts.longest),
        "more": counts.more,
        "error": counts.error or None,
    }


def _process(process: Process, now: datetime) -> Json:
    return {
        "host": process.host,
        "pid": process.pid,
        "holds": process.holds,
        "waits": process.waits,
        "keys": list(process.keys),
        "renewed_at": _moment(process.renewed_at),
        "renewed_seconds_ago": _ago(process.renewed_at, now),
        "silent": process.silent,
    }


def _party(party: Party, since: datetime | None) -> Json:
    facts = {name: value for name in _FACTS if (value := getattr(party, name)) is not None}
    if party.mode == "semaphore":
        facts |= {"capacity": party.capacity, "weight": 1 + party.more_permits}
    moments = {"since": since, "released": party.released}
    return facts | {name: moment.isoformat() for name, moment in moments.items() if moment}


def _moment(value: datetime | None) -> str | None:
    return value.isoformat() if value else None


def _ago(value: datetime | None, now: datetime) -> float | None:
    return None if value is None else _rounded((now - value).total_seconds())


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
