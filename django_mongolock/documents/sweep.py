"""Finding documents whose holder has died, and freeing them. The server decides, by its own clock, in the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final

from pymongo.collection import Collection

from . import updates
from .rules import Rules
from .steps import Steps, look_at, send
from .updates import Document, Stuck

#: How many documents one update frees, unless told otherwise.
SWEEP_BATCH: Final = 500


@dataclass(frozen=True, slots=True)
class StuckDocument:
    """A pending document that somebody has held for longer than the lock allows.

    id, version: as a retry job needs them. holder: who. state: its pending state. failed: the state that it gets.
    since: since when it is held. seconds: for how long; both are for people, by the server's clock. damage: why it
    cannot be judged, and is left as it is; empty otherwise.
    """

    id: Any
    version: int
    holder: str | None
    state: str | None
    failed: str | None
    since: datetime | None
    seconds: float
    damage: str = ""


@dataclass(slots=True)
class Swept:
    """What a sweep found and did.

    cleared: the documents that were freed; one that somebody takes in the same moment is counted, but not listed.
    count: how many were freed. found: how many were stale when they were looked for. dated: documents that somebody
    holds, nobody knows since when: they are stale `stale_after` seconds from now on. damaged: documents that cannot
    be judged, and were left.
    """

    cleared: list[StuckDocument] = field(default_factory=list)
    count: int = 0
    found: int = 0
    dated: int = 0
    damaged: list[StuckDocument] = field(default_factory=list)


def find(rules: Rules, which: Stuck, limit: int = 0) -> Steps[list[StuckDocument]]:
    """Stale documents, held for longest first; then those that cannot be judged. limit 0: all."""
    fields = rules.fields

    def call(collection: Collection[Document]) -> list[Document]:
        found: list[Document] = []
        for query in (which.query(rules), which.damaged(rules)):
            rest = limit - len(found)
            if limit and not rest:
                break
            found += collection.find(query, fields.projection()).sort(fields.time, 1).limit(max(0, rest))
        return found

    documents: list[Document] = yield from send(call)
    return [_read(rules, document) for document in documents]


def _read(rules: Rules, document: Document) -> StuckDocument:
    seen = look_at(rules, document)
    if seen.damage:
        return StuckDocument(seen.id, 0, None, None, None, None, 0.0, seen.damage)
    failed = rules.pending.get(seen.state or "")
    return StuckDocument(seen.id, seen.version, seen.holder, seen.state, failed, seen.since, seen.age)


def sweep(rules: Rules, which: Stuck, batch: int = SWEEP_BATCH) -> Steps[Swept]:
    """Set stale documents to the failed state of their work, with nobody holding them."""
    swept = Swept()
    found = yield from find(rules, which)
    swept.damaged = [stuck for stuck in found if stuck.damage]
    stale = iter([stuck for stuck in found if not stuck.damage])
    swept.found = len(found) - len(swept.damaged)
    while some := list(islice(stale, batch)):
        yield from _clear(rules, which, some, swept)
    swept.dated = yield from send(_date(rules, which))
    return swept


def _clear(rules: Rules, which: Stuck, some: list[StuckDocument], swept: Swept) -> Steps[None]:
    fields, attempt = rules.fields, f"sweep.{updates.new_attempt()}"
    ids = [stuck.id for stuck in some]
    query = Stuck(which.owner, which.older_than, ids).query(rules)
    update = [{"$set": {**updates.letting_go(rules, updates.failed_state(rules)), fields.attempt: attempt}}]
    # A sweep whose answer was lost is counted by its id; what it freed cannot match a second time.
    mine = {"_id": {"$in": ids}, "$expr": updates.has(fields.attempt, [attempt])}

    def call(collection: Collection[Document]) -> tuple[int, list[Any]]:
        count = collection.update_many(query, update).modified_count
        return count, [document["_id"] for document in collection.find(mine, {"_id": 1})]

    count, cleared = yield from send(call)
    swept.count += max(count, len(cleared))
    left = set(cleared)
    swept.cleared += [stuck for stuck in some if stuck.id in left]


def _date(rules: Rules, which: Stuck) -> Any:
    """Data from before there was a time: nobody can tell how long it has been held, so it counts from now."""
    query, update = which.undated(rules), [{"$set": {rules.fields.time: "$$NOW"}}]

    def call(collection: Collection[Document]) -> int:
        if collection.find_one(query, {"_id": 1}) is None:
            return 0
        return collection.update_many(query, update).modified_count

    return call


def has_index(collection: Collection[Document], rules: Rules) -> bool:
    """Is there an index by which stale documents are found: one that begins with the state or the time?"""
    for index in collection.index_information().values():
        first = next(iter(index["key"]), ("", 0))
        whole = not ({"partialFilterExpression", "hidden"} & index.keys())
        if whole and first[0] in (rules.fields.state, rules.fields.time) and first[1] in (1, -1):
            return True
    return False


def as_rows(found: list[StuckDocument]) -> Iterator[dict[str, Any]]:
    """Documents for programs. Moments in ISO 8601, by the server's clock."""
    for stuck in found:
        yield {
            "id": str(stuck.id),
            "version": stuck.version,
            "holder": stuck.holder,
            "state": stuck.state,
            "failed_state": stuck.failed,
            "since": stuck.since.isoformat() if stuck.since else None,
            "held_seconds": round(stuck.seconds, 3),
            "damage": stuck.damage or None,
        }
