"""The answers of the server, as projections that the commands ask for, and functions that read each answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from bson.raw_bson import RawBSONDocument

from ...exceptions import LockDocumentDamaged
from ..text_checks import tidy_fact
from .document import describe, is_holder, is_waiter
from .expressions import IS_ASKED, Expression, encoded, for_each, only, size

Document = Mapping[str, Any]

#: The grants of the last command, as the messages of bells. Damaged holders count as none.
BELL_MESSAGES: Final[Expression] = for_each(
    only(
        {"$cond": [{"$isArray": "$holders"}, "$holders", []]},
        {"$gte": ["$$e.acquired_at", "$written_at"]},
    ),
    {"to": "$$e.session", "grant": "$$e.grant", "token": "$$e.token", "at": "$$e.acquired_at"},
)
#: The answer to every command and read. The answer describes the asked grant, and enough of the others for a helpful
#: error. The size of the answer does not grow with the queue.
_REPLY: dict[str, Expression] = {
    "_id": 0,
    "now": "$$NOW",
    "token": 1,
    "mine": {"$first": only("$holders", IS_ASKED)},
    "place": {"$indexOfArray": ["$waiters.grant", "$$c.ask"]},
    "queued": {"$first": only("$waiters", IS_ASKED)},
    "waiting": {"$add": [size("$waiters"), {"$sum": "$waiters.behind"}]},
    "granted": only(BELL_MESSAGES, {"$not": [IS_ASKED]}),
    "first_end": {"$min": "$holders.until"},
    "holder": {"$first": "$holders"},
}
#: Whether a holder is a former grant. A released holder that is only kept for its minimum hold is none.
_IS_FORMER: Expression = {
    "$and": [{"$eq": ["$$e.owner", "$$c.add.owner"]}, {"$not": [IS_ASKED]}, {"$not": ["$$e.released"]}]
}
REPLY: Final[RawBSONDocument] = encoded(_REPLY)
#: The answer for an owner, with the other grant of this owner that holds the key.
REPLY_TO_OWNER: Final[RawBSONDocument] = encoded({**_REPLY, "former": {"$first": only("$holders", _IS_FORMER)}})
#: The answer to `short_forms.TAKE_FREE`, for `read_taken`.
REPLY_TAKEN: Final[RawBSONDocument] = encoded({"_id": 0, "now": "$$NOW", "token": 1, "mine": {"$first": "$holders"}})


@dataclass(frozen=True, slots=True)
class Former:
    """Another grant of the same owner that holds the key, of a run that may have died.

    - process: name of the process, see `document.entry`.
    """

    grant: str
    process: str


@dataclass(frozen=True, slots=True)
class News:
    """The news in a bell that a grant holds the lock."""

    token: int
    acquired_at: datetime


@dataclass(frozen=True, slots=True)
class Bell:
    """A message to a session about one of its grants.

    - news: present if the command of another session has granted the lock. None means a request to release the lock.
    """

    session: str
    grant: str
    news: News | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The bell as a document."""
        news = {} if self.news is None else {"token": self.news.token, "at": self.news.acquired_at}
        return {"to": self.session, "grant": self.grant, **news}


def read_bell(message: object) -> Bell | None:
    """Return the bell in *message*, or None if this package has not written it."""
    match message:
        case {"to": str(session), "grant": str(grant), "token": int(token), "at": datetime() as at}:
            return Bell(session, grant, News(token, at))
        case {"to": str(session), "grant": str(grant)}:
            return Bell(session, grant)
    return None


