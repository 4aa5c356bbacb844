"""The picture of the last minutes: a lane for each lock, with who held it and how long somebody waited.

What is drawn is what the lock documents tell: those who hold it and who wait for it now, and who held it before.
`stretches` is the place for more: whatever else knows of grants (a history) only has to add its own to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..inspect import display
from ..inspect.overview import living, longest_wait
from ..inspect.overview_pipelines import LATELY
from ..inspect.snapshot import Entry, Seen, State

#: Nothing is drawn narrower than this, in percent.
_NARROWEST: Final = 0.4
#: How many lanes there are at most.
MAX_LANES: Final = 8
#: How far back the picture may go: as far as it has to, to show how long those of now have held and waited.
SPANS: Final = (timedelta(minutes=1), timedelta(minutes=2), LATELY)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What went on from one moment to another. kind: "hold", "stale", "wait"; or "grant", which has no length."""

    kind: str
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Mark:
    """A stretch as it is drawn: where it starts and how wide it is, in percent of the picture."""

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
    """The lanes, over how long a time, and what is written below them: where, and what."""

    lanes: list[Lane]
    span: timedelta
    ticks: list[tuple[str, str]]

    @property
    def minutes(self) -> int:
        return self.span // timedelta(minutes=1)


def draw(candidates: Iterable[Seen], now: datetime) -> Picture:
    """The picture of those of these locks that were waited for, and held, for longest."""
    told = [(seen, list(stretches(seen))) for seen in candidates]
    recent = [(seen, found) for seen, found in told if any(stretch.end >= now - LATELY for stretch in found)]
    chosen = sorted(recent, key=lambda each: _weight(each[1], now), reverse=True)[:MAX_LANES]
    span = _span([stretch for seen, found in chosen if seen.state is not State.STALE for stretch in found], now)
    drawn = (lane(seen, now, span) for seen, _ in chosen)
    return Picture([lane for lane in drawn if lane.marks], span, _ticks(span))


def _weight(found: list[Stretch], now: datetime) -> tuple[timedelta, timedelta, datetime]:
    """How long somebody waited, how long somebody held it, when it was granted: of the time that can be drawn."""
    lengths = dict.fromkeys(("wait", "hold", "stale", "grant"), timedelta())
    for stretch in found:
        lengths[stretch.kind] += max(stretch.end - max(stretch.start, now - LATELY), timedelta())
    return lengths["wait"], lengths["hold"] + lengths["stale"], max(stretch.start for stretch in found)


def _span(found: list[Stretch], now: datetime) -> timedelta:
    """As far back as what still goes on, or else what is over, began lately; not further."""
    begins = [stretch.start for stretch in found if stretch.end >= now]
    begins = begins or [stretch.start for stretch in found if stretch.end >= now - LATELY]
    since = min(begins, default=now - LATELY)
    return next((span for span in SPANS if since >= now - span), LATELY)


def lane(seen: Seen, now: datetime, span: timedelta = LATELY) -> Lane:
    """The last minutes of one lock."""
    drawn = (_mark(stretch, now, span) for stretch in stretches(seen))
    return Lane(seen.key, tuple(mark for mark in drawn if mark is not None), _text(seen))


def stretches(seen: Seen) -> Iterator[Stretch]:
    """What the document tells, in the order in which it is drawn."""
    if asked := [waiter.since for waiter in living(seen) if waiter.since]:
        yield Stretch("wait", min(asked), seen.now)
    if seen.last is not None:
        yield from _past(seen.last, seen.since, seen)
    for holder in seen.holders:
        if holder.acquired_at:
            yield from _grant(holder)
            over = seen.state is State.STALE and seen.expires_at
            yield Stretch("stale" if over else "hold", holder.acquired_at, over or seen.now)


def _ticks(span: timedelta) -> list[tuple[str, str]]:
    """Three or four moments."""
    parts = 5 if span == LATELY else 4
    return [
        (f"{100 * part / parts:.1f}%", f"−{display.duration((span * (parts - part) / parts).total_seconds())}")
        for part in range(1, parts)
    ]


def _past(last: Entry, next_begin: datetime | None, seen: Seen) -> Iterator[Stretch]:
    """Who held it before. When that ended is told only by a grant that somebody had waited for."""
    if last.acquired_at is None:
        return
    yield from _grant(last)
    waited = any(holder.acquired_at == next_begin != holder.since for holder in seen.holders)
    if next_begin is not None and waited and last.acquired_at < next_begin:
        yield Stretch("hold", last.acquired_at, next_begin)


def _grant(entry: Entry) -> Iterator[Stretch]:
    if entry.acquired_at and entry.since and entry.since < entry.acquired_at:
        yield Stretch("wait", entry.since, entry.acquired_at)
    if entry.acquired_at:
        yield Stretch("grant", entry.acquired_at, entry.acquired_at)


def _mark(stretch: Stretch, now: datetime, span: timedelta) -> Mark | None:
    begin = now - span
    if stretch.end < begin:
        return None
    left = max(0.0, (stretch.start - begin) / span * 100)
    width = max(_NARROWEST, min(100.0, (stretch.end - begin) / span * 100) - left)
    return Mark(stretch.kind, f"{min(left, 100 - _NARROWEST):.2f}%", f"{width:.2f}%")


def _text(seen: Seen) -> str:
    said = []
    if seen.state is State.STALE:
        said.append(_("stale"))
    elif seen.since is not None:
        said.append(_("held for %s") % display.duration((seen.now - seen.since).total_seconds()))
    elif seen.last is not None and seen.last.acquired_at:
        said.append(_("free; last granted %s") % display.ago(seen.last.acquired_at, seen.now))
    if (waited := longest_wait(seen)) is not None:
        text = ngettext("%(count)d waits, for %(time)s", "%(count)d wait, the first for %(time)s", seen.waiting)
        said.append(text % {"count": seen.waiting, "time": display.duration(waited)})
    return ", ".join(said)
