"""What a document says about its lock at one moment: the shape from which lists, pages and JSON are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..inspection.snapshot import State
from .rules import Rules
from .steps import read_state
from .updates import Document


@dataclass(frozen=True, slots=True)
class DocumentSnapshot:
    """A pending document; or one that cannot be judged.

    id, version: what a retry job needs. state: its pending state. failed: the state that it gets when it is released.
    since, seconds: since when and for how long it has been held, for people, by the server's clock. left: seconds until
    it is stale, negative after that; None without a time. damage: why it cannot be judged, and is left as it is; empty
    otherwise.
    """

    id: Any
    version: int
    holder: str | None
    state: str | None
    failed: str | None
    since: datetime | None
    seconds: float
    damage: str = ""
    left: float | None = None

    @property
    def lock_state(self) -> State:
        """Whether it is held, stale, damaged; or free, which means that it is pending without a holder."""
        if self.damage:
            return State.DAMAGED
        if not self.holder:
            return State.FREE
        return State.STALE if self.left is not None and self.left <= 0 else State.HELD

    def as_json(self) -> dict[str, Any]:
        """For programs, with moments in ISO 8601."""
        return {
            "id": str(self.id),
            "version": self.version,
            "holder": self.holder,
            "lock_state": self.lock_state.value,
            "state": self.state,
            "failed_state": self.failed,
            "since": self.since.isoformat() if self.since else None,
            "held_seconds": round(self.seconds, 3),
            "left_seconds": None if self.left is None else round(max(0.0, self.left), 3),
            "damage": self.damage or None,
        }


def read_snapshot(rules: Rules, document: Document) -> DocumentSnapshot:
    """Read a document that was found with `Fields.projection`. Never raises, whatever is in it."""
    seen = read_state(rules, document)
    if seen.damage:
        return DocumentSnapshot(seen.id, 0, None, None, None, None, 0.0, seen.damage)
    failed = rules.pending.get(seen.state or "")
    left = rules.stale_after - seen.age if seen.since else None
    return DocumentSnapshot(seen.id, seen.version, seen.holder, seen.state, failed, seen.since, seen.age, left=left)


def as_rows(found: Iterable[DocumentSnapshot]) -> Iterator[dict[str, Any]]:
    """Make rows for programs."""
    return (each.as_json() for each in found)
