"""Kinds of locks: what lists, pages, commands, counts and checks need of each; and how one says which locks are meant.

Named locks are the first kind. An app that has another kind adds to `sources`, in its AppConfig.ready().

In a key pattern, ``*`` is any text, ``?`` one character, everything else itself. It becomes a range of keys, which the
index of ``_id`` finds, and a regular expression. Whatever the pattern, the expression takes time in proportion to the
length of a key: it never goes back to a star that it has passed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured

from ..engine.text_checks import MAX_KEY_BYTES, check_text
from ..exceptions import LockError
from . import display
from .snapshot import ShownState


@dataclass(frozen=True, slots=True)
class Row:
    """A lock as lists, pages, commands and JSON have it, of any kind.

    key: what it is a lock on: a key, or the id of a document. holder, where: who has it and where, in words. since,
    seconds: since when and for how long it has been held, by the server's clock. since: None if it is not held. left:
    seconds until its lease ends, or until it is stale, negative after that; None without an end. damage: why it cannot
    be judged, and is left as it is; empty otherwise.
    """

    key: Any
    state: ShownState
    holder: str | None = None
    where: str = ""
    since: datetime | None = None
    seconds: float = 0.0
    left: float | None = None
    damage: str = ""

    @property
    def seal(self) -> Any:
        """What tells its holders from later ones, as a form carries it."""
        return self.holder

    @property
    def condition(self) -> str:
        """The name of the word for its state, in `display.SHOWN`."""
        return self.state

    @property
    def note(self) -> str:
        """What is said of it below the table; empty if it needs no look."""
        return ""

    def cells(self) -> dict[str, object]:
        """Its line in the table of a command, by the titles of the columns. A list is joined by commas."""
        return {
            "KEY": self.key,
            "STATE": display.SHOWN[self.condition][1],
            "HOLDER": self.damage or [each for each in (self.holder, self.where) if each],
            "HELD FOR": display.duration(self.seconds) if self.since else "-",
            "LEFT": "-" if self.left is None else display.seconds_left(self.left),
        }

    def as_json(self) -> dict[str, Any]:
        """For programs, with moments in ISO 8601 and what only its kind has."""
        return {
            "key": str(self.key),
            "state": self.state.value,
            "since": self.since.isoformat() if self.since else None,
            "held_seconds": round(self.seconds, 3) if self.since else None,
            "left_seconds": None if self.left is None else round(max(0.0, self.left), 3),
            "over_seconds": None if self.left is None else round(max(0.0, -self.left), 3),
            "damage": self.damage or None,
            **self.facts(),
        }

    def facts(self) -> dict[str, Any]:
        """What only its kind has."""
        return {"holder": self.holder}


@dataclass(slots=True)
class Swept:
    """What a sweep found and did.

    cleared: what was released; of named locks, and without a release, what was stale when it was looked for. count: how
    many were released; one that is acquired in the same moment is counted, but not listed. found: how many were stale
    when they were looked for. postponed: how many are left because another primary wrote them: after a failover every
    lease gets its whole length once more, since its remaining time is unknown. dated: how many were held without a
    time; they become stale from now on. damaged: what cannot be judged, or that MongoDB refuses to write, and was left
    as it is.
    """

    cleared: list[Any] = field(default_factory=list)
    count: int = 0
    found: int = 0
    postponed: int = 0
    dated: int = 0
    damaged: list[Any] = field(default_factory=list)

    def count_in(self, part: Swept) -> None:
        """Add the numbers of *part*, and what is damaged."""
        self.count += part.count
        self.found += part.found
        self.postponed += part.postponed
        self.dated += part.dated
        self.damaged += part.damaged


@dataclass(frozen=True, slots=True)
class Choice:
    """Which locks are meant.

    state: "all", "held", "stale", "damaged", and of named locks "kept", "waited" or "free". owner: of one of the
    holders. older_than: for how many seconds they have been stale already, at least. ids: with one of these keys or
    ids. key: of named locks, whose keys match; None: those of this project.
    """

    state: str = "all"
    owner: str | None = None
    older_than: float = 0.0
    ids: Sequence[Any] | None = None
    key: KeyMatch | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of a kind are held, stale or damaged. longest_held_seconds: for how long one of them has been held.

    more: there are more than were counted. error: why they could not be read; empty otherwise.
    """

    kind: str
    held: int = 0
    stale: int = 0
    damaged: int = 0
    longest_held_seconds: float = 0.0
    more: bool = False
    error: str = ""


#: What a kind of locks raises that cannot be read or changed now.
UNREADABLE: Final = (LockError, ImproperlyConfigured)


