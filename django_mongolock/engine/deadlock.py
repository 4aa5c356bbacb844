"""Deadlocks between any threads and tasks of any processes: cycles in who waits for whom.

The graph is in the documents: somebody who waits for a key waits for those who hold it. Only who holds a lock
while waiting for another can be part of a cycle, so only those look, and only after a while: it costs nobody else
a thing. The victim is the youngest waiter of the cycle; everybody in the cycle picks the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from .document import describe, is_holder, is_waiter

Document = Mapping[str, Any]

#: How many locks away a cycle is looked for.
MAX_DEPTH: Final = 32
#: No lease ends before this: a bound for the index on `expires_at`, to search only among locks that are held.
_EVER: Final = datetime(2000, 1, 1, tzinfo=UTC)


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
        """Who is to give up: the youngest waiter; the same for everybody who looks."""
        return max(self.waits, key=lambda wait: (wait.since, wait.grant))

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(wait.key for wait in self.waits)

    def __str__(self) -> str:
        return " -> ".join(f"{wait.key!r} ({wait.waiter})" for wait in self.waits)


def chain_pipeline(key: str, collection: str) -> list[dict[str, Any]]:
    """The aggregation that finds the lock of *key*, and all locks that its holders wait for, and so on."""
    return [
        {"$match": {"_id": {"$eq": key}}},
        {
            "$graphLookup": {
                "from": collection,
                "startWith": "$holders.worker",
                "connectFromField": "holders.worker",
                "connectToField": "waiters.worker",
                "restrictSearchWithMatch": {"expires_at": {"$gt": _EVER}},
                "maxDepth": MAX_DEPTH,
                "as": "chain",
            }
        },
        {"$addFields": {"now": "$$NOW"}},
    ]


def read_chain(found: Document) -> list[Document]:
    """The lock documents that `chain_pipeline` found; the server's time is in the field `now` of *found*."""
    return [found, *found["chain"]]


def cycle_of(documents: Iterable[Document], grant: str, now: datetime) -> Cycle | None:
    """The cycle that the waiter with this grant id is part of."""
    edges = _edges(documents, now)
    start = next((wait for waits in edges.values() for wait, _ in waits if wait.grant == grant), None)
    if start is None:
        return None
    worker = next(worker for worker, waits in edges.items() if any(wait.grant == grant for wait, _ in waits))
    return _search(edges, worker, grant)


def cycles(documents: Iterable[Document], now: datetime) -> list[Cycle]:
    """All deadlocks among these documents, each once."""
    edges = _edges(documents, now)
    found: dict[frozenset[str], Cycle] = {}
    for worker, waits in edges.items():
        for wait, _ in waits:
            if (cycle := _search(edges, worker, wait.grant)) is not None:
                found.setdefault(frozenset(step.grant for step in cycle.waits), cycle)
    return list(found.values())


Edges = dict[str, list[tuple[Wait, list[str]]]]


def _edges(documents: Iterable[Document], now: datetime) -> Edges:
    """For each worker, what it waits for and which workers hold that."""
    edges: Edges = {}
    for document in documents:
        holders = list(_holding_workers(document))
        for waiter in document.get("waiters") or ():
            if is_waiter(waiter) and waiter["until"] > now and isinstance(waiter.get("worker"), str):
                text = describe(waiter, now)
                wait = Wait(document["_id"], waiter["grant"], waiter["since"], text)
                edges.setdefault(waiter["worker"], []).append((wait, holders))
    return edges


def _holding_workers(document: Document) -> Iterator[str]:
    for entry in document.get("holders") or ():
        if is_holder(entry) and isinstance(entry.get("worker"), str):
            yield entry["worker"]


def _search(edges: Edges, worker: str, grant: str) -> Cycle | None:
    """Depth first from the wait of *worker* with this grant, back to *worker*."""
    first = next(step for step in edges[worker] if step[0].grant == grant)
    stack: list[tuple[tuple[Wait, ...], list[str]]] = [((first[0],), first[1])]
    seen: set[str] = set()
    while stack:
        path, holders = stack.pop()
        if worker in holders:
            return Cycle(path)
        for holder in holders:
            if holder not in seen:
                seen.add(holder)
                stack.extend(((*path, wait), behind) for wait, behind in edges.get(holder, ()))
    return None
