"""Operations of people and jobs on the locks of other processes: force a release, ask for one, clear stale locks.

Only the server compares times, in the update itself. A lock that is renewed in the same moment stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from bson import Int64
from pymongo import ReturnDocument

from ..engine.logs import INFO, WARNING, log
from ..engine.protocol.processes import fate
from ..engine.rule.document import Step
from ..engine.rule.expressions import IS_WHOLE
from ..engine.rule.pipeline import pipeline
from ..engine.rule.replies import Bell
from ..engine.session.session import off_main_thread
from ..engine.store.election import CLOCK, CLUSTER_TIME
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_fact
from ..exceptions import LockDocumentDamaged
from .kinds import Choice
from .queries import LEASED, bounded_entries, chosen, sent_bounded

Document = dict[str, Any]

#: The recorded facts about a holder.
FACTS: Final = ("mode", "owner", "label", "place", "user", "host", "pid", "thread")
#: The fields of a holder that the log and the history report.
_REPORTED = {f"holders.{name}": 1 for name in ("grant", "session", "token", "acquired_at", *FACTS)}
#: The reasons of releases that no person forced.
OWNER_GONE = "the process that held it has ended"
OWNER_DONE = "all locks of its owner were released"
#: All stale locks.
STALE: Final = Choice("stale")


def clear_stale(
    store: MongoStore, keys: Sequence[str], choice: Choice = STALE, timeout: float = 60.0
) -> tuple[int, int]:
    """Clear those of *keys* that are chosen and still stale. Return the numbers of cleared and of postponed locks.

    The update removes the holders and grants the locks to their next waiters. `Swept` explains the numbers. Damaged
    documents stay as they are. Raises LockBackendFailed.
    """
    cleared = _apply(store, keys, choice, "$eq", timeout)
    return cleared, _apply(store, keys, choice, "$ne", timeout) if cleared < len(keys) else 0


@off_main_thread
def _apply(store: MongoStore, keys: Sequence[str], choice: Choice, clock: str, timeout: float) -> int:
    """Apply the rule to the stale locks among *keys* that this primary ("$eq") or another one ("$ne") wrote last."""
    mine = {"_id": {"$in": list(keys)}, "$expr": {clock: ["$clock", "$$c.clock"]}}
    step = Step()
    with store.bounded(timeout):
        result = store.collection.update_many(
            {"$and": [mine, chosen(choice)]},
            pipeline(step),
            let=step.arguments(store.config.limits, CLOCK, CLUSTER_TIME),
            hint="_id_",  # without it, the server goes through all stale locks for every batch
        )
    if result.modified_count:
        store.ring_for(keys, timeout)
    return result.modified_count


def _holders(document: Document, grants: Sequence[str] | None = None) -> list[Document]:
    """Return the readable holders of a document.

    - grants: grants to look for. None: all.
    """
    entries = document.get("holders")
    readable = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    return [each for each in readable if type(each.get("grant")) is str and (grants is None or each["grant"] in grants)]


@off_main_thread
def force_release(
    store: MongoStore,
    key: str,
    grants: Sequence[str],
    timeout: float = 5.0,
    *,
    by: str = "",
    reason: str = "",
    level: int = WARNING,
) -> list[str]:
    """Take the lock from the holders that have one of *grants*, even during a minimum hold. Return their ids.

    Later grants stay. A holder learns of the loss at its next renewal. Until then, only a comparison of fencing tokens
    stops its work. Raises LockDocumentDamaged, LockBackendFailed.

    - by, reason: person and the reason, for the log and the history.
    - level: level of the line in the log.
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
        log(level, "release forced", key=key, token=holder.get("token"), by=by, reason=reason)
        _note(store, key, "forced", holder, before["now"], by=by, reason=reason)
    return [holder["grant"] for holder in taken]


def _note(store: MongoStore, key: str, what: str, holder: Document, at: datetime, **facts: Any) -> None:
    if store.history is not None:
        since = holder.get("acquired_at")
        held = Int64((at - since).total_seconds() * 1_000) if isinstance(since, datetime) else None
        store.history.note(key, what, holder, at=at, token=holder.get("token"), held_ms=held, **facts)


@off_main_thread
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
    """Ask the holders of *key*, or those with one of *grants*, to release it. Return the number of holders asked.

    The holders decide by themselves. A holder with `on_release_requested` learns of the request at once. Other holders
    learn of it at their next renewal, within a third of their lease. A holder that renews no lease learns nothing.
    Raises TypeError or ValueError for a *requested_by* that cannot be stored, LockDocumentDamaged, LockBackendFailed.

    - requested_by: name shown to the holders.
    - by, reason: same in two parts, for the history.
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
        _note(store, key, "asked", holder, document["now"], by=by or name, reason=reason)
    return len(asked)


def release_owner(
    store: MongoStore,
    owner: str,
    *,
    field: str = "owner",
    gone: bool = False,
    reason: str = OWNER_DONE,
    timeout: float = 5.0,
) -> tuple[list[str], int]:
    """Take every lock from the holders with this *owner*. Return the keys taken, and the number of holders left.

    Other holders, waiters and damaged documents stay as they are. Raises LockBackendFailed.

    - field: field of the holder to compare with *owner*.
    - gone: whether to take locks only from tasks in a queue, and from holders whose process has certainly ended.
    """
    meant = _is_gone if gone else bool
    fields = {f"holders.{name}": 1 for name in (field, "grant", "process")}
    query = {**LEASED, f"holders.{field}": {"$eq": owner}}
    stages: list[Document] = [{"$match": query}, {"$project": fields}, bounded_entries()]
    taken, left = list[str](), 0
    for document in sent_bounded(store, timeout, lambda: list(store.latest.aggregate(stages))):
        holders = [each for each in _holders(document) if each.get(field) == owner]
        grants = [each["grant"] for each in holders if meant(each)]
        left += len(holders) - len(grants)
        with suppress(LockDocumentDamaged):
            if grants and force_release(store, document["_id"], grants, timeout, reason=reason, level=INFO):
                taken.append(document["_id"])
    return taken, left


def _is_gone(holder: Document) -> bool:
    process = holder.get("process")
    return type(process) is str and fate(process) == "gone"
