"""A lock as it looked at one moment. Model, admin, dashboard, JSON and commands are made from this one shape.

A document may hold anything, written by any program. The readers therefore take a value only where it has the right
type. A damaged document is reported as damaged, and stops nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from ..context import CLAIMED
from ..engine.rule.document import find_damage

Document = dict[str, Any]

#: The number of holds from which their mean is significant.
ENOUGH: Final = 10
#: The part of its lease after which a holder is silent. Holders renew when a third of the lease has passed.
SILENT_AFTER: Final = 0.4
#: A hold is slow, or hangs, if it exceeds all three limits. These are a multiple of the mean hold, a multiple of the
#: longest hold, and a number of seconds.
SLOW: Final = (2.0, 1.0, 5.0)
HANGS: Final = (10.0, 2.0, 60.0)


class ShownState(StrEnum):
    """The state of a lock as shown.

    - held: lease runs.
    - kept: lock was released, but stays locked until its minimum hold is over.
    - stale: lease has ended without a release. The next process that asks gets the lock.
    """

    HELD = "held"
    KEPT = "kept"
    STALE = "stale"
    FREE = "free"
    DAMAGED = "damaged"


class Verdict(StrEnum):
    """The condition of a lock, the worst first.

    - hangs: holder renews in time, but has held the lock far longer than ever before, or for a whole lease after it
      was asked.
    - silent: holder did not renew in time.
    - slow: lock has been held for longer than ever before.
    - asked: somebody asked for the release of the lock.
    - stale: lease is over.
    - works: holder renews in time.
    - kept: lock was released before its minimum hold was over.
    """

    HANGS = "hangs"
    SILENT = "silent"
    SLOW = "slow"
    ASKED = "asked"
    STALE = "stale"
    WORKS = "works"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Party:
    """A holder, a waiter, or the process of an event of the history. Unknown facts are None.

    - grant: id of the grant, for `operations.force_release`. Not shown.
    - session, worker: names of the process and of the thread or task, the same for all its holds and waits. Not
      shown.
    - released: moment of the release, if the lock is only kept.
    - lease, server_lease: milliseconds.
    - release_requested_by, release_requested_at: person who asks for the release, and the moment of the request.
    - behind: number of waiters of the same process behind this one. This waiter stands for them in the queue.
    - more_permits: number of permits beyond one.
    """

    grant: str | None = field(default=None, repr=False)
    session: str | None = field(default=None, repr=False)
    mode: str | None = None
    capacity: int | None = None
    owner: str | None = None
    label: str | None = None
    place: str | None = None
    user: str | None = None
    host: str | None = None
    pid: int | None = None
    thread: str | None = None
    worker: str | None = None
    lease: int | None = None
    server_lease: int | None = None
    token: int | None = None
    since: datetime | None = None
    acquired_at: datetime | None = None
    released: datetime | None = None
    until: datetime | None = None
    release_requested_by: str | None = None
    release_requested_at: datetime | None = None
    behind: int = 0
    more_permits: int = 0


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The lock that a holder of another lock waits for.

    - holder: first holder of that lock. None if it has no holder.
    - waiter: holder that waits, as it stands in the queue.
    """

    key: str
    holder: Party | None
    waiter: Party


