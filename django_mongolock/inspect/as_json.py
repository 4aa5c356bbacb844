"""What was seen of the locks, for programs that show it. Moments in ISO 8601, by the server's clock, and so are the
lengths between them: nobody holds a lock, or waits, by what is told here."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from .overview import Overview, Process, living
from .servers import Servers
from .snapshot import Entry, Seen

Json = dict[str, Any]


def as_json(seen: Seen) -> Json:
    """A lock."""
    return {
        "key": seen.key if isinstance(seen.key, str) else str(seen.key),
        "state": seen.state.value,
        "holders": [_entry(holder, holder.acquired_at) for holder in seen.holders],
        "holding": seen.holding,
        "waiting": seen.waiting,
        "token": seen.token,
        "ends": _moment(seen.expires_at),
        "left_seconds": None if seen.left is None else round(max(0.0, seen.left), 3),
        "over_seconds": None if seen.left is None else round(max(0.0, -seen.left), 3),
        "damage": seen.damage,
    }


def overview_as_json(found: Overview) -> Json:
    """All that the dashboard shows of the locks."""
    return {
        "now": found.now.isoformat(),
        "counts": {
            "held": found.held,
            "waited_for": found.waited,
            "waiting": found.waiting,
            "stale": found.stale,
            "deadlocks": len(found.deadlocks),
            "more_held": found.capped,
            "looked_at": found.looked_at,
        },
        "longest_wait_seconds": round(found.longest_wait, 3),
        "held": [as_json(seen) for seen in found.longest_held],
        "waited_for": [_queue(seen) for seen in found.waited_for],
        "stale": [as_json(seen) for seen in found.left_behind],
        "contended": [_counters(seen) for seen in found.contended],
        "deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found.deadlocks],
        "processes": [_process(process, found.now) for process in found.processes],
        "more_processes": found.more_processes,
    }


def servers_as_json(found: Servers) -> Json:
    """What is known of the servers."""
    return {
        "replica_set": found.name or None,
        "primary": found.primary or None,
        "change_stream": found.watching,
        "clocks_apart_seconds": None if found.apart is None else round(found.apart, 3),
        "problem": found.facts.problem or None,
        "known_for_seconds": found.age,
        "members": [
            {
                "address": member.address,
                "role": member.role,
                "clock_ahead_seconds": None if member.ahead is None else round(member.ahead, 3),
            }
            for member in found.members
        ],
    }


def _queue(seen: Seen) -> Json:
    waiters = [
        _entry(waiter, waiter.since) | {"waited_seconds": _since(waiter.since, seen.now), "behind": waiter.behind}
        for waiter in living(seen)
    ]
    return as_json(seen) | {"waiters": waiters}


def _counters(seen: Seen) -> Json:
    names = ("acquisitions", "contended", "expired", "waited_ms", "held_ms", "longest_wait_ms", "longest_hold_ms")
    return {"key": seen.key, "waiting": seen.waiting} | {name: getattr(seen, name) for name in names}


def _process(process: Process, now: datetime) -> Json:
    return {
        "host": process.host,
        "pid": process.pid,
        "holds": process.holds,
        "waits": process.waits,
        "keys": list(process.keys),
        "beat": _moment(process.beat),
        "beat_seconds_ago": _since(process.beat, now),
        "silent": process.silent,
    }


def _entry(entry: Entry, since: datetime | None) -> Json:
    names = ("label", "place", "user", "owner", "host", "pid", "thread", "mode", "token")
    facts = {name: value for name in names if (value := getattr(entry, name)) is not None}
    return facts | ({"since": since.isoformat()} if since else {})


def _moment(value: datetime | None) -> str | None:
    return value.isoformat() if value else None


def _since(value: datetime | None, now: datetime) -> float | None:
    return None if value is None else round((now - value).total_seconds(), 3)
