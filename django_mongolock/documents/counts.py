"""Counts the documents of every declared lock, with one command for each lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from pymongo.collection import Collection

from ..exceptions import LockError
from ..inspection.document_counts import DocumentCounts, sources
from .document_lock import DocumentLock, declared
from .rules import Rules
from .steps import Command, send
from .updates import Document, is_free, is_stale, is_type, is_whole

#: How many pending documents are examined.
MAX_COUNTED: Final = 10_000


def count_all() -> Iterator[DocumentCounts]:
    """Count the documents of all declared locks. A lock that fails does not hide the others."""
    for lock in declared():
        try:
            yield _count(lock)
        except (LockError, ImproperlyConfigured) as error:
            yield DocumentCounts(lock.name, error=str(error))


def _count(lock: DocumentLock[Any]) -> DocumentCounts:
    found: dict[str, Document] = lock._run(send(_counting(lock.rules)))
    numbers = {kind: found.get(kind, {}).get("count", 0) for kind in ("held", "stale", "damaged")}
    longest = max((row["longest"] or 0.0 for row in found.values()), default=0.0)
    examined = sum(row["count"] for row in found.values())
    return DocumentCounts(lock.name, **numbers, longest=max(0.0, longest) / 1000, more=examined >= MAX_COUNTED)


def _counting(rules: Rules) -> Command:
    fields, time = rules.fields, f"${rules.fields.time}"
    age = {"$cond": [is_type(fields.time, "date"), {"$subtract": ["$$NOW", time]}, None]}
    kinds = [
        {"case": {"$not": [is_whole(fields)]}, "then": "damaged"},
        {"case": is_free(fields), "then": "free"},
        {"case": is_stale(rules), "then": "stale"},
    ]
    free = {"$eq": ["$kind", "free"]}
    pipeline: list[Document] = [
        {"$match": {fields.state: {"$in": list(rules.pending)}}},
        {"$limit": MAX_COUNTED},
        {"$project": {"kind": {"$switch": {"branches": kinds, "default": "held"}}, "age": age}},
        {"$group": {"_id": "$kind", "count": {"$sum": 1}, "longest": {"$max": {"$cond": [free, None, "$age"]}}}},
    ]

    def command(collection: Collection[Document]) -> dict[str, Document]:
        return {row["_id"]: row for row in collection.aggregate(pipeline)}

    return command


sources.append(count_all)
