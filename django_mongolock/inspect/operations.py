"""What is done to locks from outside, by people and by jobs: force release, clearing what is stale.

Nobody here compares a time: the server does, in the update itself. So a lock that is renewed in the same moment
stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from bson import Int64
from pymongo import ReturnDocument

from ..engine.document import check_fact
from ..engine.history import FACTS, Happened
from ..engine.logs import INFO, log
from ..engine.processes import fate
from ..engine.rule import IS_WHOLE, Step
from ..engine.store import MongoStore, arguments
from ..exceptions import LockDocumentDamaged
from .patterns import EVERY_KEY, KeyMatch
from .snapshot import RELEASED, Seen, survey

Document = dict[str, Any]

#: What is told of a holder that lost its lock, or is asked for it.
_TOLD = ("grant", "token", "acquired_at", *FACTS)
#: Why, where nobody did it by hand.
OWNER_GONE = "the process that had it for its owner is gone"
OWNER_DONE = "everything of its owner was released"


@dataclass(frozen=True, slots=True)
class Which:
    """Which stale locks are meant. key: what their keys are like. owner: of one of the holders.
    older_than: for how many seconds the lease has been over, at least."""

    key: KeyMatch = EVERY_KEY
    owner: str | None = None
    older_than: float = 0.0

    def query(self) -> Document:
        """The condition, judged by the server's clock. The type narrows the search in the index, where a lock that
        nobody holds has null."""
        end = {"$subtract": ["$$NOW", round(self.older_than * 1000)]}
        query: Document = {
            "expires_at": {"$type": "date"},
            "$expr": {"$lte": ["$expires_at", end]},
            "holders": {"$not": RELEASED},
            **self.key.query(),
        }
        return query if self.owner is None else {**query, "holders.owner": {"$eq": self.owner}}


@dataclass(frozen=True, slots=True)
class Cleared:
    """How many were cleared; and how many were left because another primary had written them: after a failover
    every lease is given its whole length once more, since nobody knows how much of it was left."""

    cleared: int = 0
    postponed: int = 0


def find_stale(store: MongoStore, which: Which, limit: int = 0) -> Iterator[Seen]:
    """Stale locks, longest over first; damaged documents among them."""
    return survey(store, which.query(), {"expires_at": 1}, limit=limit)


def clear_stale(store: MongoStore, keys: Sequence[str], which: Which, timeout: float = 60.0) -> Cleared:
    """Clear those of *keys* that are stale when the server gets to them: prune their holders, grant who waits.

    Damaged documents stay as they are. Raises LockBackendFailed.
    """
    cleared = _apply(store, keys, which, "$eq", timeout)
    return Cleared(cleared, _apply(store, keys, which, "$ne", timeout) if cleared < len(keys) else 0)


def _apply(store: MongoStore, keys: Sequence[str], which: Which, clock: str, timeout: float) -> int:
    """Apply the rule to the stale among *keys* whose last primary is today's ("$eq"), or another ("$ne")."""
    mine = {"_id": {"$in": list(keys)}, "$expr": {clock: ["$clock", "$$c.clock"]}}
    step = Step()
    with store.bounded(timeout):
        result = store.collection.update_many(
            {"$and": [mine, which.query()]},
            step.pipeline(),
            let=arguments(step, store.config.limits),
            hint="_id_",  # left to itself, the server goes through all stale locks for every batch
        )
    return result.modified_count


def find_grants(store: MongoStore, tokens: Mapping[str, Sequence[int]], timeout: float = 5.0) -> dict[str, list[str]]:
    """The ids of the grants that have these fencing tokens, by key; none for a grant that is gone.

    Raises LockBackendFailed.
    """
    fields = {"holders.grant": 1, "holders.token": 1}
    with store.bounded(timeout):
        found = list(store.latest.find({"_id": {"$in": list(tokens)}}, fields))
    return {document["_id"]: _grants(document, tokens[document["_id"]]) for document in found}


