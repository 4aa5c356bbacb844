"""The picture of the last minutes: a lane for each lock, with its holds, its waits and its grants.

It is drawn from the lock documents, which have the present holders and waiters, and the previous holder; and from the
history, where one is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..backends.base import mongo_store
from ..conf import get_settings
from ..exceptions import LockBackendFailed
from ..inspection import display
from ..inspection.happened import Happened
from ..inspection.overview_pipelines import RECENT
from ..inspection.snapshot import LockSnapshot, Party, State
from ..models import LockEvent

#: Nothing is drawn narrower than this, in percent.
_NARROWEST: Final = 0.4
#: How many lanes there are at most.
MAX_LANES: Final = 8
#: The spans that the picture may cover: the shortest one that shows how long the present holds and waits have lasted.
SPANS: Final = (timedelta(minutes=1), timedelta(minutes=2), RECENT)
#: What the picture on the page of a lock covers, and of how many events at most.
HOUR: Final = timedelta(hours=1)
MAX_EVENTS: Final = 200
#: Nothing is drawn longer than this, whatever an event says.
_LONGEST: Final = timedelta(days=1)
#: The events that end a hold, and how that is drawn.
_ENDS: Final = {Happened.RELEASED.value: "hold", Happened.LOST.value: "lost"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """An activity from one moment to another. kind: "hold", "stale", "lost", "wait", "unknown"; or "grant", without a
    length."""

    kind: str
    start: datetime
    end: datetime


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


@dataclass(frozen=True, slots=True)
class History:
    """Events by key, the latest first, and since when they are complete: None where there are none. problem: why they
    cannot be read; empty otherwise."""

    events: Mapping[str, Sequence[LockEvent]] = field(default_factory=dict)
    since: datetime | None = None
    problem: str = ""


def draw(candidates: Iterable[LockSnapshot], now: datetime, history: History = History()) -> Picture:
    """Draw those of these locks that had the longest waits, and then the longest holds."""
    known = [(lock, list(stretches(lock, history.events.get(lock.key, ())))) for lock in candidates]
    recent = [(lock, found) for lock, found in known if any(each.end >= now - RECENT for each in _told(found))]
    chosen = sorted(recent, key=lambda each: _weight(each[1], now), reverse=True)[:MAX_LANES]
    span = _span([each for lock, found in chosen if lock.state is not State.STALE for each in _told(found)], now)
    drawn = (
        _lane(lock.key, _text(lock), _with_unknown(found, history, now - span), now, span) for lock, found in chosen
    )
    return Picture([lane for lane in drawn if lane.marks], span, _ticks(span))


def draw_hour(lock: LockSnapshot, history: History) -> Picture | None:
    """Draw the last hour of one lock from its history; None if nothing happened in it."""
    late = [event for event in history.events.get(lock.key, ()) if (at := _at(event)) and at >= lock.now - HOUR]
    if not late:
        return None
    found = _with_unknown(list(stretches(lock, late)), history, lock.now - HOUR)
    lane = _lane(lock.key, _sum(late), found, lock.now, HOUR)
    return Picture([lane], HOUR, _ticks(HOUR))


def read_history(keys: Sequence[str]) -> History:
    """The latest events of these locks; none where no history is kept."""
    settings = get_settings()
    if mongo_store().history is None or not keys:
        return History()
    events = LockEvent.objects.using(settings.DATABASE)
    try:
        read = events.filter(key__in=keys).recent(MAX_EVENTS, timeout=settings.COMMAND_TIMEOUT)
        first = read[-1:] if len(read) == MAX_EVENTS else events.order_by("at", "id").recent(1)
    except LockBackendFailed as error:  # such as a right that is missing: the locks themselves were read
        return History(problem=error.problem)
    found: dict[str, list[LockEvent]] = {}
    for event in read:
        found.setdefault(event.key, []).append(event)
    return History(found, next(map(_at, first), None))


def deadlocks(history: History, now: datetime) -> list[LockEvent]:
    """Who gave up of late, since it was in a deadlock."""
    events = (event for found in history.events.values() for event in found if event.event == Happened.DEADLOCK)
    return [event for event in events if (at := _at(event)) and at >= now - RECENT]


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


def _lane(key: str, text: str, found: Iterable[Stretch], now: datetime, span: timedelta) -> Lane:
    drawn = (_mark(stretch, now, span) for stretch in found)
    return Lane(key, tuple(mark for mark in drawn if mark is not None), text)


def _with_unknown(found: list[Stretch], history: History, begin: datetime) -> list[Stretch]:
    """These, and the time of which neither they nor the history tell anything."""
    known = min([stretch.start for stretch in found] + ([history.since] if history.since else []))
    return [Stretch("unknown", begin, known), *found] if known > begin else found


def stretches(lock: LockSnapshot, events: Sequence[LockEvent] = ()) -> Iterator[Stretch]:
    """What is known of a lock, in the order in which it is drawn. events: those of its history."""
    if since := [waiter.since for waiter in lock.queue if waiter.since]:
        yield Stretch("wait", min(since), lock.now)
    if events:
        yield from _past_holds(events, {holder.token for holder in lock.holders})
    elif lock.last is not None:
        yield from _past(lock.last, lock)
    for holder in lock.holders:
        if holder.acquired_at:
            yield from _grant(holder)
            ended = lock.state is State.STALE and lock.expires_at
            yield Stretch("stale" if ended else "hold", holder.acquired_at, holder.released or ended or lock.now)


def _past(last: Party, lock: LockSnapshot) -> Iterator[Stretch]:
    """The previous holder. Its hold has a known end only if the next holder had waited for it."""
    end = lock.since
    if last.acquired_at is None or last.acquired_at > (end or lock.now):
        return
    waited = end and any(holder.acquired_at == end != holder.since for holder in lock.holders)
    yield Stretch("hold" if waited else "unknown", last.acquired_at, end or lock.now)
    yield from _grant(last)


def _past_holds(events: Sequence[LockEvent], present: set[int | None]) -> Iterator[Stretch]:
    """What the history says: an event has the length of what it ends. The *present* holders are drawn by themselves."""
    for event in events:
        if (at := _at(event)) is None:
            continue
        if event.event == Happened.GRANTED and event.token not in present:
            if event.waited_ms:
                yield Stretch("wait", _before(at, event.waited_ms), at)
            yield Stretch("grant", at, at)
        elif (kind := _ENDS.get(event.event)) and event.held_ms is not None:
            yield Stretch(kind, _before(at, event.held_ms), at)


def _at(event: LockEvent) -> datetime | None:
    """When it happened, also in a project without time zones."""
    return timezone.make_aware(event.at) if event.at is not None and timezone.is_naive(event.at) else event.at


def _before(moment: datetime, milliseconds: float) -> datetime:
    return moment - min(_LONGEST, timedelta(milliseconds=max(0.0, min(milliseconds, 1e9))))


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


def _ticks(span: timedelta) -> list[tuple[str, str]]:
    """The positions and texts of three or four moments."""
    parts, seconds = 5 if span == RECENT else 4, span.total_seconds()
    return [
        (f"{100 * part / parts:.1f}%", f"−{display.duration(seconds * (parts - part) / parts).removesuffix(' 0 s')}")
        for part in range(1, parts)
    ]


def _text(lock: LockSnapshot) -> str:
    said = []
    if lock.state is State.STALE:
        said.append(_("stale"))
    elif lock.state is State.KEPT:
        said.append(_("kept"))
    elif lock.since is not None:
        said.append(_("held for %s") % display.duration((lock.now - lock.since).total_seconds()))
    elif lock.last is not None and lock.last.acquired_at:
        said.append(_("free; last granted %s") % display.ago(lock.last.acquired_at, lock.now))
    if lock.longest_wait is not None:
        text = ngettext("%(count)d waiter for %(time)s", "%(count)d waiters, the first for %(time)s", lock.waiting)
        said.append(text % {"count": lock.waiting, "time": display.duration(lock.longest_wait)})
    return ", ".join(said)


def _sum(events: Sequence[LockEvent]) -> str:
    """The last hour of a lock in words."""
    held = [event.held_ms or 0 for event in events if event.event in _ENDS]
    waits = [event.waited_ms for event in events if event.event == Happened.GRANTED and event.waited_ms]
    lost = sum(event.event == Happened.LOST for event in events)
    said = []
    if held:
        text = ngettext("held once, for %(time)s", "held %(count)d times, for %(time)s in all", len(held))
        said.append(text % {"count": len(held), "time": display.duration(sum(held) / 1000)})
    if waits:
        text = ngettext("one wait of %(time)s", "%(count)d waits, the longest of %(time)s", len(waits))
        said.append(text % {"count": len(waits), "time": display.duration(max(waits) / 1000)})
    if lost:
        said.append(ngettext("lost once", "lost %(count)d times", lost) % {"count": lost})
    return ", ".join(said)
