"""The picture of who waits for whom: boxes for waiters, locks and holders, and arrows between them.

Columns from left to right: who waits, the lock, who holds it; and further, if that holder waits itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from django.utils.translation import ngettext

from ..inspection import display
from ..inspection.snapshot import LockSnapshot, Party

#: How many holders and how many waiters of a lock are drawn.
DRAWN: Final = 3
#: Sizes in pixels.
WIDTH, HEIGHT, GAP, SPACE, MARGIN = 148, 44, 30, 14, 6


@dataclass(frozen=True)
class Node:
    """A box. kind: "worker", "lock" or "more"."""

    kind: str
    text: str
    detail: str
    x: int
    y: int

    @property
    def middle(self) -> int:
        return self.y + HEIGHT // 2

    @property
    def is_dotted(self) -> bool:
        """The text is a dotted name: if it is cut, its end tells it from others."""
        return "." in self.text.strip(".") and " " not in self.text


@dataclass(frozen=True)
class Arrow:
    """An arrow. kind: "waits" or "holds". back: it runs from right to left, and so closes a circle."""

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
    box: tuple[int, int] = (WIDTH, HEIGHT)


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
        """The box of a thread or task: the same one, wherever it holds or waits."""
        name = party.worker or f"{party.host}/{party.pid}/{party.thread}"
        return self._add(f"w:{name}", "worker", display.who(party), display.where(party))

    def _add_lock(self, lock: LockSnapshot) -> None:
        """A lock, with its first waiters and its first holders."""
        name = self._add(f"k:{lock.key}", "lock", lock.key)
        waiters, holders = lock.queue[:DRAWN], lock.holders[:DRAWN]
        for waiter in waiters:
            self.edges[self._add_worker(waiter), name] = "waits"
        for holder in holders:
            self.edges[name, self._add_worker(holder)] = "holds"
        if more := lock.waiting - len(waiters):
            self.edges[self._add(f"+{name}", "more", _more(more)), name] = "waits"
        if more := lock.holding - len(holders):
            self.edges[name, self._add(f"{name}+", "more", _more(more))] = "holds"

    def _place(self, name: str, path: list[str]) -> int:
        """The column of a box: right of all boxes that point to it, except those that close a circle."""
        if name not in self.columns:
            before = [a for a, b in self.edges if b == name]
            here = [*path, name]
            self.back |= {(a, name) for a in before if a in here}
            columns = [self._place(a, here) for a in before if a not in here]
            self.columns[name] = max(columns, default=-1) + 1
        return self.columns[name]


def draw(waited_for: Iterable[LockSnapshot]) -> Graph | None:
    """Draw the locks that have waiters; None if no holder of these waits itself: a table says as much."""
    draft = _Draft(lock for lock in waited_for if lock.queue)
    if not {a for a, _ in draft.edges if a.startswith("w:")} & {b for _, b in draft.edges}:
        return None
    nodes = _nodes(draft)
    edges = [Arrow(kind, (a, b) in draft.back, _path(nodes[a], nodes[b])) for (a, b), kind in draft.edges.items()]
    width = max(node.x for node in nodes.values()) + WIDTH + MARGIN
    height = max(node.y for node in nodes.values()) + HEIGHT + MARGIN
    return Graph(list(nodes.values()), edges, width, height)


def _nodes(draft: _Draft) -> dict[str, Node]:
    """Each box in its column, if possible at the height of those that point to it."""
    nodes: dict[str, Node] = {}
    bottom: dict[int, int] = {}
    for name in sorted(draft.texts, key=lambda name: draft.columns[name]):
        pointing = [nodes[a].y for a, b in draft.edges if b == name and a in nodes]
        column = draft.columns[name]
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


def _more(count: int) -> str:
    return ngettext("and %d more", "and %d more", count) % count