def _grants(document: Document, tokens: Sequence[int] | None = None) -> list[str]:
    """The ids of its holders' grants: of those with these tokens, or of all."""
    return [holder["grant"] for holder in _holders(document) if tokens is None or holder.get("token") in tokens]


def _holders(document: Document, grants: Sequence[str] | None = None) -> list[Document]:
    """Its holders that can be read: those with one of these grants, or all."""
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
    """Take the lock from those of its holders that have one of *grants*, also during a minimum hold.

    Returns the ids that it was taken from; a grant that was given since then is left alone. A holder learns of it at
    its next renewal; what it does until then is only stopped where its fencing token is compared. by, reason: who does
    it and why, for the log and the history. Raises LockDocumentDamaged, LockBackendFailed.
    """
    step = Step(remove=tuple(grants), force=True)
    fields = {f"holders.{name}": 1 for name in _TOLD}
    with store.bounded(timeout):
        before = store.collection.find_one_and_update(
            {"_id": {"$eq": key}, "holders.grant": {"$in": list(grants)}, "$expr": IS_WHOLE},
            step.pipeline(),
            {**fields, "now": "$$NOW"},
            let=arguments(step, store.config.limits),
            return_document=ReturnDocument.BEFORE,
        )
    if before is None:
        store.diagnose(key, timeout)
        return []
    taken = _holders(before, grants)
    for holder in taken:
        log(INFO, "lock forced", key=key, token=holder.get("token"), by=by, reason=reason)
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
    """Ask the holders of *key*, or those with one of *grants*, to release it, in the name of *requested_by*; return how
    many were asked.

    They learn of it at their next renewal, within a third of their lease. It is up to them what they do. by, reason:
    the same in two parts, for the history. Raises TypeError, ValueError for a *requested_by* that cannot be stored,
    LockDocumentDamaged, LockBackendFailed.
    """
    name = check_fact("requested_by", requested_by) or "?"
    with store.bounded(timeout):
        fields = {f"holders.{name}": 1 for name in _TOLD}
        document = store.collection.find_one({"_id": {"$eq": key}}, {**fields, "now": "$$NOW"})
    if document is None:
        return 0
    store.diagnose(key, timeout)
    asked = _holders(document, grants)
    if asked:
        store.apply(
            key, Step(request_release_of=tuple(holder["grant"] for holder in asked), requested_by=name), timeout
        )
    for holder in asked:
        log(INFO, "lock asked for", key=key, token=holder.get("token"), by=by or name, reason=reason)
        _note(store, key, Happened.ASKED, holder, document["now"], by=by or name, reason=reason)
    return len(asked)


def release_owner(
    store: MongoStore, owner: str, *, key: str = "", gone: bool = False, timeout: float = 5.0
) -> list[str]:
    """Take every lock, or that of *key*, from the holders that have this *owner*; return the keys of what was taken.

    gone: only from those whose process has ended for sure. Other holders, and those who wait, are left alone; so are
    damaged documents. Raises LockBackendFailed.
    """
    query: Document = {"_id": {"$eq": key}} if key else {"expires_at": {"$type": "date"}}
    fields = {f"holders.{name}": 1 for name in ("grant", "owner", "process")}
    with store.bounded(timeout):
        found = list(store.latest.find({**query, "holders.owner": {"$eq": owner}}, fields))
    taken: list[str] = []
    for document in found:
        grants = [grant for grant in map(partial(_of_owner, owner, gone), _entries(document)) if grant]
        with suppress(LockDocumentDamaged):
            if force_release(store, document["_id"], grants, timeout, reason=OWNER_GONE if gone else OWNER_DONE):
                taken.append(document["_id"])
    return taken


def _entries(document: Document) -> list[Any]:
    holders = document.get("holders")
    return holders if isinstance(holders, list) else []


def _of_owner(owner: str, gone: bool, holder: object) -> str | None:
    """The grant of a holder, if it is the owner's, and is gone if it must be."""
    match holder:
        case {"grant": str(grant), "owner": str(name), "process": str(process)} if type(grant) is str and name == owner:
            return grant if not gone or fate(process) == "gone" else None
    return None
