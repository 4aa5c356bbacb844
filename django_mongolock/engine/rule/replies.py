"""What the server answers: the projections that the commands ask for, and how each answer is read."""

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

#: To whom the last command has granted the key, also if the holders are damaged: the messages of bells.
BELL_MESSAGES: Final[Expression] = for_each(
    only(
        {"$cond": [{"$isArray": "$holders"}, "$holders", []]},
        {"$gte": ["$$e.acquired_at", "$written_at"]},
    ),
    {"to": "$$e.session", "grant": "$$e.grant", "token": "$$e.token", "at": "$$e.acquired_at"},
)
#: The answer to every command, and to a read: what concerns the grant asked about, and enough of the others for
#: a helpful error. Its size does not grow with the queue.
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
#: A released holder that is only kept for its minimum hold is no former grant.
_IS_FORMER: Expression = {
    "$and": [{"$eq": ["$$e.owner", "$$c.add.owner"]}, {"$not": [IS_ASKED]}, {"$not": ["$$e.released"]}]
}
REPLY: Final[RawBSONDocument] = encoded(_REPLY)
#: The answer for an owner: also which other grant of this owner holds the key.
REPLY_TO_OWNER: Final[RawBSONDocument] = encoded({**_REPLY, "former": {"$first": only("$holders", _IS_FORMER)}})
#: The answer to `short_forms.TAKE_FREE`, which `read_taken` reads.
REPLY_TAKEN: Final[RawBSONDocument] = encoded({"_id": 0, "now": "$$NOW", "token": 1, "mine": {"$first": "$holders"}})


@dataclass(frozen=True, slots=True)
class Former:
    """Another grant of the same owner, which holds the key: of a run that may have died.

    process: see `document.entry`.
    """

    grant: str
    process: str


@dataclass(frozen=True, slots=True)
class News:
    """What a bell says of one grant: that it holds the lock."""

    token: int
    acquired_at: datetime


@dataclass(frozen=True, slots=True)
class Bell:
    """A message to a session about one of its grants.

    news: another's command has granted it the lock; None: its holder is asked to release it.
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
    """Read a bell; None for what this package has not written."""
    match message:
        case {"to": str(session), "grant": str(grant), "token": int(token), "at": datetime() as at}:
            return Bell(session, grant, News(token, at))
        case {"to": str(session), "grant": str(grant)}:
            return Bell(session, grant)
    return None


def read_bells(document: Document) -> tuple[Bell, ...]:
    """Read what an answer says of others that the command has granted the key to."""
    granted = document.get("granted")
    items = granted if isinstance(granted, list) else ()  # null, where the holders are damaged
    return tuple(bell for item in items if (bell := read_bell(item)) is not None)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered about one grant of one key. Times are in seconds, and for people and timers only.

    What a holder or waiter may believe is no time of the server: it is the length that its own command asked for,
    counted from before that was sent, if *beat* shows that this command wrote the entry.

    held: whether the grant holds the key. token, acquired_at: of the grant. beat: the number of the command that last
    gave it a whole lease, or a whole place in the queue. place: how many are ahead in the queue (None: not in it).
    waiting: how long the queue is, with those of each process who stand behind its entry. first_end: until the first of
    the holders would end (None: the key is free). holder: one of them, in words, unless it is the grant itself. found:
    whether there was a document that the command matched. last_token: the last token of the key. former: another grant
    of the asking owner. bells: for others, to whom the last command has granted the key. now: the server's time. mine,
    theirs: the grant's own entry among the holders, and the first of them all, as they stand in the document.
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
        """For how many seconds the first of the holders has held the key, according to the server's clock; infinite if
        that is unknown."""
        if self.theirs is None or self.now is None:
            return math.inf
        return float(max(0.0, (self.now - self.theirs["acquired_at"]).total_seconds()))


def read_reply(key: str, raw: Document | None) -> Reply:
    """Read the answer to a step. None is the answer for a document that is not there.

    Raises LockDocumentDamaged for an answer with an entry that this package does not write.
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
    """Read the answer to `short_forms.TAKE_FREE`, which has taken a free lock: see `read_reply`."""
    mine = raw["mine"]
    return read_reply(key, {**raw, "waiting": 0, "first_end": mine.get("until"), "holder": mine})


def _read_int(document: Document, name: str) -> int:
    number = document.get(name)
    return number if isinstance(number, int) else 0


def _seconds_left(end: datetime, now: datetime, holder: Document | None) -> float:
    """How many seconds are left until *end*, for a timer: at most a whole lease, since a mere read may show an end that
    was written by another clock."""
    left = (end - now).total_seconds()
    return min(left, holder["server_lease"] / 1000) if holder else left


def _read_former(raw: object) -> Former | None:
    match raw:
        case {"grant": str(grant), "process": str(process)}:
            return Former(grant, process)
    return None


@dataclass(frozen=True, slots=True)
class Beat:
    """How a renewal found one grant: the number of the command that gave it its present lease, who requests its
    release, and its token, or 0 if it waits."""

    number: int
    release_requested_by: str | None = None
    token: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a renewal found under one key: the last token, and every grant."""

    token: int
    holders: dict[str, Beat]
    waiters: dict[str, Beat]


def read_found(document: Document) -> Found:
    """Read what a renewal found: a document, or as much of one as there is."""
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