@dataclass(frozen=True, slots=True)
class LockSnapshot:
    """One lock as the server saw it at the moment *now*.

    - holders, waiters: first few of them.
    - holding: number of all holders.
    - waiting: number of waiters with an unexpired place in the queue, and of those of their processes behind them.
    - permits: number of permits that the holders take.
    - since: moment when the first of the present holders acquired the lock.
    - latest: holder whose lease ends last.
    - waiting_since: moment since which the first of the waiters has waited.
    - uncounted: number of acquisitions that have no part in held_ms yet.
    - damage: reason why the document cannot be used. None for a sound document.
    - last: previous holder.
    - obstacle: lock that one of the holders waits for, if `queries.with_obstacles` looked for it.
    """

    key: Any
    now: datetime
    state: ShownState
    holders: tuple[Party, ...]
    waiters: tuple[Party, ...]
    holding: int
    uncounted: int
    permits: int
    since: datetime | None
    latest: Party | None
    waiting: int
    waiting_since: datetime | None
    token: int | None
    expires_at: datetime | None
    purge_at: datetime | None
    acquisitions: int
    contended: int
    expired: int
    waited_ms: int
    held_ms: int
    longest_wait_ms: int
    longest_hold_ms: int
    damage: str | None
    last: Party | None
    obstacle: Obstacle | None

    def age(self, moment: datetime) -> float:
        """Return the seconds since *moment*."""
        return (self.now - moment).total_seconds()

    @property
    def left(self) -> float | None:
        """Seconds until the last lease ends, negative after its end. None without a lease."""
        return None if self.expires_at is None else -self.age(self.expires_at)

    @property
    def held_seconds(self) -> float | None:
        """Seconds for which the lock has been held, or was held until its last lease ended. None if it is not held."""
        if self.since is None or self.state in (ShownState.FREE, ShownState.KEPT):
            return None
        end = self.expires_at if self.state is ShownState.STALE and self.expires_at else self.now
        return max(0.0, (end - self.since).total_seconds())

    @property
    def heard(self) -> datetime | None:
        """The moment when a holder last renewed the lock, or acquired it. None without a holder."""
        holders = (*self.holders, *([self.latest] if self.latest else []))
        return max((at for each in holders if (at := _heard(each, self.now))), default=None)

    @property
    def lease(self) -> float:
        """Seconds of the longest lease of the holders."""
        return max((each.lease or 0 for each in self.holders), default=0) / 1_000

    @property
    def asked(self) -> Party | None:
        """A holder that has a request to release the lock."""
        return next((holder for holder in self.holders if holder.release_requested_by), None)

    @property
    def is_claimed(self) -> bool:
        """Whether somebody keeps the lock by a token, while no process renews it."""
        return any(holder.host == CLAIMED for holder in self.holders)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that the document allows. None for a free or a damaged lock."""
        if self.state is not ShownState.HELD:
            return {ShownState.STALE: Verdict.STALE, ShownState.KEPT: Verdict.KEPT}.get(self.state)
        if not self.is_claimed and self.heard and self.age(self.heard) > self.lease * SILENT_AFTER:
            return Verdict.SILENT
        if self.asked is not None:
            since = self.asked.release_requested_at
            return Verdict.HANGS if since and self.age(since) > self.lease else Verdict.ASKED
        mean, longest, held = self.mean_hold, self.longest_hold_ms / 1_000, self.held_seconds or 0.0
        for verdict, (of_mean, of_longest, least) in ((Verdict.HANGS, HANGS), (Verdict.SLOW, SLOW)):
            if mean is not None and held > max(of_mean * mean, of_longest * longest, least):
                return verdict
        return Verdict.WORKS

    @property
    def needs_a_look(self) -> bool:
        """Whether somebody waits, or the hold is unusual. Pages offer a forced release for such a lock."""
        calm = (None, Verdict.WORKS, Verdict.KEPT, Verdict.STALE)
        return self.verdict not in calm or (self.state is ShownState.HELD and self.waiting > 0)

    @property
    def urgency(self) -> tuple[bool, int, bool, float]:
        """The place of the lock in a list, the worst first. Waiters and long holds make it worse."""
        place = list(Verdict).index(self.verdict) if self.verdict else -1
        calm = not (self.needs_a_look or self.damage)
        return calm, place, not self.waiting, -(self.held_seconds or 0.0)

    @property
    def lives(self) -> bool:
        """Whether a process renews the lock, or somebody keeps it by a token."""
        return self.verdict in (Verdict.WORKS, Verdict.SLOW, Verdict.ASKED, Verdict.HANGS)

    @property
    def mean_hold(self) -> float | None:
        """Mean seconds of the holds that have ended. None for fewer than `ENOUGH` of them."""
        ended = self.acquisitions - self.uncounted
        return self.held_ms / ended / 1_000 if ended >= ENOUGH else None

    @property
    def tokens(self) -> list[int]:
        """The fencing tokens of the holders shown. They tell these grants from later ones."""
        return [holder.token for holder in self.holders if holder.token is not None]

    @property
    def longest_wait(self) -> float | None:
        """Seconds that the first in the queue has waited. None without waiters."""
        return None if self.waiting_since is None else self.age(self.waiting_since)


def read_snapshot(document: Document) -> LockSnapshot:
    """Read a document of `queries.snapshots`. This never raises, whatever the document holds."""
    damage, uncounted = _damage(document), document["holding"]
    now, expires_at = document["now"], read_date(document.get("expires_at"))
    if damage is not None:
        state = ShownState.DAMAGED
    elif expires_at is None:
        state = ShownState.FREE
    else:
        live, done = (ShownState.HELD, ShownState.STALE), (ShownState.KEPT, ShownState.FREE)
        state = (done if document["released"] else live)[expires_at <= now]
        if state is ShownState.FREE:  # the next command removes these holders
            last = next(iter(document["holders"]), None)
            gone: Document = {"holders": [], "latest": [], "since": None, "holding": 0, "more_permits": 0}
            document = {**document, **gone, "last_holder": last}
            expires_at = None
    return LockSnapshot(
        key=document["_id"],
        now=now,
        state=state,
        holders=read_parties(document.get("holders")),
        waiters=read_parties(document.get("waiters")),
        holding=document["holding"],
        uncounted=uncounted,
        permits=document["holding"] + document["more_permits"],
        since=read_date(document.get("since")) or _first_grant(document),
        latest=next(iter(read_parties(document.get("latest"))), None),
        waiting=document["queue"]["waiting"],
        waiting_since=read_date(document["queue"].get("since")),
        token=read_number(document.get("token")),
        expires_at=expires_at,
        purge_at=read_date(document.get("purge_at")),
        damage=damage,
        last=next(iter(read_parties([document.get("last_holder")])), None),
        obstacle=None,
        **{name: read_number(document.get(name)) or 0 for name in COUNTERS},
    )


def read_parties(value: object) -> tuple[Party, ...]:
    """Read a list of holders or waiters. Return () for anything else."""
    return tuple(read_party(each) for each in value if isinstance(each, dict)) if isinstance(value, list) else ()


def read_party(entry: Document) -> Party:
    """Read a holder, a waiter, or the facts of an event."""
    return Party(**{name: read(entry.get(name)) for name, read in _READERS.items()})


def read_text(value: object) -> str | None:
    """Return a text, cut to 256 characters. Return None for anything else."""
    return value[:256] if isinstance(value, str) else None


def read_number(value: object) -> int | None:
    """Return a whole number. Return None for anything else."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def read_date(value: object) -> datetime | None:
    """Return a moment. Return None for anything else."""
    return value if isinstance(value, datetime) else None


