"""What is known of what has happened to locks: nothing, unless an app keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ..engine.store.mongo import MongoStore
from .snapshot import LockSnapshot


@dataclass(frozen=True, slots=True)
class Stretch:
    """An activity from one moment to another. kind: "hold", "stale", "lost", "wait", "unknown"; or "grant", without a
    length."""

    kind: str
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Told:
    """Earlier activities by key, and since when they are complete: None where there are none. deadlocks: who gave up of
    late, since it was in one."""

    stretches: Mapping[str, Sequence[Stretch]] = field(default_factory=dict)
    since: datetime | None = None
    deadlocks: Sequence[Any] = ()


NOTHING: Final = Told()


class Past:
    """Knows nothing. An app that keeps a history adds one that does."""

    def usual_holds(self, store: MongoStore, timeout: float) -> Mapping[str, float]:
        """Return for how many seconds locks are usually held, by the kind of their keys: see `verdict.kind_of`."""
        return {}

    def told(self, locks: Iterable[LockSnapshot]) -> Told:
        """Return what is known of these locks, apart from their present holders."""
        return NOTHING

    def panel(self, request: Any, lock: LockSnapshot) -> str:
        """Return HTML for the page of a lock."""
        return ""


#: The last one is asked.
pasts: Final = [Past()]
