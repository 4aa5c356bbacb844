"""What the history tells the pages of the locks, and their verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import ceil
from typing import Any, Final

from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import ngettext

from ..backends import mongo_store
from ..conf import get_settings
from ..engine.store.mongo import MongoStore
from ..exceptions import LockBackendFailed
from ..inspection import display
from ..inspection.overview import RECENT
from ..inspection.pictures import Picture, lane, stretches, ticks, with_unknown
from ..inspection.snapshot import LockSnapshot
from ..inspection.verdict import NOTHING, Past, Stretch, Told, kind_of
from .models import Happened, LockEvent, read_events

#: How many of the latest events `usual_holds` looks at, and of how many holds of a kind it needs to know.
EXAMINED: Final = 5_000
ENOUGH: Final = 10
#: What is usual is what so many of these did not exceed.
MOST: Final = 0.9
#: What the picture on the page of a lock covers, and of how many events at most.
HOUR: Final = timedelta(hours=1)
MAX_EVENTS: Final = 200
#: How many of the latest events the page of a lock shows.
SHOWN: Final = 20
#: Nothing is drawn longer than this, whatever an event says.
_LONGEST: Final = timedelta(days=1)
#: The events that end a hold, and how that is drawn.
_ENDS: Final = {Happened.RELEASED.value: "hold", Happened.LOST.value: "lost"}


class HistoryPast(Past):
    """What the events tell. Where the history cannot be read, that is nothing: the locks themselves were read."""

    def usual_holds(self, store: MongoStore, timeout: float = 5.0) -> dict[str, float]:
        """See Past.usual_holds(). Nine of ten of the latest holds took no longer.

        A kind of which the history knows too few is left out; without a history, or the right to read it, all are.
        """
        if store.history is None:
            return {}
        stages: list[dict[str, Any]] = [
            {"$sort": {"at": -1, "_id": -1}},
            {"$limit": EXAMINED},
            {"$match": {"event": Happened.RELEASED.value, "held_ms": {"$gte": 0}, "key": {"$type": "string"}}},
            {"$project": {"_id": 0, "key": 1, "held_ms": 1}},
        ]
        holds = defaultdict(list)
        try:
            found = read_events(store, timeout, lambda events: list(events.aggregate(stages, batchSize=EXAMINED)))
        except LockBackendFailed:
            return {}
        for event in found:
            holds[kind_of(event["key"])].append(event["held_ms"] / 1_000)
        known = {kind: sorted(seconds) for kind, seconds in holds.items() if len(seconds) >= ENOUGH}
        return {kind: seconds[ceil(MOST * len(seconds)) - 1] for kind, seconds in known.items()}

    def told(self, locks: Iterable[LockSnapshot]) -> Told:
        """See Past.told()."""
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

    def panel(self, request: HttpRequest, lock: LockSnapshot) -> str:
        """Show the latest events of the lock, to who may view them, and a picture of its last hour."""
        if mongo_store().history is None:
            return ""
        context = {"lock": lock, "may_view_events": request.user.has_perm("mongolock_history.view_lockevent")}
        try:
            events, since = _read([lock.key])
            context |= {"events": events[:SHOWN], "hour": draw_hour(lock, events, since)}
        except LockBackendFailed as error:  # such as a right that is missing
            context["problem"] = error.problem
        return render_to_string("admin/mongolock_history/panel.html", context, request)


def draw_hour(lock: LockSnapshot, events: Sequence[LockEvent], since: datetime | None) -> Picture | None:
    """Draw the last hour of one lock from its events; None if nothing happened in it."""
    begin = lock.now - HOUR
    late = [event for event in events if (at := _at(event)) and at >= begin]
    if not late:
        return None
    found = with_unknown(list(stretches(lock, list(_holds(late, lock)))), since, begin)
    return Picture([lane(lock.key, _sum(late), found, lock.now, HOUR)], HOUR, ticks(HOUR))


def _read(keys: Sequence[str]) -> tuple[list[LockEvent], datetime | None]:
    """The latest events of these locks, and since when these are complete. Raises LockBackendFailed."""
    settings = get_settings()
    events = LockEvent.objects.using(settings.DATABASE)
    read = events.filter(key__in=keys).recent(MAX_EVENTS, timeout=settings.COMMAND_TIMEOUT)
    first = read[-1:]
    if len(read) < MAX_EVENTS:
        first = events.order_by("at", "id").recent(1, timeout=settings.COMMAND_TIMEOUT)
    return read, next(map(_at, first), None)


def _holds(events: Iterable[LockEvent], lock: LockSnapshot) -> Iterator[Stretch]:
    """What the history says: an event has the length of what it ends. Present holders are drawn by themselves."""
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
    """When it happened, also in a project without time zones."""
    return timezone.make_aware(event.at) if event.at is not None and timezone.is_naive(event.at) else event.at


def _before(moment: datetime, milliseconds: float) -> datetime:
    return moment - min(_LONGEST, timedelta(milliseconds=max(0.0, min(milliseconds, 1e9))))


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