class LockKind(Protocol):
    """Locks of one kind. Each method may raise `UNREADABLE`.

    name: for commands and addresses. title: what they are in a sentence, such as "locks". model, alias: where they are,
    if Django knows. taken: the states in which `force` takes a lock from its holder.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def model(self) -> Any: ...
    @property
    def alias(self) -> str | None: ...
    @property
    def taken(self) -> tuple[ShownState, ...]: ...
    def rows(self, choice: Choice, limit: int = 0) -> Iterable[Row]:
        """Read those that are meant, the one held for longest, or that ends first, at the top; limit 0: all."""

    def again(self, shown: Sequence[tuple[Any, Any]]) -> Sequence[Row]:
        """Read again what a form shows, by keys and seals: with the holders that were shown, and no others.

        Raises TypeError or ValueError for what no form has.
        """

    def ids(self, text: str) -> list[Any]:
        """Return what a key may be that is shown as *text*. Raises ValueError for a text that can be none."""

    def counts(self) -> Counts:
        """Count them."""

    def clear(self, choice: Choice, *, dry_run: bool) -> Iterator[Swept]:
        """Release those that are stale, part by part; or only find them. The server looks again in the same moment."""

    def force(self, shown: Iterable[Any], *, by: str, reason: str) -> Sequence[Row]:
        """Take these rows from their holders, if they still have them; return those that were released."""

    def checks(self, databases: Sequence[str]) -> Iterator[CheckMessage]:
        """Ask the server what would go wrong, if it is one of these databases."""


#: Each returns the kinds that it knows now, in a database or in all. Named locks are the first.
sources: Final[list[Callable[[str | None], Iterable[LockKind]]]] = []


def kinds(using: str | None = None) -> list[LockKind]:
    """Return the named locks, and then all other kinds by name. using: only what is in this database."""
    first, *others = (list(source(using)) for source in sources)
    return first + sorted((kind for found in others for kind in found), key=lambda kind: kind.name)


def other_kinds() -> list[LockKind]:
    """Return all kinds but the named locks, which have a list of their own in the admin."""
    return kinds()[1:]


def find_kind(name: str, using: str | None = None) -> LockKind:
    """Return the kind of that name. Raises LookupError, which names those that there are."""
    found = {kind.name: kind for kind in (*other_kinds(), *kinds(using))}
    if name not in found:
        raise LookupError(f"no kind of locks is named {name!r}: there are {', '.join(found)}")
    return found[name]


def count_all(found: Iterable[LockKind]) -> tuple[Counts, ...]:
    """Count the locks of these kinds. A kind that fails does not hide the others."""
    return tuple(map(_count, found))


def _count(kind: LockKind) -> Counts:
    try:
        return replace(kind.counts(), kind=kind.name)
    except UNREADABLE as error:
        return Counts(kind.name, error=str(error))


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """Keys from *low* on and below *high* ("": no end) in which *regex* is found ("": any)."""

    low: str = ""
    high: str = ""
    regex: str = ""

    def query(self, field: str = "_id") -> dict[str, Any]:
        """The condition on the field; {} for every key."""
        conditions = {"$gte": self.low, "$lt": self.high, "$regex": self.regex}
        return {field: found} if (found := {name: value for name, value in conditions.items() if value}) else {}


EVERY_KEY: Final = KeyMatch()


def starting(prefix: str) -> KeyMatch:
    """Keys that start with *prefix*."""
    return KeyMatch(prefix, _end(prefix))


def glob(pattern: str, prefix: str = "") -> KeyMatch:
    """Keys that match *pattern* as a whole.

    A pattern that does not start with the *prefix* of the project's keys gets it. Raises ValueError for a pattern that
    no key can match.
    """
    text = check_text("a key pattern", pattern)
    if not text or len(text.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"a key pattern has 1 to {MAX_KEY_BYTES} bytes")
    text = text if text.startswith(prefix) else prefix + text
    literal = re.split(r"[*?]", text, maxsplit=1)[0]
    first, *middle = (_piece(piece) for piece in re.split(r"\*+", text))
    if not middle:
        return KeyMatch(literal, _end(literal), rf"(?s)^{first}\z")
    *middle, last = middle
    regex = f"(?s)^{first}" + "".join(f"(?>.*?{piece})" for piece in middle)
    return KeyMatch(literal, _end(literal), rf"{regex}.*{last}\z" if last else regex)


def _piece(piece: str) -> str:
    return "".join("." if character == "?" else re.escape(character) for character in piece)


def _end(prefix: str) -> str:
    """The first text after all those that start with *prefix*, in the order of their bytes."""
    for length in range(len(prefix), 0, -1):
        following = ord(prefix[length - 1]) + 1
        while following <= 0x10FFFF and unicodedata.category(chr(following)) == "Cs":
            following += 1
        if following <= 0x10FFFF:
            return prefix[: length - 1] + chr(following)
    return ""
