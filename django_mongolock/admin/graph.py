"""The picture of who waits for whom: those who wait, the locks that they wait for, those who hold them.

It is laid out in columns, from left to right: who waits, the lock, who holds it; and on, where that one waits itself.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from django.utils.translation import ngettext

from ..inspect import display
from ..inspect.overview import living
from ..inspect.snapshot import Entry, Seen

#: How many holders, and how many of those who wait, are drawn of one lock.
DRAWN: Final = 3
#: Sizes, in pixels; and those of the letters in the two lines of a box, of which the first is bold.
WIDTH, HEIGHT, GAP, SPACE, MARGIN = 164, 44, 36, 14, 6
LETTERS: Final = (12.0, 10.0)
#: How wide letters are in the widest of the usual fonts, as parts of their size; all others are 0.72.
_WIDTHS: Final = {
    **dict.fromkeys("iljI.,:;'|! ·", 0.4),
    **dict.fromkeys("ftr()[]/-_", 0.5),
    **dict.fromkeys("mwMWOQG@%…", 1.1),
}


@dataclass(frozen=True)
class Node:
    """A box. kind: "worker", "lock" or "more"."""

    kind: str
    text: str
    detail: str
    x: int
    y: int

    @property
    def center(self) -> int:
        return self.x + WIDTH // 2

    @property
    def middle(self) -> int:
        return self.y + HEIGHT // 2

    @property
    def lines(self) -> list[tuple[str, int]]:
        """What is written in the box, and at which height."""
        said = [_short(text, size) for text, size in zip((self.text, self.detail), LETTERS, strict=True) if text]
        first = self.y + (19 if len(said) > 1 else 27)
        return [(text, first + 16 * number) for number, text in enumerate(said)]


@dataclass(frozen=True)
class Edge:
    """An arrow. kind: "waits" or "holds"; back: it runs against the others, so there is a circle."""

    kind: str
    back: bool
    path: str


@dataclass(frozen=True)
class Graph:
    """Boxes and arrows, and the size of it all."""

    nodes: list[Node]
    edges: list[Edge]
    width: int
    height: int
    box: tuple[int, int] = (WIDTH, HEIGHT)


class _Draft:
    """Boxes by their names, and which points to which, before they have a place."""

    def __init__(self) -> None:
        self.texts: dict[str, tuple[str, str, str]] = {}
        self.edges: dict[tuple[str, str], str] = {}

    def add(self, name: str, kind: str, text: str, detail: str = "") -> str:
        self.texts.setdefault(name, (kind, text, detail))
        return name

    def worker(self, entry: Entry) -> str:
        """The box of a thread or task: one, wherever it holds or waits."""
        name = entry.worker or f"{entry.host}/{entry.pid}/{entry.thread}"
        return self.add(f"w:{name}", "worker", display.who(entry), display.where(entry))

    def lock(self, seen: Seen) -> None:
        """A lock, with the first of those who wait for it and of those who hold it."""
        lock = self.add(f"k:{seen.key}", "lock", seen.key)
        for waiter in living(seen)[:DRAWN]:
            self.edges[self.worker(waiter), lock] = "waits"
        for holder in seen.holders[:DRAWN]:
            self.edges[lock, self.worker(holder)] = "holds"
        if more := seen.waiting - len(living(seen)[:DRAWN]):
            self.edges[self.add(f"+{lock}", "more", _more(more)), lock] = "waits"
        if more := seen.holding - len(seen.holders[:DRAWN]):
            self.edges[lock, self.add(f"{lock}+", "more", _more(more))] = "holds"

    def back(self) -> set[tuple[str, str]]:
        """The arrows that close a circle: without them there is an order."""
        found: set[tuple[str, str]] = set()
        done: set[str] = set()
        for start in self.texts:
            path: list[tuple[str, list[str]]] = [] if start in done else [(start, self._next(start))]
            on_path = {start}
            while path:
                name, following = path[-1]
                if not following:
                    path.pop()
                    on_path.discard(name)
                    done.add(name)
                elif (other := following.pop()) in on_path:
                    found.add((name, other))
                elif other not in done:
                    path.append((other, self._next(other)))
                    on_path.add(other)
        return found

    def columns(self, back: set[tuple[str, str]]) -> dict[str, int]:
        """How many arrows lead to each box, one after the other, at most."""
        column = dict.fromkeys(self.texts, 0)
        forward = [edge for edge in self.edges if edge not in back]
        for _ in self.texts:  # no path is longer
            moved = [(a, b) for a, b in forward if column[b] <= column[a]]
            if not moved:
                break
            for a, b in moved:
                column[b] = max(column[b], column[a] + 1)
        return column

    def _next(self, name: str) -> list[str]:
        return [b for a, b in self.edges if a == name]


def draw(waited_for: Iterable[Seen]) -> Graph | None:
    """The picture; None if nobody waits."""
    draft = _Draft()
    for seen in waited_for:
        if living(seen):
            draft.lock(seen)
    if not draft.texts:
        return None
    back = draft.back()
    nodes = _place(draft, draft.columns(back))
    edges = [Edge(kind, (a, b) in back, _path(nodes[a], nodes[b])) for (a, b), kind in draft.edges.items()]
    width = max(node.x for node in nodes.values()) + WIDTH + MARGIN
    height = max(node.y for node in nodes.values()) + HEIGHT + MARGIN
    return Graph(list(nodes.values()), edges, width, height)


def _place(draft: _Draft, columns: dict[str, int]) -> dict[str, Node]:
    """Each box in its column, at the height of those that point to it if that is free."""
    nodes: dict[str, Node] = {}
    bottom: dict[int, int] = {}
    for name in sorted(draft.texts, key=lambda name: columns[name]):
        pointing = [nodes[a].y for a, b in draft.edges if b == name and a in nodes]
        column = columns[name]
        y = max(bottom.get(column, MARGIN), sum(pointing) // len(pointing) if pointing else MARGIN)
        bottom[column] = y + HEIGHT + SPACE
        nodes[name] = Node(*draft.texts[name], MARGIN + column * (WIDTH + GAP), y)
    return nodes


def _path(a: Node, b: Node) -> str:
    """From the right side of one box to the left side of the other, or back below them."""
    if b.x > a.x:
        start, end = a.x + WIDTH, b.x - 6
        middle = (start + end) // 2
        return f"M{start},{a.middle} C{middle},{a.middle} {middle},{b.middle} {end},{b.middle}"
    low = max(a.y, b.y) + HEIGHT + SPACE
    return f"M{a.x},{a.middle + 8} C{a.x - 40},{low} {b.x + WIDTH + 40},{low} {b.x + WIDTH + 6},{b.middle + 8}"


def _short(text: str, size: float) -> str:
    """What fits into a box: the start, but of a dotted name the end, which is what tells it from others."""
    room = (WIDTH - 2 * MARGIN) / size
    if sum(map(_width, text)) <= room:
        return text
    if "." in text.strip(".") and " " not in text:
        return f"…{_fitting(text[::-1], room - _width('…'))[::-1]}"
    return f"{_fitting(text, room - _width('…'))}…"


def _fitting(text: str, room: float) -> str:
    """As much of its start as there is room for."""
    widths = accumulate(map(_width, text))
    return text[: sum(width <= room for width in widths)]


def _width(letter: str) -> float:
    wide = unicodedata.east_asian_width(letter) in {"W", "F"}
    return 1.1 if wide else 0.8 if letter.isupper() and letter not in _WIDTHS else _WIDTHS.get(letter, 0.72)


def _more(count: int) -> str:
    return ngettext("and %d more", "and %d more", count) % count
