"""A collection in memory, as far as the commands of document locks need one. A test compares it with MongoDB."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pymongo import UpdateOne

from ..expressions import MISSING, Document, evaluate, is_true, order, type_of


class Found(list[Document]):
    """What `find` returns."""

    def sort(self, field: str, direction: int) -> Found:  # type: ignore[override]
        """In the order of one field."""
        return Found(sorted(self, key=lambda each: order(each.get(field, MISSING)), reverse=direction < 0))

    def limit(self, count: int) -> Found:
        """The first of them; 0: all."""
        return Found(self[: count or None])


@dataclass(frozen=True)
class Written:
    """What `bulk_write` returns."""

    matched_count: int


class SimCollection:
    """The documents, as one command sees them that was parsed at *now*. noted: hears of each update: the document
    before and after it, and the update."""

    def __init__(
        self, documents: dict[Any, Document], now: datetime, noted: Callable[[Document, Document, Document], None]
    ) -> None:
        self._documents = documents
        self._now = now
        self._noted = noted

    def find(self, query: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> Found:
        """Those that match; with a projection, `$$NOW` in it is filled in."""
        found = [deepcopy(each) for each in self._documents.values() if self._matches(query, each)]
        if fields is not None and "mongolock_now" in fields:
            for each in found:
                each["mongolock_now"] = self._now
        return Found(found)

    def find_one(self, query: Mapping[str, Any]) -> Document | None:
        """The first that matches."""
        return next(iter(self.find(query)), None)

    def find_one_and_update(
        self, query: Mapping[str, Any], update: Mapping[str, Any], return_document: object
    ) -> Document | None:
        """Update one; return it as it is then."""
        for each in self._documents.values():
            if self._matches(query, each):
                before = deepcopy(each)
                self._change(each, update)
                self._noted(before, each, dict(update))
                return deepcopy(each)
        return None

    def bulk_write(self, updates: list[UpdateOne], ordered: bool) -> Written:
        """Update many, each by itself."""
        statements: list[tuple[Any, Any]] = [(each._filter, each._doc) for each in updates]
        done = [self.find_one_and_update(query, update, None) for query, update in statements]
        return Written(sum(each is not None for each in done))

    def _change(self, document: Document, update: Mapping[str, Any]) -> None:
        document.update(deepcopy(update.get("$set", {})))
        for name, number in update.get("$inc", {}).items():
            document[name] = document.get(name, 0) + number
        for name in update.get("$currentDate", {}):
            document[name] = self._now

    def _matches(self, query: Mapping[str, Any], document: Document) -> bool:
        for name, condition in query.items():
            if name == "$expr":
                if not is_true(evaluate(condition, document, self._now)):
                    return False
                continue
            if name == "$or":
                if not any(self._matches(each, document) for each in condition):
                    return False
                continue
            value = document.get(name)
            if not all(_OF_QUERIES[operator](value, operand) for operator, operand in condition.items()):
                return False
        return True


_OF_QUERIES: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$eq": lambda value, operand: value == operand,
    "$in": lambda value, operand: value in operand,
    "$nin": lambda value, operand: value not in operand,
    "$type": lambda value, operand: type_of(value) == operand,
}
