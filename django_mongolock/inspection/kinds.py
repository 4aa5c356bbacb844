"""Kinds of locks beside the named ones: what lists, pages, commands and checks need of them.

An app that has such locks says so in `sources`, in its AppConfig.ready(). Nothing here knows what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol

from django.core.checks import CheckMessage

from ..exceptions import LockError
from .snapshot import State


@dataclass(frozen=True, slots=True)
class Row:
    """Something that is held; or that cannot be judged.

    id, version: what a retry job needs. state: of the work, beside the lock. failed: the state that it gets when it is
    released. since, seconds: since when and for how long it has been held, for people, by the server's clock. left:
    seconds until it is stale, negative after that; None without a time. damage: why it cannot be judged, and is left as
    it is; empty otherwise. token: what the holder has left there, for code only.
    """

    id: Any
    version: int = 0
    holder: str | None = None
    state: str | None = None
    failed: str | None = None
    since: datetime | None = None
    seconds: float = 0.0
    damage: str = ""
    left: float | None = None
    token: object = field(default=None, compare=False, repr=False)

    @property
    def lock_state(self) -> State:
        """Whether it is held, stale or damaged; or free."""
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


@dataclass(slots=True)
class Swept:
    """What a sweep found and did.

    cleared: what was released; one that is acquired in the same moment is counted, but not listed. count: how many were
    released. found: how many were stale when they were looked for. dated: how many were held without a time; they
    become stale from now on. damaged: what cannot be judged, or that MongoDB refuses to write, and was left as it is.
    """

    cleared: list[Row] = field(default_factory=list)
    count: int = 0
    found: int = 0
    dated: int = 0
    damaged: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows are meant: in this state ("all", "held", "stale", "damaged"); of this owner; stale for so many
    seconds already; with one of these ids."""

    state: str = "all"
    owner: str | None = None
    older_than: float = 0.0
    ids: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many are held, stale or damaged under the lock *lock*. longest: seconds for which one of them has been held.

    more: there are more than were counted. error: why they could not be read; empty otherwise.
    """

    lock: str
    held: int = 0
    stale: int = 0
    damaged: int = 0
    longest: float = 0.0
    more: bool = False
    error: str = ""


class LockKind(Protocol):
    """Locks of one kind. name: for commands and pages. model, alias: where the rows are, if Django knows.

    Each of these may raise LockError or ImproperlyConfigured.
    """

    name: str

    @property
    def model(self) -> Any: ...
    @property
    def alias(self) -> str | None: ...
    def rows(self, choice: Choice, limit: int = 0) -> list[Row]:
        """Return the rows that are meant, the one held for longest first; limit 0: all."""

    def counts(self) -> Counts:
        """Count the rows."""

    def clear(self, choice: Choice, *, batch: int) -> Swept:
        """Release those that are stale. The server looks again in the same moment."""

    def force(self, shown: Iterable[Row], *, by: str, reason: str) -> list[Row]:
        """Take these from their holders, if they still have them; return those that were released."""

    def ids(self, text: str) -> list[Any]:
        """Return what an id may be that is shown as *text*."""

    def check_id(self, id: object) -> Any:  # noqa: A002
        """Return an id that comes from outside. Raises TypeError or ValueError for what can be none."""

    def checks(self) -> Iterator[CheckMessage]:
        """Ask the server what would go wrong."""


#: Each returns the kinds that it knows now.
sources: Final[list[Callable[[], Iterable[LockKind]]]] = []


def kinds() -> list[LockKind]:
    """Return all kinds, by name."""
    return sorted((kind for source in sources for kind in source()), key=lambda kind: kind.name)


def find_kind(name: str) -> LockKind:
    """Return the kind of that name. Raises LookupError, which names those that there are."""
    found = {kind.name: kind for kind in kinds()}
    if name not in found:
        raise LookupError(f"no document lock {name!r} was declared: there are {', '.join(found) or 'none'}")
    return found[name]


def still_there(kind: LockKind, shown: Iterable[Row]) -> list[Row]:
    """Return the rows as they are now, if they still have the holder that was shown."""
    holders = {row.id: row.holder for row in shown}
    return [row for row in kind.rows(Choice(ids=list(holders))) if row.holder and row.holder == holders.get(row.id)]


def count_all() -> tuple[Counts, ...]:
    """Count the rows of all kinds. A kind that fails does not hide the others."""
    return tuple(map(_count, kinds()))


def _count(kind: LockKind) -> Counts:
    try:
        return replace(kind.counts(), lock=kind.name)
    except LockError as error:
        return Counts(kind.name, error=str(error))
