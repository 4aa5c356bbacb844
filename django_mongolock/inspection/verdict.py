"""One verdict for each lock: how it is, and what happens if nobody does anything. All pages and commands say it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from ..context import CLAIMED
from ..exceptions import printable
from .display import ago, duration, time_left
from .snapshot import LockSnapshot, Party, ShownState

#: A holder renews when a third of its lease has passed. It is silent when this part has, and nothing was heard of it.
SILENT_AFTER: Final = 0.4
#: A hold is slow, or hangs, if it exceeds so many times the mean hold, so many times the longest hold, and so many
#: seconds.
SLOW: Final = (2.0, 1.0, 5.0)
HANGS: Final = (10.0, 2.0, 60.0)


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


_TEXTS: Final = {
    "works": _("Renewed %(heard)s. The holder keeps it until its work is done."),
    "works, waited for": _(
        "Renewed %(heard)s. The holder keeps it until its work is done. If that takes too long, ask for a release."
    ),
    "claimed": _("No process renews it. If you do nothing: free in %(left)s, unless it is taken up again."),
    "slow": _(
        "Held for %(mean)s on average, for %(longest)s at most. Renewed %(heard)s: the holder keeps it until its work "
        "is done. If that takes too long, ask for a release."
    ),
    "asked": _(
        "Asked to release it %(asked)s, by %(who)s. Renewed %(heard)s: the holder decides, and keeps it until then."
    ),
    "hangs": _(
        "Held for %(mean)s on average, for %(longest)s at most. Renewed %(heard)s: it may never get free by itself. "
        "Ask for a release, then force it."
    ),
    "hangs, asked": _(
        "Asked to release it %(asked)s, by %(who)s. Renewed %(heard)s: it may never get free by itself. Force "
        "the release."
    ),
    "silent": _(
        "Its holder was last heard of %(heard)s. If you do nothing: free in %(left)s, unless the holder comes back."
    ),
    "silent, waited for": _(
        "Its holder was last heard of %(heard)s. If you do nothing: the first waiter gets it in %(left)s, "
        "unless the holder comes back."
    ),
    "dead": _("Its lease ended %(ended)s, without a release. If you do nothing: the next process that asks gets it."),
    "dead, waited for": _("Its lease ended %(ended)s, without a release. If you do nothing: the first waiter gets it."),
    "kept": _("Its work is done, and the job does not run again before. If you do nothing: free in %(left)s."),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A lock with its verdict; None for a free or a damaged one. heard: when its holder last renewed it, or got it."""

    lock: LockSnapshot
    verdict: Verdict | None
    heard: datetime | None = None

    @property
    def needs_a_look(self) -> bool:
        """Whether somebody waits, or the hold is unusual: then a page offers to force the release."""
        calm = (None, Verdict.WORKS, Verdict.KEPT, Verdict.DEAD)
        return self.verdict not in calm or (self.lock.state is ShownState.HELD and self.lock.waiting > 0)

    @property
    def lives(self) -> bool:
        """Whether its holder's process renews it."""
        return self.verdict in (Verdict.WORKS, Verdict.SLOW, Verdict.ASKED, Verdict.HANGS)

    @property
    def text(self) -> str:
        """The verdict in two or three sentences."""
        if self.verdict is None:
            return ""
        lock, asked = self.lock, _asked(self.lock)
        facts = {
            "left": time_left(lock.expires_at, lock.now),
            "ended": ago(lock.expires_at or lock.now, lock.now),
            "heard": ago(self.heard or lock.now, lock.now),
            "mean": duration(lock.mean_hold or 0.0),
            "longest": duration(lock.longest_hold_ms / 1_000),
            "who": asked and printable(asked.release_requested_by),
            "asked": ago((asked and asked.release_requested_at) or lock.now, lock.now),
        }
        return _TEXTS[self._case] % facts

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "verdict": self.verdict,
            "verdict_text": self.text,
            "renewed_seconds_ago": round(self.lock.age(self.heard), 3) if self.heard else None,
            "mean_hold_seconds": self.lock.mean_hold,
            "longest_hold_seconds": self.lock.longest_hold_ms / 1_000,
        }

    @property
    def _case(self) -> str:
        name, lock = str(self.verdict), self.lock
        if self.verdict is Verdict.HANGS and _asked(lock):
            return f"{name}, asked"
        if self.verdict is Verdict.WORKS and _is_claimed(lock):
            return "claimed"
        return waited if lock.waiting and (waited := f"{name}, waited for") in _TEXTS else name


def judge(lock: LockSnapshot) -> Judged:
    """Judge a lock by what its document says."""
    heard = max((at for each in lock.holders if (at := _heard(each, lock.now))), default=None)
    return Judged(lock, _verdict(lock, heard), heard)


def _heard(holder: Party, now: datetime) -> datetime | None:
    """When the server last heard of this holder. A renewal sets the end a whole lease later; one that came from the
    queue keeps the end of its place there, but its grant was a renewal too."""
    if holder.released:
        return None
    known = [holder.acquired_at] if holder.acquired_at else []
    if holder.until and holder.server_lease is not None:
        with suppress(OverflowError):  # a document may hold any number
            known.append(holder.until - timedelta(milliseconds=holder.server_lease))
    return min(now, max(known, default=now))


def _verdict(lock: LockSnapshot, heard: datetime | None) -> Verdict | None:
    if lock.state is not ShownState.HELD:
        return {ShownState.STALE: Verdict.DEAD, ShownState.KEPT: Verdict.KEPT}.get(lock.state)
    lease = max((each.lease or 0 for each in lock.holders), default=0) / 1_000
    if not _is_claimed(lock) and heard and lock.age(heard) > lease * SILENT_AFTER:
        return Verdict.SILENT
    asked = _asked(lock)
    if asked is not None:
        since = asked.release_requested_at
        return Verdict.HANGS if since and lock.age(since) > lease else Verdict.ASKED
    mean, held = lock.mean_hold, lock.age(lock.since or lock.now)
    for verdict, (of_mean, of_longest, least) in ((Verdict.HANGS, HANGS), (Verdict.SLOW, SLOW)):
        if mean is not None and held > max(of_mean * mean, of_longest * lock.longest_hold_ms / 1_000, least):
            return verdict
    return Verdict.WORKS


def _is_claimed(lock: LockSnapshot) -> bool:
    """No process renews it: somebody keeps it by a token."""
    return any(holder.host == CLAIMED for holder in lock.holders)


def _asked(lock: LockSnapshot) -> Party | None:
    return next((holder for holder in lock.holders if holder.release_requested_by), None)
