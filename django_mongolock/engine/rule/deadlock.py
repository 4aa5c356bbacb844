"""Deadlocks between any threads and tasks of any processes, found as cycles of waits.

The graph is in the documents. A waiter for a key waits for the holders of the key. Only a waiter that holds another
lock can be part of a cycle. For that reason only such waiters look for one, and only after a while. The victim is the
youngest waiter of the cycle, and all waiters in the cycle pick the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from .document import describe, is_holder, is_waiter, weight

Document = Mapping[str, Any]

#: The largest distance, in locks, of the search for a cycle.
MAX_DEPTH: Final = 32
#: A bound below every end of a lease. With it, the index on `expires_at` limits the search to locks that are held.
EARLIEST_END: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Wait:
    """One step of a cycle. *waiter* waits for *key*, and the waiter of the next step holds that key."""

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
        """The youngest waiter. This one gives up."""
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
    """Return the aggregation that finds the lock of *key*.

    The field `now` is the server's time. The field `chain` has all locks that the holders wait for, all locks that the
    holders of those wait for, and the rest of the chain.
    """
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
    """Return the cycle that contains the waiter with this grant id."""
    edges = _stuck(_edges(documents, now))
    its = ((worker, edge) for worker, waits in edges.items() for edge in waits if edge.wait.grant == grant)
    return next((_search(edges, worker, edge) for worker, edge in its), None)


def cycles(documents: Iterable[Document], now: datetime) -> list[Cycle]:
    """Return all deadlocks among these documents, each once."""
    edges = _stuck(_edges(documents, now))
    found: dict[frozenset[str], Cycle] = {}
    for worker, waits in edges.items():
        for edge in waits:
            if (cycle := _search(edges, worker, edge)) is not None:
                found.setdefault(cycle.grants, cycle)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Edge:
    """A wait, the workers that hold its key with their weights, and how much of that weight must be released."""

    wait: Wait
    holders: list[tuple[str, int]]
    needed: int


Edges = dict[str, list[Edge]]


def _stuck(edges: Edges) -> Edges:
    """Return the edges of the workers that wait for ever.

    A worker that goes on releases permits, and frees its waiters.
    """
    stuck = dict(edges)
    while going := [
        worker for worker, waits in stuck.items() if all(_released(edge, stuck) >= edge.needed for edge in waits)
    ]:
        for worker in going:
            del stuck[worker]
    return stuck


def _released(edge: Edge, stuck: Edges) -> int:
    """Return the weight that the running holders will release."""
    return sum(weight for worker, weight in edge.holders if worker not in stuck)


def _edges(documents: Iterable[Document], now: datetime) -> Edges:
    """Return for each worker its waits, with the workers that hold those keys."""
    edges: Edges = {}
    for document in documents:
        holders = [entry for entry in _list(document, "holders") if is_holder(entry)]
        workers = [(entry["worker"], weight(entry)) for entry in holders]
        needed = 1
        for waiter in _list(document, "waiters"):
            if is_waiter(waiter) and waiter["until"] > now:
                # A waiter needs at least as much as a waiter ahead in the queue.
                needed = max(needed, _needed(waiter, holders))
                wait = Wait(document["_id"], waiter["grant"], waiter["since"], describe(waiter, now))
                edges.setdefault(waiter["worker"], []).append(Edge(wait, workers, needed))
    return edges


def _list(document: Document, field: str) -> list[Any]:
    """Return the entries of a document, or none if that field is damaged."""
    entries = document.get(field)
    return entries if isinstance(entries, list) else []


def _needed(waiter: Document, holders: list[Document]) -> int:
    """Return the weight that must be released before the waiter fits. Unless the waiter may share, that is all."""
    shares, used = all(holder["mode"] == waiter["mode"] for holder in holders), sum(map(weight, holders))
    return used + weight(waiter) - waiter["capacity"] if shares else used


def _search(edges: Edges, worker: str, first: Edge) -> Cycle | None:
    """Return the cycle from *first*, a wait of *worker*, back to *worker*. The search is depth-first."""
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
