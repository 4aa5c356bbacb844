"""Kinds of locks: the interface that lists, pages, commands, counts and checks use, and the selection of locks.

Named locks are the first kind. An app with another kind adds to `sources` in its AppConfig.ready().

In a key pattern, ``*`` is any text, ``?`` is one character, and everything else is itself. A pattern becomes a range of
keys for the index of ``_id``, and a regular expression. The expression never backtracks to a star that it has passed.
Its time is proportional to the length of a key, whatever the pattern.
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
from django.utils.safestring import SafeString

from ..engine.text_checks import MAX_KEY_BYTES, check_text
from ..exceptions import LockError, printable
from . import display
from .snapshot import ShownState


@dataclass(frozen=True, slots=True)
class Row:
    """A lock of any kind, as lists, pages, commands and JSON show it.

    - key: locked key, or the id of the locked document.
    - holder: name of the holder.
    - where: place of the holder, in words.
    - since: moment since which the lock has been held, by the server's clock. None if it is not held.
    - seconds: time held, by the server's clock.
    - left: seconds until the lease ends or the lock is stale, negative after that. None without an end.
    - damage: reason why the lock cannot be judged and is left as it is. Empty without damage.
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
        """The value by which a form tells the present holders from later ones."""
        return self.holder

    @property
    def condition(self) -> str:
        """The name of the word for the state, in `display.SHOWN`."""
        return self.state

    @property
    def note(self) -> str:
        """The text below the table. Empty if the lock needs no look."""
        return ""

    @property
    def holder_html(self) -> SafeString | str:
        """The holder and its place as HTML, or the damage."""
        return printable(self.damage) or (display.named(printable(self.holder), self.where) if self.holder else "–")

    @property
    def held_html(self) -> SafeString | str:
        """The time held as HTML, with the moment of the grant as a hint."""
        return display.lasting(self.since, self.seconds)

    def cells(self) -> dict[str, object]:
        """Return the line of a command's table, by column titles. The command joins a list with commas."""
        return {
            "KEY": self.key,
            "STATE": display.SHOWN[self.condition][1],
            "HOLDER": self.damage or [each for each in (self.holder, self.where) if each],
            "HELD FOR": display.duration(self.seconds) if self.since else "-",
            "LEFT": "-" if self.left is None else display.seconds_left(self.left),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the row for programs, with moments in ISO 8601 and the facts of its kind."""
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
        """Return the facts that only this kind has."""
        return {"holder": self.holder}


@dataclass(slots=True)
class Swept:
    """The result of a sweep.

    - cleared: released locks. For named locks without a release, the locks that were stale when they were looked
      for.
    - count: number of released locks. A lock that is acquired in the same moment is counted, but not listed.
    - found: number of locks that were stale when they were looked for.
    - postponed: number of locks left because another primary wrote them. After a failover every lease gets its
      whole length once more, since its remaining time is unknown.
    - dated: number of locks that were held without a time. They become stale from now on.
    - damaged: locks that cannot be judged, or that MongoDB refuses to write. They are left as they are.
    """

    cleared: list[Any] = field(default_factory=list)
    count: int = 0
    found: int = 0
    postponed: int = 0
    dated: int = 0
    damaged: list[Any] = field(default_factory=list)

    def count_in(self, part: Swept) -> None:
        """Add the numbers and the damaged locks of *part*."""
        self.count += part.count
        self.found += part.found
        self.postponed += part.postponed
        self.dated += part.dated
        self.damaged += part.damaged


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection of locks.

    - state: "all", "held", "stale", "damaged". Named locks have also "kept", "waited" and "free".
    - owner: owner of one of the holders.
    - older_than: least number of seconds for which the lock has been stale.
    - ids: keys or ids to choose from.
    - key: keys to choose from, for named locks. None: the keys of this project.
    """

    state: str = "all"
    owner: str | None = None
    older_than: float = 0.0
    ids: Sequence[Any] | None = None
    key: KeyMatch | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of held, stale and damaged locks of one kind.

    - longest_held_seconds: time for which the longest held lock has been held.
    - more: whether there are more locks than were counted.
    - error: reason why the locks could not be read. Empty without an error.
    """

    kind: str
    held: int = 0
    stale: int = 0
    damaged: int = 0
    longest_held_seconds: float = 0.0
    more: bool = False
    error: str = ""


#: The errors of a kind whose locks cannot be read or changed now.
UNREADABLE: Final = (LockError, ImproperlyConfigured)


class LockKind(Protocol):
    """Locks of one kind. Each method may raise `UNREADABLE`.

    - name: name in commands and addresses.
    - title: name in a sentence, such as "locks".
    - model, alias: model and the database, if Django knows them.
    - taken: states in which `force` takes a lock from its holder.
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
        """Read up to *limit* chosen locks (0: all). The longest held, or the first to end, comes first."""

    def again(self, shown: Sequence[tuple[Any, Any]]) -> Sequence[Row]:
        """Read again the locks that a form shows, by keys and seals. Holders that the form did not show are left out.

        Raises TypeError or ValueError for values that no form contains.
        """

    def ids(self, text: str) -> list[Any]:
        """Return the keys that may be shown as *text*. Raises ValueError for a text that is no key."""

    def counts(self) -> Counts:
        """Count the locks."""

    def clear(self, choice: Choice, *, dry_run: bool) -> Iterator[Swept]:
        """Release the stale locks in batches, or only find them. The update on the server checks again that they are
        stale.
        """

    def force(self, shown: Iterable[Any], *, by: str, reason: str) -> Sequence[Row]:
        """Take these rows from their holders if these still have them. Return the released rows."""

    def checks(self, databases: Sequence[str]) -> Iterator[CheckMessage]:
        """Check the server for problems if it serves one of these databases."""


#: Functions that return the kinds in one database, or in all. The first source has the named locks.
sources: Final[list[Callable[[str | None], Iterable[LockKind]]]] = []


def kinds(using: str | None = None) -> list[LockKind]:
    """Return the named locks, followed by all other kinds by name.

    - using: only database to look at.
    """
    first, *others = (list(source(using)) for source in sources)
    return first + sorted((kind for found in others for kind in found), key=lambda kind: kind.name)


def other_kinds() -> list[LockKind]:
    """Return all kinds but the named locks. The admin lists named locks on a page of their own."""
    return kinds()[1:]


def find_kind(name: str, using: str | None = None) -> LockKind:
    """Return the kind of that name. Raises LookupError with the existing names."""
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
    """Keys from *low* on and below *high* (empty: no end) in which *regex* is found (empty: any)."""

    low: str = ""
    high: str = ""
    regex: str = ""

    def query(self, field: str = "_id") -> dict[str, Any]:
        """Return the condition on the field, {} for every key."""
        conditions = {"$gte": self.low, "$lt": self.high, "$regex": self.regex}
        return {field: found} if (found := {name: value for name, value in conditions.items() if value}) else {}


EVERY_KEY: Final = KeyMatch()


def starting(prefix: str) -> KeyMatch:
    """Return the match of the keys that start with *prefix*."""
    return KeyMatch(prefix, _end(prefix))


def glob(pattern: str, prefix: str = "") -> KeyMatch:
    """Return the match of the keys that match *pattern* as a whole.

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
    """Return the first text after all texts that start with *prefix*, in the order of their bytes."""
    for length in range(len(prefix), 0, -1):
        following = ord(prefix[length - 1]) + 1
        while following <= 0x10FFFF and unicodedata.category(chr(following)) == "Cs":
            following += 1
        if following <= 0x10FFFF:
            return prefix[: length - 1] + chr(following)
    return ""
