"""The conditions and the updates of document locks, as MongoDB takes them. Nothing is sent here.

Every condition is an expression, which compares a value as a whole: a plain query would find "x" in the array ["x"].
Every value of a caller is a `$literal`, since the text "$price" is the name of a field otherwise.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rules import LAST_VERSION, Fields, Rules

Document = dict[str, Any]


def new_attempt() -> str:
    """Return a new id for one thing that the lock does to documents. Make it when it is sent: then it is of no other
    process, nor of a forked child, nor of a copy of a machine that was cloned while it ran."""
    return f"{os.getpid()}.{secrets.token_hex(12)}"


def literal(value: object) -> Document:
    return {"$literal": value}


def literals(changes: Mapping[str, Any]) -> Document:
    return {name: literal(value) for name, value in changes.items()}


def is_type(name: str, *types: str) -> Document:
    return {"$in": [{"$type": f"${name}"}, list(types)]}


def is_version(name: str) -> Document:
    """The field is a whole number to which one can be added. A fraction, or a number that is too large, is damage."""
    return {"$and": [is_type(name, "int", "long"), {"$lt": [f"${name}", LAST_VERSION]}]}


def is_whole(fields: Fields) -> Document:
    """Every field has a type that it may have. A field that cannot be read must not count as free."""
    return {
        "$and": [
            is_version(fields.version),
            is_type(fields.holder, "string", "null", "missing"),
            is_type(fields.state, "string", "null", "missing"),
            is_type(fields.time, "date", "null", "missing"),
        ]
    }


def has(name: str, values: Sequence[Any]) -> Document:
    return {"$in": [f"${name}", [literal(value) for value in values]]}


def is_free(fields: Fields) -> Document:
    """The holder's field is empty: missing, null or empty text."""
    return {"$eq": [{"$ifNull": [f"${fields.holder}", ""]}, ""]}


@dataclass(frozen=True, slots=True)
class Acquisition:
    """A request for documents: in whose name, for which work, by which id, and what else to change in them."""

    owner: str
    pending: str
    attempt: str
    changes: Document = field(default_factory=dict)

    def is_granted(self, rules: Rules) -> Document:
        """This very attempt was granted before, and still holds the document."""
        fields = rules.fields
        return {"$and": [has(fields.attempt, [self.attempt]), has(fields.holder, [self.owner])]}

    def query(self, rules: Rules, versions: Mapping[Any, int]) -> Document:
        """Those of the documents, given by id and version, that are granted.

        Each still has its version; and no work on it is under way, or the same owner holds it, or it is free. The
        attempt may be sent again: a document that it was granted before, it is granted again.
        """
        fields = rules.fields
        same = [{"$and": [has("_id", ids), has(fields.version, [version])]} for version, ids in group(versions)]
        available = {"$or": [is_free(fields), has(fields.holder, [self.owner]), has(fields.state, rules.ended)]}
        fits = {"$and": [{"$or": same}, available]}
        return {
            "_id": {"$in": list(versions)},
            "$expr": {"$and": [is_whole(fields), {"$or": [self.is_granted(rules), fits]}]},
        }

    def update(self, rules: Rules) -> list[Document]:
        """Set holder, state and time, and raise the version. A second time it only moves the time: a command that the
        network held up must write, but must not change the version that its holder knows."""
        fields, again = rules.fields, self.is_granted(rules)
        version, time = f"${fields.version}", f"${fields.time}"
        later = {"$max": ["$$NOW", {"$add": [{"$ifNull": [time, "$$NOW"]}, 1]}]}
        return [
            {
                "$set": {
                    **literals(self.changes),
                    fields.holder: literal(self.owner),
                    fields.state: literal(self.pending),
                    fields.version: {"$cond": [again, version, {"$add": [version, 1]}]},
                    fields.time: {"$cond": [again, later, "$$NOW"]},
                    fields.attempt: literal(self.attempt),
                }
            }
        ]


def group(versions: Mapping[Any, int]) -> list[tuple[int, list[Any]]]:
    """The ids of each version."""
    groups: dict[int, list[Any]] = {}
    for id_, version in versions.items():
        groups.setdefault(version, []).append(id_)
    return list(groups.items())


def mine(rules: Rules, id_: Any, owner: str, attempts: Sequence[str], version: int | None = None) -> Document:
    """The document *id_*, if one of *attempts* of this owner still holds it, in that version if one is given."""
    fields = rules.fields
    conditions = [has(fields.holder, [owner]), has(fields.attempt, attempts)]
    if version is not None:
        conditions += [is_version(fields.version), has(fields.version, [version])]
    return {"_id": {"$eq": id_}, "$expr": {"$and": conditions}}


def changing(rules: Rules, attempt: str, changes: Mapping[str, Any]) -> Document:
    """Write *changes*, and raise the version if there are any."""
    fields = rules.fields
    made = {**literals(changes), fields.attempt: literal(attempt)}
    return made | ({fields.version: {"$add": [f"${fields.version}", 1]}} if changes else {})


def releasing(rules: Rules, state: object) -> Document:
    """Empty the holder's field, and set the state to *state* (a value or an expression)."""
    fields = rules.fields
    return {fields.holder: None, fields.time: None, fields.state: state}


def failed_state(rules: Rules) -> Document:
    """The failed state that belongs to the document's pending state; any other state stays."""
    name = f"${rules.fields.state}"
    branches = [
        {"case": {"$eq": [name, literal(state)]}, "then": literal(failed)} for state, failed in rules.pending.items()
    ]
    return {"$switch": {"branches": branches, "default": name}}


@dataclass(frozen=True, slots=True)
class StaleFilter:
    """Which stale documents are meant: of one owner; stale for so many seconds already; with one of these ids."""

    owner: str | None = None
    older_than: float = 0.0
    ids: Sequence[Any] | None = None

    def query(self, rules: Rules) -> Document:
        """Pending documents that were held for too long, by the clock of the server that frees them, in the very
        update that does. A command that was held up on its way has an old ``$$NOW``, and finds fewer."""
        fields = rules.fields
        end = {"$subtract": ["$$NOW", round((rules.stale_after + self.older_than) * 1000)]}
        over = {"$and": [is_type(fields.time, "date"), {"$lte": [f"${fields.time}", end]}]}
        return self._pending(rules, is_whole(fields), {"$not": [is_free(fields)]}, over)

    def undated(self, rules: Rules) -> Document:
        """Pending documents that have a holder, but no time."""
        fields = rules.fields
        dateless = {"$not": [is_type(fields.time, "date")]}
        return self._pending(rules, is_whole(fields), {"$not": [is_free(fields)]}, dateless)

    def damaged(self, rules: Rules) -> Document:
        """Pending documents that cannot be judged."""
        return self._pending(rules, {"$not": [is_whole(rules.fields)]})

    def _pending(self, rules: Rules, *conditions: Document) -> Document:
        # The plain condition is what an index narrows; the expressions are what decides.
        fields = rules.fields
        query: Document = {fields.state: {"$in": list(rules.pending)}, "$expr": {"$and": list(conditions)}}
        if self.owner is not None:
            query[fields.holder] = {"$eq": self.owner}
        return query if self.ids is None else {**query, "_id": {"$in": list(self.ids)}}


def may_write(field_of_token: str, token: int) -> Document:
    """No token later than *token* stands in the document, and nothing that is no token."""
    name = field_of_token
    not_later = {"$and": [is_version(name), {"$lte": [f"${name}", literal(token)]}]}
    return {"$or": [is_type(name, "null", "missing"), not_later]}
