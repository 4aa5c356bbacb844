"""The past of the locks from the history, for the pages and the verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import ngettext

from ..backends import mongo_store
from ..conf import get_settings
from ..exceptions import LockBackendFailed
from ..inspection import display
from ..inspection.overview import RECENT
from ..inspection.pictures import NOTHING, Picture, Stretch, Told, lane, stretches, ticks, with_unknown
from ..inspection.snapshot import LockSnapshot
from ..models.reading import read_moment
from .models import Happened, LockEvent

#: The span of the picture on the page of a lock.
HOUR: Final = timedelta(hours=1)
#: The picture covers the shortest of these spans that shows everything known, or else an hour.
SPANS: Final = (timedelta(minutes=5), timedelta(minutes=15), timedelta(minutes=30))
MAX_EVENTS: Final = 200
#: The number of latest events on the page of a lock.
SHOWN: Final = 20
#: The longest stretch drawn, whatever an event says.
_LONGEST: Final = timedelta(days=1)
#: The events that end a hold, with the kind of the drawn stretch.
_ENDS: Final = {Happened.RELEASED.value: "hold", Happened.LOST.value: "lost"}


def told(locks: Iterable[LockSnapshot]) -> Told:
    """Return the activities of these locks from their events. Return nothing if the history cannot be read."""
    found = {lock.key: lock for lock in locks}
    if mongo_store().history is None or not found:
        return NOTHING
    try:
        events, since = _read(list(found))
    except LockBackendFailed:
        return NOTHING
    by_key = defaultdict(list)
    for event in events:
        by_key[event.key].append(event)
    begin = next(iter(found.values())).now - RECENT
    earlier = {key: list(_holds(each, found[key])) for key, each in by_key.items()}
    deadlocks = [each for each in events if each.event == Happened.DEADLOCK and (at := _at(each)) and at >= begin]
    return Told(earlier, since, deadlocks)


def panel(request: HttpRequest, lock: LockSnapshot) -> str:
    """Show a picture of the last hour of the lock. Show its latest events to users who may view them."""
    if mongo_store().history is None:
        return ""
    context = {"lock": lock, "may_view_events": request.user.has_perm("mongolock_history.view_lockevent")}
    try:
        events, since = _read([lock.key])
        for event in events:  # the page counts all times to one moment
            event.now = read_moment(lock.now)
        context |= {"events": events[:SHOWN], "hour": draw_hour(lock, events, since)}
    except LockBackendFailed as error:  # such as a right that is missing
        context["problem"] = display.sentence(error.problem)
    return render_to_string("admin/mongolock_history/panel.html", context, request)


def draw_hour(lock: LockSnapshot, events: Sequence[LockEvent], since: datetime | None) -> Picture | None:
    """Draw the last hour of one lock from its events. Return None if nothing happened in that hour."""
    late = [event for event in events if (at := _at(event)) and at >= lock.now - HOUR]
    if not late:
        return None
    found = list(stretches(lock, list(_holds(late, lock))))
    known = min([*(stretch.start for stretch in found), *([since] if since else [])], default=lock.now - HOUR)
    span = next((span for span in SPANS if known >= lock.now - span), HOUR)
    drawn = with_unknown(found, since, lock.now - span)
    return Picture([lane(lock.key, _sum(late), drawn, lock.now, span)], span, ticks(span))


def _read(keys: Sequence[str]) -> tuple[list[LockEvent], datetime | None]:
    """Return the latest events of these locks, and since when they are complete. Raises LockBackendFailed."""
    settings = get_settings()
    events = LockEvent.objects.using(settings.DATABASE)
    read = events.filter(key__in=keys).recent(MAX_EVENTS, timeout=settings.COMMAND_TIMEOUT)
    first = read[-1:]
    if len(read) < MAX_EVENTS:
        first = events.order_by("at", "id").recent(1, timeout=settings.COMMAND_TIMEOUT)
    return read, next(map(_at, first), None)


def _holds(events: Iterable[LockEvent], lock: LockSnapshot) -> Iterator[Stretch]:
    """Yield the stretches of the history. An event has the length of the stretch that it ends.

    Present holders are drawn elsewhere.
    """
    present = {holder.token for holder in lock.holders}
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
    """Return the moment of the event as an aware datetime, even in a project without time zones."""
    return timezone.make_aware(event.at) if event.at is not None and timezone.is_naive(event.at) else event.at


def _before(moment: datetime, milliseconds: float) -> datetime:
    return moment - min(_LONGEST, timedelta(milliseconds=max(0.0, min(milliseconds, 1e9))))


def _sum(events: Sequence[LockEvent]) -> str:
    """Return the last hour of a lock in words."""
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
