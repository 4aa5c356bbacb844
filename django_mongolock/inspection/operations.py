"""What people and jobs do to the locks of other processes: force release, ask to release, clear stale locks.

Only the server compares times, in the update itself: a lock that is renewed in the same moment stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final

from bson import Int64
from pymongo import ReturnDocument

from ..backends.history import FACTS, Happened
from ..engine.logs import INFO, log
from ..engine.protocol.processes import CLAIM, fate
from ..engine.rule.pipeline import pipeline
from ..engine.rule.replies import Bell
from ..engine.rule.step import Step
from ..engine.rule.validity import IS_WHOLE
from ..engine.store.election import CLOCK, CLUSTER_TIME
from ..engine.store.indexes import purged
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_fact
from ..exceptions import LockBackendFailed, LockDocumentDamaged
from .patterns import EVERY_KEY, KeyMatch
from .queries import RELEASED, bounded_entries, snapshots
from .snapshot import LockSnapshot, State

Document = dict[str, Any]

#: The fields of a holder that are read, for the log and the history.
_REPORTED = {f"holders.{name}": 1 for name in ("grant", "session", "token", "acquired_at", *FACTS)}
#: What is over of the documents of `indexes.purged`.
_IS_OVER: Final = {"purge_at": {"$type": "date"}, "$expr": {"$lt": ["$purge_at", "$$NOW"]}}
#: The reasons of a release that no person forced.
OWNER_GONE = "the process that held it has ended"
OWNER_DONE = "all locks of its owner were released"


@dataclass(frozen=True, slots=True)
class Which:
    """Which stale locks. owner: of one of the holders. older_than: seconds since the end of the lease, at least."""

    key: KeyMatch = EVERY_KEY
    owner: str | None = None
    older_than: float = 0.0

    def query(self) -> Document:
        """The condition, according to the server's clock. The type narrows the search in the index, where free locks
        have null."""
        end = {"$subtract": ["$$NOW", round(self.older_than * 1000)]}
        query: Document = {
            "expires_at": {"$type": "date"},
            "$expr": {"$lte": ["$expires_at", end]},
            "$nor": [RELEASED],
            **self.key.query(),
        }
        return query if self.owner is None else {**query, "holders.owner": {"$eq": self.owner}}


@dataclass(frozen=True, slots=True)
class Cleared:
    """cleared: how many locks. postponed: how many are left because another primary wrote them: after a failover
    every lease gets its whole length once more, since its remaining time is unknown. found, damaged: how many stale
    locks and damaged documents were found."""

    cleared: int = 0
    postponed: int = 0
    found: int = 0
    damaged: int = 0

    def __add__(self, other: Cleared) -> Cleared:
        return Cleared(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def find_stale(store: MongoStore, which: Which, limit: int = 0) -> Iterator[LockSnapshot]:
    """Find stale locks, and damaged documents among them. The lease that ended first comes first."""
    return snapshots(store, which.query(), {"expires_at": 1}, limit=limit)


def clear_stale(store: MongoStore, keys: Sequence[str], which: Which, timeout: float = 60.0) -> Cleared:
    """Clear those of *keys* that are still stale: remove their holders, and grant the locks to their next waiters.

    Damaged documents stay as they are. Raises LockBackendFailed.
    """
    cleared = _apply(store, keys, which, "$eq", timeout)
    return Cleared(cleared, _apply(store, keys, which, "$ne", timeout) if cleared < len(keys) else 0)


def clear_all_stale(
    store: MongoStore, which: Which, batch: int = 1_000, *, dry_run: bool = False
) -> Iterator[tuple[list[LockSnapshot], Cleared]]:
    """Find stale locks and clear them, batch by batch; yield the stale locks of a batch, and the result.

    At the end, it removes what apps keep beside the locks and whose time is over.
    """
    found = find_stale(store, which)
    while locks := list(islice(found, batch)):
        stale = [lock for lock in locks if lock.state is not State.DAMAGED]
        done = Cleared() if dry_run or not stale else clear_stale(store, [lock.key for lock in stale], which)
        yield stale, replace(done, found=len(stale), damaged=len(locks) - len(stale))
    for find in () if dry_run else purged:
        # Where the right is missing, a TTL index does it.
        with suppress(LockBackendFailed), store.bounded(60.0):
            find(store.collection).delete_many(_IS_OVER)


def _apply(store: MongoStore, keys: Sequence[str], which: Which, clock: str, timeout: float) -> int:
    """Apply the rule to the stale locks among *keys* that this primary wrote last ("$eq"), or another one ("$ne")."""
    mine = {"_id": {"$in": list(keys)}, "$expr": {clock: ["$clock", "$$c.clock"]}}
    step = Step()
    with store.bounded(timeout):
        result = store.collection.update_many(
            {"$and": [mine, which.query()]},
            pipeline(step),
            let=step.arguments(store.config.limits, CLOCK, CLUSTER_TIME),
            hint="_id_",  # without it, the server goes through all stale locks for every batch
        )
    if result.modified_count:
        store.ring_for(keys, timeout)
    return result.modified_count


def find_grants(store: MongoStore, tokens: Mapping[str, Sequence[int]], timeout: float = 5.0) -> dict[str, list[str]]:
    """Return the ids of the grants that have these fencing tokens, by key; none for a grant that has ended.

    Raises LockBackendFailed.
    """
    fields = {"holders.grant": 1, "holders.token": 1}
    with store.bounded(timeout):
        stages: list[Document] = [{"$match": {"_id": {"$in": list(tokens)}}}, {"$project": fields}, bounded_entries()]
        found = list(store.latest.aggregate(stages))
    return {document["_id"]: _grants(document, tokens[document["_id"]]) for document in found}


def _grants(document: Document, tokens: Sequence[int] | None = None) -> list[str]:
    """The ids of the grants of its holders: those with these tokens, or all."""
    return [holder["grant"] for holder in _holders(document) if tokens is None or holder.get("token") in tokens]


def _holders(document: Document, grants: Sequence[str] | None = None) -> list[Document]:
    """Its readable holders: those with one of these grants, or all."""
    return [
        holder
        for holder in _entries(document)
        if isinstance(holder, dict)
        and type(holder.get("grant")) is str
        and (grants is None or holder["grant"] in grants)
    ]


def force_release(
    store: MongoStore, key: str, grants: Sequence[str], timeout: float = 5.0, *, by: str = "", reason: str = ""
) -> list[str]:
    """Take the lock from the holders that have one of *grants*, also during a minimum hold; return the ids of these.

    Later grants stay. A holder learns of the loss at its next renewal; what it does until then is only stopped where
    its fencing token is compared. by, reason: who does it and why, for the log and the history.
    Raises LockDocumentDamaged, LockBackendFailed.
    """
    step = Step(remove=tuple(grants), force=True)
    with store.bounded(timeout):
        before = store.collection.find_one_and_update(
            {"_id": {"$eq": key}, "holders.grant": {"$in": list(grants)}, "$expr": IS_WHOLE},
            pipeline(step),
            {**_REPORTED, "now": "$$NOW", "waited_for": {"$ne": ["$waiters", []]}},
            let=step.arguments(store.config.limits, CLOCK, CLUSTER_TIME),
            return_document=ReturnDocument.BEFORE,
        )
    if before is None:
        store.diagnose(key, timeout)
        return []
    if before["waited_for"]:
        store.ring_for([key], timeout)
    taken = _holders(before, grants)
    for holder in taken:
        log(INFO, "release forced", key=key, token=holder.get("token"), by=by, reason=reason)
        _note(store, key, Happened.FORCED, holder, before["now"], by=by, reason=reason)
    return [holder["grant"] for holder in taken]


def _note(store: MongoStore, key: str, what: Happened, holder: Document, at: datetime, **facts: Any) -> None:
    if store.history is not None:
        since = holder.get("acquired_at")
        held = Int64((at - since).total_seconds() * 1_000) if isinstance(since, datetime) else None
        store.history.note(key, what, holder, at=at, token=holder.get("token"), held_ms=held, **facts)


def ask_to_release(
    store: MongoStore,
    key: str,
    requested_by: str,
    timeout: float = 5.0,
    *,
    grants: Sequence[str] | None = None,
    by: str = "",
    reason: str = "",
) -> int:
    """Ask the holders of *key*, or those with one of *grants*, to release it; return how many were asked.

    They decide by themselves. Those with `on_release_requested` learn of it at once, the others at their next renewal,
    within a third of their lease. requested_by: who
    asks, for the holders; by, reason: the same in two parts, for the history. Raises TypeError or ValueError for a
    *requested_by* that cannot be stored, LockDocumentDamaged, LockBackendFailed.
    """
    name = check_fact("requested_by", requested_by) or "?"
    with store.bounded(timeout):
        document = store.collection.find_one({"_id": {"$eq": key}}, {**_REPORTED, "now": "$$NOW"})
    if document is None:
        return 0
    store.diagnose(key, timeout)
    asked = _holders(document, grants)
    if asked:
        store.apply(
            key, Step(request_release_of=tuple(holder["grant"] for holder in asked), requested_by=name), timeout
        )
    store.ring([Bell(str(holder.get("session")), holder["grant"]) for holder in asked])
    for holder in asked:
        log(INFO, "asked to release", key=key, token=holder.get("token"), by=by or name, reason=reason)
        _note(store, key, Happened.ASKED, holder, document["now"], by=by or name, reason=reason)
    return len(asked)


def release_owner(
    store: MongoStore,
    owner: str,
    *,
    field: str = "owner",
    key: str = "",
    gone: bool = False,
    claims: bool = False,
    timeout: float = 5.0,
) -> list[str]:
    """Take every lock, or only *key*, from the holders with this *owner*; return the keys of the locks taken.

    field: where that stands, if it is another fact about the holder. gone: only from holders whose process has
    certainly ended, and from tasks in a queue. claims: only claims. Other holders, waiters and damaged documents stay
    as they are. Raises LockBackendFailed.
    """
    found = find_held(store, field, owner, {"_id": {"$eq": key}} if key else {}, timeout)
    meant = _is_gone if gone else _is_claim if claims else bool
    theirs = {name: [each for each in holders if meant(each)] for name, holders in found.items()}
    return _take(store, {name: _grants_of(each) for name, each in theirs.items() if each}, OWNER_DONE, timeout)


def release_place(store: MongoStore, place: str, timeout: float = 5.0) -> tuple[list[str], int]:
    """Take every lock from the holders at this *place* whose process has certainly ended; return the keys of the locks
    taken, and how many holders are left there. Raises LockBackendFailed.
    """
    found = find_held(store, "place", place, {}, timeout)
    gone = {name: [each for each in holders if _is_gone(each)] for name, holders in found.items()}
    taken = _take(store, {name: _grants_of(each) for name, each in gone.items() if each}, OWNER_GONE, timeout)
    return taken, sum(map(len, found.values())) - sum(map(len, gone.values()))


def find_held(
    store: MongoStore, field: str, value: str, query: Document, timeout: float = 5.0
) -> dict[str, list[Document]]:
    """Return the readable holders that have this value, by key: their grants and processes. Raises
    LockBackendFailed."""
    fields = {f"holders.{name}": 1 for name in (field, "grant", "process")}
    query = {"expires_at": {"$type": "date"}, **query, f"holders.{field}": {"$eq": value}}
    with store.bounded(timeout):
        found = list(store.latest.aggregate([{"$match": query}, {"$project": fields}, bounded_entries()]))
    return {document["_id"]: [each for each in _holders(document) if each.get(field) == value] for document in found}


def _take(store: MongoStore, grants: Mapping[str, Sequence[str]], reason: str, timeout: float) -> list[str]:
    taken: list[str] = []
    for key, theirs in grants.items():
        with suppress(LockDocumentDamaged):
            if force_release(store, key, theirs, timeout, reason=reason):
                taken.append(key)
    return taken


def _grants_of(holders: Sequence[Document]) -> list[str]:
    return [holder["grant"] for holder in holders]


def _is_gone(holder: Document) -> bool:
    process = holder.get("process")
    return type(process) is str and fate(process) == "gone"


def _is_claim(holder: Document) -> bool:
    return holder.get("process") == CLAIM


def _entries(document: Document) -> list[Any]:
    holders = document.get("holders")
    return holders if isinstance(holders, list) else []
