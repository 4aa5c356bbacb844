"""The pictures of the pages: the graph of waiters and holders, and a lane with the last minutes of each lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from textwrap import wrap
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..exceptions import printable
from . import display
from .overview import RECENT
from .snapshot import LockSnapshot, Party, ShownState


@dataclass(frozen=True, slots=True)
class Stretch:
    """An activity from one moment to another.

    - kind: "hold", "stale", "lost", "wait", "unknown", or "grant" (without a length).
    """

    kind: str
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Told:
    """Earlier activities by key.

    - since: moment from which the activities are complete. None without activities.
    - deadlocks: latest events of a waiter that gave up because of a deadlock.
    """

    stretches: Mapping[str, Sequence[Stretch]] = field(default_factory=dict)
    since: datetime | None = None
    deadlocks: Sequence[Any] = ()


NOTHING: Final = Told()
#: The functions of an app that keeps a history. `pasts` return the past of locks without their present holders.
#: `panels` return HTML for the page of a lock.
pasts: Final[list[Callable[[Iterable[LockSnapshot]], Told]]] = []
panels: Final[list[Callable[[HttpRequest, LockSnapshot], str]]] = []

# Lanes are drawn from the lock documents and from the past that an app knows. A document has the present holders, the
# waiters and the previous holder.

#: The smallest width of a mark, in percent.
_NARROWEST: Final = 0.4
#: The largest number of lanes.
MAX_LANES: Final = 8
#: The spans that the picture may cover. The picture uses the shortest span that shows the present holds and waits
#: whole.
SPANS: Final = (timedelta(minutes=1), timedelta(minutes=2), RECENT)


@dataclass(frozen=True, slots=True)
class Mark:
    """A stretch as drawn. Start and width are in percent of the picture."""

    kind: str
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A lock in the picture.

    - text: content of the lane in words.
    """

    key: str
    marks: tuple[Mark, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The lanes, the time that they cover, and the labels (position and text) below them."""

    lanes: list[Lane]
    span: timedelta
    ticks: list[tuple[str, str]]

    @property
    def minutes(self) -> int:
        return self.span // timedelta(minutes=1)


def draw_lanes(candidates: Iterable[LockSnapshot], now: datetime, told: Told = NOTHING) -> Picture:
    """Draw a lane for each of the locks with the longest waits, followed by the locks with the longest holds."""
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
    """Return the drawable time waited or after a loss, the drawable time held, and the moment of the grant."""
    lengths = dict.fromkeys(("wait", "hold", "stale", "lost", "grant", "unknown"), timedelta())
    for stretch in found:
        lengths[stretch.kind] += max(stretch.end - max(stretch.start, now - RECENT), timedelta())
    return (
        lengths["wait"] + lengths["stale"] + lengths["lost"],
        lengths["hold"],
        max(stretch.start for stretch in found),
    )


def _span(found: list[Stretch], now: datetime) -> timedelta:
    """Return the shortest span that shows the start of everything that lasts. If nothing lasts, use the latest
    activities.
    """
    begins = [stretch.start for stretch in found if stretch.end >= now]
    begins = begins or [stretch.start for stretch in found if stretch.end >= now - RECENT]
    since = min(begins, default=now - RECENT)
    return next((span for span in SPANS if since >= now - span), RECENT)


def lane(key: str, text: str, found: Iterable[Stretch], now: datetime, span: timedelta) -> Lane:
    above = sorted(found, key=lambda stretch: stretch.kind == "grant")  # nothing covers the moment of a grant
    return Lane(key, tuple(mark for stretch in above if (mark := _mark(stretch, now, span))), text)


def with_unknown(found: list[Stretch], since: datetime | None, begin: datetime) -> list[Stretch]:
    """Return the stretches, preceded by one for the unknown time.

    - since: moment from which everything is known.
    """
    known = min([stretch.start for stretch in found] + ([since] if since else []))
    return [Stretch("unknown", begin, known), *found] if known > begin else found


def stretches(lock: LockSnapshot, earlier: Sequence[Stretch] | None = None) -> Iterator[Stretch]:
    """Yield the known stretches of a lock in drawing order.

    - earlier: past that an app knows.
    """
    if since := [waiter.since for waiter in lock.waiters if waiter.since]:
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
    """Yield the hold of the previous holder. Its end is known only if the lock was kept, or if the next holder had
    waited.
    """
    end = lock.since
    if last.acquired_at is None or last.acquired_at > (end or lock.now):
        return
    waited = end and any(holder.acquired_at == end != holder.since for holder in lock.holders)
    kind = "hold" if waited or last.released else "unknown"
    yield Stretch(kind, last.acquired_at, last.released or end or lock.now)
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
    """Return the positions and texts of three or four moments."""
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
    elif lock.held_seconds is not None:
        said.append(_("held for %s") % display.duration(lock.held_seconds))
    elif lock.last is not None and lock.last.acquired_at:
        said.append(_("free; last granted %s") % display.ago(lock.last.acquired_at, lock.now))
    if lock.longest_wait is not None:
        text = ngettext("%(count)d waiter for %(time)s", "%(count)d waiters, the first for %(time)s", lock.waiting)
        said.append(text % {"count": lock.waiting, "time": display.duration(lock.longest_wait)})
    return ", ".join(said)


# The graph has columns from left to right for the waiters, the lock and the holders. A holder that waits itself is
# followed by its lock.

#: The numbers of holders and of waiters drawn for each lock.
DRAWN: Final = 3
#: Sizes in pixels. A box has at least the height of two lines, and as many lines as its texts need.
WIDTH, HEIGHT, LINE, GAP, SPACE, MARGIN = 148, 44, 16, 30, 14, 6
#: The number of characters that surely fit into a line of a box.
FITS: Final = 16


@dataclass(frozen=True)
class Node:
    """A box.

    - kind: "worker", "lock" or "more".
    """

    kind: str
    text: str
    detail: str
    height: int
    x: int
    y: int

    @property
    def middle(self) -> int:
        return self.y + self.height // 2

    @property
    def bottom(self) -> int:
        return self.y + self.height + SPACE


@dataclass(frozen=True)
class Arrow:
    """An arrow.

    - kind: "waits" or "holds".
    - back: whether the arrow runs from right to left and closes a circle.
    """

    kind: str
    back: bool
    path: str


@dataclass(frozen=True)
class Graph:
    """Boxes and arrows, and the size of the picture."""

    nodes: list[Node]
    edges: list[Arrow]
    width: int
    height: int


class _Draft:
    """Boxes and arrows by name, before the boxes have their places."""

    def __init__(self, locks: Iterable[LockSnapshot]) -> None:
        self.texts: dict[str, tuple[str, str, str]] = {}
        self.edges: dict[tuple[str, str], str] = {}
        self.columns: dict[str, int] = {}
        self.back: set[tuple[str, str]] = set()
        for lock in locks:
            self._add_lock(lock)
        for name in self.texts:
            self._place(name, [])

    def _add(self, name: str, kind: str, text: str, detail: str = "") -> str:
        self.texts.setdefault(name, (kind, text, detail))
        return name

    def _add_worker(self, party: Party) -> str:
        """Return the box of a thread or task. Each thread or task has one box for all its holds and waits."""
        name = party.worker or f"{party.host}/{party.pid}/{party.thread}"
        return self._add(f"w:{name}", "worker", display.who(party), display.where(party))

    def _add_lock(self, lock: LockSnapshot) -> None:
        """Add a lock with its first waiters and its first holders."""
        name = self._add(f"k:{lock.key}", "lock", printable(lock.key))
        waiters, holders = lock.waiters[:DRAWN], lock.holders[:DRAWN]
        for waiter in waiters:
            self.edges[self._add_worker(waiter), name] = "waits"
        for holder in holders:
            self.edges[name, self._add_worker(holder)] = "holds"
        if more := display.more(lock.waiting - len(waiters)):
            self.edges[self._add(f"+{name}", "more", more.strip()), name] = "waits"
        if more := display.more(lock.holding - len(holders)):
            self.edges[name, self._add(f"{name}+", "more", more.strip())] = "holds"

    def _place(self, name: str, path: list[str]) -> int:
        """Return the column of a box, right of all boxes that point to it, except those that close a circle."""
        if name not in self.columns:
            before = [a for a, b in self.edges if b == name]
            here = [*path, name]
            self.back |= {(a, name) for a in before if a in here}
            columns = [self._place(a, here) for a in before if a not in here]
            self.columns[name] = max(columns, default=-1) + 1
        return self.columns[name]


def draw_graph(waited_for: Iterable[LockSnapshot]) -> Graph | None:
    """Draw the locks that have waiters. Return None if no holder of these waits itself. A table then says as much."""
    draft = _Draft(lock for lock in waited_for if lock.waiters)
    if not {a for a, b in draft.edges if a.startswith("w:")} & {b for a, b in draft.edges}:
        return None
    nodes = _nodes(draft)
    edges = [Arrow(kind, (a, b) in draft.back, _path(nodes[a], nodes[b])) for (a, b), kind in draft.edges.items()]
    width = max(node.x for node in nodes.values()) + WIDTH + MARGIN
    height = max(node.bottom for node in nodes.values())
    return Graph(list(nodes.values()), edges, width, height)


def _nodes(draft: _Draft) -> dict[str, Node]:
    """Return the boxes in their columns, if possible at the height of the boxes that point to them."""
    nodes: dict[str, Node] = {}
    bottom: dict[int, int] = {}
    for name in sorted(draft.texts, key=lambda name: draft.columns[name]):
        pointing = [nodes[a].y for a, b in draft.edges if b == name and a in nodes]
        column = draft.columns[name]
        y = max(bottom.get(column, MARGIN), sum(pointing) // len(pointing) if pointing else MARGIN)
        kind, text, detail = draft.texts[name]
        lines = len([*wrap(text, FITS), *wrap(detail, FITS)])
        height = max(HEIGHT, LINE * (lines + 1))
        nodes[name] = node = Node(kind, text, detail, height, MARGIN + column * (WIDTH + GAP), y)
        bottom[column] = node.bottom
    return nodes


def _path(a: Node, b: Node) -> str:
    """Return the path from the right side of one box to the left side of the other, or back below them."""
    if b.x > a.x:
        start, end = a.x + WIDTH, b.x - 6
        middle = (start + end) // 2
        return f"M{start},{a.middle} C{middle},{a.middle} {middle},{b.middle} {end},{b.middle}"
    low = max(a.bottom, b.bottom)
    return f"M{a.x},{a.middle + 8} C{a.x - 40},{low} {b.x + WIDTH + 40},{low} {b.x + WIDTH + 6},{b.middle + 8}"