def read_bells(document: Document) -> tuple[Bell, ...]:
    """Return the bells in an answer, for others to whom the command has granted the key."""
    granted = document.get("granted")
    items = granted if isinstance(granted, list) else ()  # null if the holders are damaged
    return tuple(bell for item in items if (bell := read_bell(item)) is not None)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of the server about one grant of one key. Times are in seconds, and for people and timers only.

    No time of the server tells a holder or waiter how long to rely on its entry. If *beat* shows that its own command
    wrote the entry, the entry lives for the length that the command asked for, counted from before the command was
    sent.

    - held: whether the grant holds the key.
    - token, acquired_at: fencing token and moment of the grant.
    - beat: number of the command that last gave the grant a whole lease, or a whole place in the queue.
    - place: number of waiters ahead in the queue (None if the grant is not in the queue).
    - waiting: length of the queue, with the waiters of each process who stand behind its entry.
    - first_end: seconds until the lease of the first holder would end (None if the key is free).
    - holder: text about one of the holders, unless that is the grant itself.
    - found: whether there was a document that the command matched.
    - last_token: last token of the key.
    - former: another grant of the asking owner.
    - bells: messages to others, to whom the last command has granted the key.
    - now: time of the server.
    - mine, theirs: entry of the grant among the holders, and entry of the first holder, as in the document.
    """

    held: bool = False
    token: int = 0
    acquired_at: datetime | None = None
    beat: int = 0
    place: int | None = None
    waiting: int = 0
    first_end: float | None = None
    holder: str | None = None
    found: bool = True
    last_token: int = 0
    former: Former | None = None
    bells: tuple[Bell, ...] = ()
    now: datetime | None = field(default=None, compare=False)
    mine: Document | None = field(default=None, compare=False, repr=False)
    theirs: Document | None = field(default=None, compare=False, repr=False)

    @property
    def held_for(self) -> float:
        """The seconds that the first of the holders has held the key, by the server's clock. Infinite if unknown."""
        if self.theirs is None or self.now is None:
            return math.inf
        return float(max(0.0, (self.now - self.theirs["acquired_at"]).total_seconds()))


def read_reply(key: str, raw: Document | None) -> Reply:
    """Read the answer to a step. None is the answer for a missing document.

    Raise LockDocumentDamaged for an answer with an entry that this package does not write.
    """
    if raw is None:
        return Reply(found=False)
    now: datetime = raw["now"]
    mine, holder, place, first_end, queued = (
        raw.get(name) for name in ("mine", "holder", "place", "first_end", "queued")
    )
    if not all(entry is None or is_holder(entry) for entry in (mine, holder)):
        raise LockDocumentDamaged(key, "an entry of its holders is damaged")
    if queued is not None and not is_waiter(queued):
        raise LockDocumentDamaged(key, "an entry of its waiters is damaged")
    if first_end is not None and type(first_end) is not datetime:
        raise LockDocumentDamaged(key, "an entry of its holders has no end that is a date")
    return Reply(
        held=mine is not None,
        token=mine["token"] if mine else 0,
        acquired_at=mine["acquired_at"] if mine else None,
        beat=_read_int(mine or queued or {}, "beat"),
        place=place if place is not None and place >= 0 else None,
        waiting=raw["waiting"],
        first_end=_seconds_left(first_end, now, holder) if first_end else None,
        holder=None if holder is None or holder == mine else describe(holder, now),
        last_token=_read_int(raw, "token"),
        former=_read_former(raw.get("former")),
        bells=read_bells(raw),
        now=now,
        mine=mine,
        theirs=holder,
    )


def read_taken(key: str, raw: Document) -> Reply:
    """Read the answer to `short_forms.TAKE_FREE` after it has taken a free lock: see `read_reply`."""
    mine = raw["mine"]
    return read_reply(key, {**raw, "waiting": 0, "first_end": mine.get("until"), "holder": mine})


def _read_int(document: Document, name: str) -> int:
    number = document.get(name)
    return number if isinstance(number, int) else 0


def _seconds_left(end: datetime, now: datetime, holder: Document | None) -> float:
    """Return the seconds until *end*, for a timer. The result is at most a whole lease, because a mere read may show an
    end that another clock has written."""
    left = (end - now).total_seconds()
    return min(left, holder["server_lease"] / 1000) if holder else left


def _read_former(raw: object) -> Former | None:
    match raw:
        case {"grant": str(grant), "process": str(process)}:
            return Former(grant, process)
    return None


@dataclass(frozen=True, slots=True)
class Beat:
    """One grant as a renewal found it.

    - number: number of the command that gave the grant its present lease.
    - release_requested_by: text that says who requests the release.
    - token: fencing token, or 0 if the grant waits.
    """

    number: int
    release_requested_by: str | None = None
    token: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of a renewal under one key, with the last token, and every grant."""

    token: int
    holders: dict[str, Beat]
    waiters: dict[str, Beat]


def read_found(document: Document) -> Found:
    """Read the findings of a renewal from a document, or from as much of one as there is."""
    return Found(_read_int(document, "token"), _beats(document, "holders"), _beats(document, "waiters"))


def _beats(document: Document, name: str) -> dict[str, Beat]:
    entries = document.get(name)
    beats: dict[str, Beat] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and type(grant := entry.get("grant")) is str:  # bson.Code is a str without a hash
            by = entry.get("release_requested_by")
            by = tidy_fact(by) if isinstance(by, str) else None
            beats[grant] = Beat(_read_int(entry, "beat"), by, _read_int(entry, "token"))
    return beats
