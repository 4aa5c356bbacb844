"""What the filters of commands find in a document that is kept in memory, and what its reply says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from ..engine.rule.replies import Reply, read_reply

Document = dict[str, Any]

#: What they find where there is no document.
NOTHING: Final[Document] = {"holders": [], "waiters": [], "tombstones": []}


def is_held(document: Document, grants: Sequence[str]) -> bool:
    return any(e["grant"] in grants for e in document["holders"])


def _is_former(holder: Document, grant: str, owner: str | None) -> bool:
    return owner is not None and holder.get("owner") == owner and holder["grant"] != grant and "released" not in holder


def is_uncontended(document: Document, grant: str) -> bool:
    return [e["grant"] for e in document["holders"]] == [grant] and not document["waiters"]


def is_free(document: Document, grant: str) -> bool:
    return not (document["holders"] or document["waiters"]) and all(e["grant"] != grant for e in document["tombstones"])


def is_there(document: Document, grants: Sequence[str]) -> bool:
    return any(e["grant"] in grants for e in (*document["holders"], *document["waiters"]))


def reply_of(key: str, document: Document | None, grant: str, now: datetime, owner: str | None = None) -> Reply:
    """What MongoDB answers by the projection `replies.REPLY`, or for an owner `replies.REPLY_TO_OWNER`."""
    if document is None:
        return read_reply(key, None)
    holders, waiters = document["holders"], document["waiters"]
    places = [e["grant"] for e in waiters]
    answer = {
        "now": now,
        "token": document["token"],
        "mine": next((e for e in holders if e["grant"] == grant), None),
        "place": places.index(grant) if grant in places else -1,
        "queued": next((e for e in waiters if e["grant"] == grant), None),
        "waiting": len(waiters) + sum(e.get("behind", 0) for e in waiters),
        "granted": [
            {"to": e["session"], "grant": e["grant"], "token": e["token"], "at": e["acquired_at"]}
            for e in holders
            if e["acquired_at"] >= document["written_at"] and e["grant"] != grant
        ],
        "first_end": min((e["until"] for e in holders), default=None),
        "holder": next(iter(holders), None),
        "former": next((e for e in holders if _is_former(e, grant, owner)), None),
    }
    return read_reply(key, answer)