def with_local_time(moment: datetime) -> datetime:
    """Return the moment, or the same moment of a neighbouring year.

    The first and the last year do not exist whole in every time zone.
    """
    return moment.replace(year=min(max(moment.year, 2), 9998))


def _first_grant(document: Document) -> datetime | None:
    return min((each.acquired_at for each in read_parties(document.get("holders")) if each.acquired_at), default=None)


def _heard(holder: Party, now: datetime) -> datetime | None:
    """Return the moment when the server last heard of this holder.

    A renewal sets the end of the lease a whole lease later. A holder that came from the queue keeps the end of its
    place there. Its grant also counts as a renewal.
    """
    if holder.released:
        return None
    known = [holder.acquired_at] if holder.acquired_at else []
    if holder.until and holder.server_lease is not None:
        with suppress(OverflowError):  # a document may hold any number
            known.append(holder.until - timedelta(milliseconds=holder.server_lease))
    return min(now, max(known, default=now))


def _count(value: object) -> int:
    return max(0, read_number(value) or 0)


COUNTERS: Final = ("acquisitions", "contended", "expired", "waited_ms", "held_ms", "longest_wait_ms", "longest_hold_ms")
_OF_TYPE: Final[dict[str, Callable[[object], Any]]] = {
    "str | None": read_text,
    "int | None": read_number,
    "datetime | None": read_date,
    "int": _count,
}
#: The reader of each field of a `Party`, by the declared type.
_READERS: Final = {field.name: _OF_TYPE[str(field.type)] for field in fields(Party)}
#: The fields that are moments.
MOMENTS: Final = [name for name, read in _READERS.items() if read is read_date]


def _damage(document: Document) -> str | None:
    if (size := document.get("giant")) is not None:
        return f"its names and entries are too large to be read ({size:,} bytes)"
    if type(document["_id"]) is not str:
        return f"its key is {type(document['_id']).__name__}, not str"
    if not document["whole"]:
        return find_damage(document) or "an entry further down in its holders or waiters is damaged"
    end = document.get("expires_at")
    return None if end is None or read_date(end) else f"its field 'expires_at' is {type(end).__name__}, not datetime"
