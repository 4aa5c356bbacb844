"""Deadlocks between any threads and tasks of any processes: cycles in who waits for whom.

The graph is in the documents: a waiter for a key waits for its holders. Only a waiter that holds another lock can be
part of a cycle, so only such waiters look, and only after a while. The victim is the youngest waiter of the cycle: all
in the cycle pick the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from .document import describe, is_holder, is_waiter, weight

Document = Mapping[str, Any]

#: How many locks away the search for a cycle goes.
MAX_DEPTH: Final = 32
#: No lease ends before this: a bound for the index on `expires_at`, to search only among locks that are held.
EARLIEST_END: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Wait:
    """One step of a cycle: *waiter* waits for *key*, which the waiter of the next step holds."""

    key: str
    grant: str
    since: datetime
    waiter: str


@dataclass(frozen=True, slots=True)
class Cycle:
    """Waits that end where they begin."""

    waits: tuple[Wait, ...]

    @property
    def victim(self) -> Wait:
        """The youngest waiter, which gives up."""
        return max(self.waits, key=lambda wait: (wait.since, wait.grant))

    @property
    def grants(self) -> frozenset[str]:
        return frozenset(wait.grant for wait in self.waits)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(wait.key for wait in self.waits)

    def __str__(self) -> str:
        return " -> ".join(f"{wait.key!r} ({wait.waiter})" for wait in self.waits)


def chain_pipeline(key: str, collection: str) -> list[dict[str, Any]]:
    """The aggregation that finds the lock of *key*, with the server's time as `now`, and as `chain` all locks that its
    holders wait for, and so on."""
    return [
        {"$match": {"_id": {"$eq": key}}},
        {
            "$graphLookup": {
                "from": collection,
                "startWith": "$holders.worker",
                "connectFromField": "holders.worker",
                "connectToField": "waiters.worker",
                "restrictSearchWithMatch": {"expires_at": {"$gt": EARLIEST_END}},
                "maxDepth": MAX_DEPTH,
                "as": "chain",
            }
        },
        {"$addFields": {"now": "$$NOW"}},
    ]


def cycle_of(documents: Iterable[Document], grant: str, now: datetime) -> Cycle | None:
    """The cycle that the waiter with this grant id is part of."""
    edges = _stuck(_edges(documents, now))
    its = ((worker, edge) for worker, waits in edges.items() for edge in waits if edge.wait.grant == grant)
    return next((_search(edges, worker, edge) for worker, edge in its), None)


def cycles(documents: Iterable[Document], now: datetime) -> list[Cycle]:
    """All deadlocks among these documents, each once."""
    edges = _stuck(_edges(documents, now))
    found: dict[frozenset[str], Cycle] = {}
    for worker, waits in edges.items():
        for edge in waits:
            if (cycle := _search(edges, worker, edge)) is not None:
                found.setdefault(cycle.grants, cycle)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Edge:
    """A wait, the workers that hold its key and as how many each counts, and how many of these must be released."""

    wait: Wait
    holders: list[tuple[str, int]]
    needed: int


Edges = dict[str, list[Edge]]


def _stuck(edges: Edges) -> Edges:
    """The edges of the workers that wait for ever: without those that wait for a permit of a holder that goes on."""
    stuck = dict(edges)
    while going := [
        worker for worker, waits in stuck.items() if all(_released(edge, stuck) >= edge.needed for edge in waits)
    ]:
        for worker in going:
            del stuck[worker]
    return stuck


def _released(edge: Edge, stuck: Edges) -> int:
    """What the holders that go on will release."""
    return sum(weight for worker, weight in edge.holders if worker not in stuck)


def _edges(documents: Iterable[Document], now: datetime) -> Edges:
    """For each worker, its waits and the workers that hold those keys."""
    edges: Edges = {}
    for document in documents:
        holders = [entry for entry in _list(document, "holders") if is_holder(entry)]
        workers = [(entry["worker"], weight(entry)) for entry in holders]
        needed = 1
        for waiter in _list(document, "waiters"):
            if is_waiter(waiter) and waiter["until"] > now:
                # Never fewer than a waiter ahead in the queue needs.
                needed = max(needed, _needed(waiter, holders))
                wait = Wait(document["_id"], waiter["grant"], waiter["since"], describe(waiter, now))
                edges.setdefault(waiter["worker"], []).append(Edge(wait, workers, needed))
    return edges


def _list(document: Document, field: str) -> list[Any]:
    """The entries of a document, which may be damaged."""
    entries = document.get(field)
    return entries if isinstance(entries, list) else []


def _needed(waiter: Document, holders: list[Document]) -> int:
    """How much must be released before the waiter fits: all, unless it may share."""
    shares, used = all(holder["mode"] == waiter["mode"] for holder in holders), sum(map(weight, holders))
    return used + weight(waiter) - waiter["capacity"] if shares else used


def _search(edges: Edges, worker: str, first: Edge) -> Cycle | None:
    """Depth first from *first*, a wait of *worker*, back to *worker*."""
    stack: list[tuple[tuple[Wait, ...], list[tuple[str, int]]]] = [((first.wait,), first.holders)]
    seen: set[str] = set()
    while stack:
        path, held = stack.pop()
        holders = [holder for holder, _ in held]
        if worker in holders:
            return Cycle(path)
        for holder in holders:
            if holder not in seen:
                seen.add(holder)
                stack.extend(((*path, edge.wait), edge.holders) for edge in edges.get(holder, ()))
    return None
