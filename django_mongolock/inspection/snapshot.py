"""A lock as it looked at one moment: the one shape from which model, admin, dashboard, JSON and commands are made.

A document may hold anything, written by any program. So every value is taken only where it has the right type: a
damaged document is reported as damaged, and stops nothing else.
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

#: From so many holds on, their mean says something.
ENOUGH: Final = 10
#: A holder renews when a third of its lease has passed. It is silent when this part has, and nothing was heard of it.
SILENT_AFTER: Final = 0.4
#: A hold is slow, or hangs, if it exceeds so many times the mean hold, so many times the longest hold, and so many
#: seconds.
SLOW: Final = (2.0, 1.0, 5.0)
HANGS: Final = (10.0, 2.0, 60.0)


class ShownState(StrEnum):
    """held: a lease runs. kept: released, but not free before its minimum hold is over. stale: the lease has ended
    without a release; the next process that asks gets the lock."""

    HELD = "held"
    KEPT = "kept"
    STALE = "stale"
    FREE = "free"
    DAMAGED = "damaged"


class Verdict(StrEnum):
    """works: renewed in time. slow: held for longer than ever before. asked: somebody asked for its release. hangs:
    renewed in time, but held far longer than ever before, or still held a whole lease after it was asked. silent: not
    renewed in time. dead: its lease is over. kept: released before its minimum hold was over."""

    WORKS = "works"
    SLOW = "slow"
    ASKED = "asked"
    HANGS = "hangs"
    SILENT = "silent"
    DEAD = "dead"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Party:
    """A holder or a waiter, or the process that an event of the history is about; None for what is not known.

    grant: its id, for `operations.force_release`. session, worker: names for its process, and for its thread or task,
    the same wherever that holds or waits. These three are not shown. released: when, if the lock is only kept. lease,
    server_lease: milliseconds. release_requested_by, release_requested_at: who asks for its release, since when.
    behind: how many more of its process wait behind this waiter, which stands for them in the queue. more_permits: how
    many it takes beyond one.
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
class LockSnapshot:
    """One lock as the server saw it at the moment *now*.

    holders and waiters are the first few; holding and waiting count all of them: of the waiters those whose place in
    the queue has not expired, with those of their processes behind them. permits: as how many the holders count.
    since: when the first of the present holders acquired the lock. latest: the holder whose lease ends last.
    waiting_since: since when the first of the waiters has waited. uncounted: how many acquisitions have no part in
    held_ms yet. damage: why the document cannot be used, None if it can. last: the previous holder.
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
    last: Party | None = None

    def age(self, moment: datetime) -> float:
        """Return how many seconds ago *moment* was."""
        return (self.now - moment).total_seconds()

    @property
    def left(self) -> float | None:
        """Seconds until the last lease ends, negative after its end; None without a lease."""
        return None if self.expires_at is None else -self.age(self.expires_at)

    @property
    def held_seconds(self) -> float | None:
        """For how many seconds the lock has been held, or was held until its last lease ended; None if it is not."""
        if self.since is None or self.state in (ShownState.FREE, ShownState.KEPT):
            return None
        end = self.expires_at if self.state is ShownState.STALE and self.expires_at else self.now
        return max(0.0, (end - self.since).total_seconds())

    @property
    def heard(self) -> datetime | None:
        """When a holder last renewed the lock, or got it; None without a holder."""
        holders = (*self.holders, *([self.latest] if self.latest else []))
        return max((at for each in holders if (at := _heard(each, self.now))), default=None)

    @property
    def asked(self) -> Party | None:
        """A holder that somebody asked to release the lock."""
        return next((holder for holder in self.holders if holder.release_requested_by), None)

    @property
    def is_claimed(self) -> bool:
        """Whether no process renews it, and somebody keeps it by a token."""
        return any(holder.host == CLAIMED for holder in self.holders)

    @property
    def verdict(self) -> Verdict | None:
        """How the lock is, as far as its document tells; None for a free or a damaged one."""
        if self.state is not ShownState.HELD:
            return {ShownState.STALE: Verdict.DEAD, ShownState.KEPT: Verdict.KEPT}.get(self.state)
        lease = max((each.lease or 0 for each in self.holders), default=0) / 1_000
        if not self.is_claimed and self.heard and self.age(self.heard) > lease * SILENT_AFTER:
            return Verdict.SILENT
        if self.asked is not None:
            since = self.asked.release_requested_at
            return Verdict.HANGS if since and self.age(since) > lease else Verdict.ASKED
        mean, longest, held = self.mean_hold, self.longest_hold_ms / 1_000, self.held_seconds or 0.0
        for verdict, (of_mean, of_longest, least) in ((Verdict.HANGS, HANGS), (Verdict.SLOW, SLOW)):
            if mean is not None and held > max(of_mean * mean, of_longest * longest, least):
                return verdict
        return Verdict.WORKS

    @property
    def needs_a_look(self) -> bool:
        """Whether somebody waits, or the hold is unusual. Pages then offer to force the release."""
        calm = (None, Verdict.WORKS, Verdict.KEPT, Verdict.DEAD)
        return self.verdict not in calm or (self.state is ShownState.HELD and self.waiting > 0)

    @property
    def lives(self) -> bool:
        """Whether a process renews the lock, or somebody keeps it by a token."""
        return self.verdict in (Verdict.WORKS, Verdict.SLOW, Verdict.ASKED, Verdict.HANGS)

    @property
    def mean_hold(self) -> float | None:
        """Mean seconds of the holds that have ended; None for fewer than `ENOUGH` of them."""
        ended = self.acquisitions - self.uncounted
        return self.held_ms / ended / 1_000 if ended >= ENOUGH else None

    @property
    def tokens(self) -> list[int]:
        """The fencing tokens of the holders shown: they tell these grants from later ones."""
        return [holder.token for holder in self.holders if holder.token is not None]

    @property
    def longest_wait(self) -> float | None:
        """Seconds that the first in the queue has waited; None without waiters."""
        return None if self.waiting_since is None else self.age(self.waiting_since)


def read_snapshot(document: Document) -> LockSnapshot:
    """Read a document of `queries.snapshots`. Never raises, whatever the document holds."""
    damage, uncounted = _damage(document), document["holding"]
    now, expires_at = document["now"], read_date(document.get("expires_at"))
    if damage is not None:
        state = ShownState.DAMAGED
    elif expires_at is None:
        state = ShownState.FREE
    else:
        live, done = (ShownState.HELD, ShownState.STALE), (ShownState.KEPT, ShownState.FREE)
        state = (done if document["released"] else live)[expires_at <= now]
        if state is ShownState.FREE:  # the next command removes these
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
        **{name: read_number(document.get(name)) or 0 for name in COUNTERS},
    )


def read_parties(value: object) -> tuple[Party, ...]:
    """Read a list of holders or waiters; () for anything else."""
    return tuple(read_party(each) for each in value if isinstance(each, dict)) if isinstance(value, list) else ()


def read_party(entry: Document) -> Party:
    """Read a holder, a waiter, or the facts of an event."""
    return Party(**{name: read(entry.get(name)) for name, read in _READERS.items()})


def read_text(value: object) -> str | None:
    """A text, cut to 256 characters."""
    return value[:256] if isinstance(value, str) else None


def read_number(value: object) -> int | None:
    """A whole number."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def read_date(value: object) -> datetime | None:
    """A moment."""
    return value if isinstance(value, datetime) else None


def with_local_time(moment: datetime) -> datetime:
    """The moment; of the first year and the last one, which do not begin and end everywhere, that of another year."""
    return moment.replace(year=min(max(moment.year, 2), 9998))


def _first_grant(document: Document) -> datetime | None:
    return min((each.acquired_at for each in read_parties(document.get("holders")) if each.acquired_at), default=None)


def _heard(holder: Party, now: datetime) -> datetime | None:
    """Return when the server last heard of this holder.

    A renewal sets the end of the lease a whole lease later. A holder that came from the queue keeps the end of its
    place there, but its grant was a renewal too.
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
#: For each field of a `Party` what reads it, by the type that it is declared with.
_READERS: Final = {field.name: _OF_TYPE[str(field.type)] for field in fields(Party)}
#: Those that are moments.
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
