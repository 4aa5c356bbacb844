"""The picture of the last minutes: a lane for each lock, with its holds, its waits and its grants.

It is drawn from the lock documents, which have the present holders and waiters, and the previous holder; and from what
an app knows of the past.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..inspection import display
from ..inspection.overview import RECENT
from ..inspection.snapshot import LockSnapshot, Party, ShownState
from ..inspection.verdict import NOTHING, Stretch, Told

#: Nothing is drawn narrower than this, in percent.
_NARROWEST: Final = 0.4
#: How many lanes there are at most.
MAX_LANES: Final = 8
#: The spans that the picture may cover: the shortest one that shows how long the present holds and waits have lasted.
SPANS: Final = (timedelta(minutes=1), timedelta(minutes=2), RECENT)


@dataclass(frozen=True, slots=True)
class Mark:
    """A stretch as it is drawn: its start and its width, in percent of the picture."""

    kind: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A lock in the picture. text: the same in words."""

    key: str
    marks: tuple[Mark, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The lanes, the time that they cover, and the labels below them: position and text."""

    lanes: list[Lane]
    span: timedelta
    ticks: list[tuple[str, str]]

    @property
    def minutes(self) -> int:
        return self.span // timedelta(minutes=1)


def draw(candidates: Iterable[LockSnapshot], now: datetime, told: Told = NOTHING) -> Picture:
    """Draw those of these locks that had the longest waits, and then the longest holds."""
    known = [(lock, list(stretches(lock, told.stretches.get(lock.key)))) for lock in candidates]
    recent = [(lock, found) for lock, found in known if any(each.end >= now - RECENT for each in _told(found))]
    chosen = sorted(recent, key=lambda each: _weight(each[1], now), reverse=True)[:MAX_LANES]
    span = _span([each for lock, found in chosen if lock.state is not ShownState.STALE for each in _told(found)], now)
    drawn = (
        lane(lock.key, _text(lock), with_unknown(found, told.since, now - span), now, span) for lock, found in chosen
    )
    return Picture([each for each in drawn if each.marks], span, ticks(span))


def _told(found: Iterable[Stretch]) -> list[Stretch]:
    return [stretch for stretch in found if stretch.kind != "unknown"]


def _weight(found: list[Stretch], now: datetime) -> tuple[timedelta, timedelta, datetime]:
    """How long it was waited for and held, of the time that can be drawn; and when it was granted."""
    lengths = dict.fromkeys(("wait", "hold", "stale", "lost", "grant", "unknown"), timedelta())
    for stretch in found:
        lengths[stretch.kind] += max(stretch.end - max(stretch.start, now - RECENT), timedelta())
    return (
        lengths["wait"],
        lengths["hold"] + lengths["stale"] + lengths["lost"],
        max(stretch.start for stretch in found),
    )


def _span(found: list[Stretch], now: datetime) -> timedelta:
    """The shortest span that shows what still lasts from its start, or else what has ended."""
    begins = [stretch.start for stretch in found if stretch.end >= now]
    begins = begins or [stretch.start for stretch in found if stretch.end >= now - RECENT]
    since = min(begins, default=now - RECENT)
    return next((span for span in SPANS if since >= now - span), RECENT)


def lane(key: str, text: str, found: Iterable[Stretch], now: datetime, span: timedelta) -> Lane:
    drawn = (_mark(stretch, now, span) for stretch in found)
    return Lane(key, tuple(mark for mark in drawn if mark is not None), text)


def with_unknown(found: list[Stretch], since: datetime | None, begin: datetime) -> list[Stretch]:
    """These, and the time of which nothing is known. since: from when on all is known."""
    known = min([stretch.start for stretch in found] + ([since] if since else []))
    return [Stretch("unknown", begin, known), *found] if known > begin else found


def stretches(lock: LockSnapshot, earlier: Sequence[Stretch] | None = None) -> Iterator[Stretch]:
    """What is known of a lock, in the order in which it is drawn. earlier: what an app knows of its past."""
    if since := [waiter.since for waiter in lock.queue if waiter.since]:
        yield Stretch("wait", min(since), lock.now)
    if earlier is not None:
        yield from earlier
    elif lock.last is not None:
        yield from _past(lock.last, lock)
    for holder in lock.holders:
        if holder.acquired_at:
            yield from _grant(holder)
            ended = lock.state is ShownState.STALE and lock.expires_at
            yield Stretch("stale" if ended else "hold", holder.acquired_at, holder.released or ended or lock.now)


def _past(last: Party, lock: LockSnapshot) -> Iterator[Stretch]:
    """The previous holder. Its hold has a known end only if the next holder had waited for it."""
    end = lock.since
    if last.acquired_at is None or last.acquired_at > (end or lock.now):
        return
    waited = end and any(holder.acquired_at == end != holder.since for holder in lock.holders)
    yield Stretch("hold" if waited else "unknown", last.acquired_at, end or lock.now)
    yield from _grant(last)


def _grant(party: Party) -> Iterator[Stretch]:
    if party.acquired_at and party.since and party.since < party.acquired_at:
        yield Stretch("wait", party.since, party.acquired_at)
    if party.acquired_at:
        yield Stretch("grant", party.acquired_at, party.acquired_at)


def _mark(stretch: Stretch, now: datetime, span: timedelta) -> Mark | None:
    begin = now - span
    if stretch.end < begin:
        return None
    left = max(0.0, (stretch.start - begin) / span * 100)
    width = max(_NARROWEST, min(100.0, (stretch.end - begin) / span * 100) - left)
    return Mark(stretch.kind, f"{min(left, 100 - _NARROWEST):.2f}%", f"{width:.2f}%")


def ticks(span: timedelta) -> list[tuple[str, str]]:
    """The positions and texts of three or four moments."""
    parts, seconds = 5 if span == RECENT else 4, span.total_seconds()
    return [
        (f"{100 * part / parts:.1f}%", f"−{display.duration(seconds * (parts - part) / parts).removesuffix(' 0 s')}")
        for part in range(1, parts)
    ]


def _text(lock: LockSnapshot) -> str:
    said = []
    if lock.state is ShownState.STALE:
        said.append(_("stale"))
    elif lock.state is ShownState.KEPT:
        said.append(_("kept"))
    elif lock.since is not None:
        said.append(_("held for %s") % display.duration((lock.now - lock.since).total_seconds()))
    elif lock.last is not None and lock.last.acquired_at:
        said.append(_("free; last granted %s") % display.ago(lock.last.acquired_at, lock.now))
    if lock.longest_wait is not None:
        text = ngettext("%(count)d waiter for %(time)s", "%(count)d waiters, the first for %(time)s", lock.waiting)
        said.append(text % {"count": lock.waiting, "time": display.duration(lock.longest_wait)})
    return ", ".join(said)
