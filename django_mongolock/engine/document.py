"""The lock document: what a key may be, what an entry of the queue looks like, how an answer is read.

How its shape changes. Processes of an older and a newer version share the documents while a deploy is under way. So a
field is only ever added, and it is optional: the rule (`step`, and its twin `rule`) gives it a default where it is
missing, and keeps every field that it does not know, of the document and of each entry. A change that an older version
would get wrong takes a new `SCHEMA`: then the older ones refuse the document, and say why.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from bson.int64 import Int64
from bson.timestamp import Timestamp

from ..exceptions import LockDocumentDamaged

Mode = Literal["exclusive", "shared", "semaphore"]

#: The kinds of characters that no text of ours has: controls, lone surrogates, separators of lines.
UNPRINTABLE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})

#: The version of the document's shape, its field `v`.
SCHEMA: Final = 1
#: The most bytes of UTF-8 that a key may have, prefix included.
MAX_KEY_BYTES: Final = 512
#: The most characters that a text may have before it is composed: a character has at most four parts. Composing takes
#: time that grows with the square of the length (measured: 8 s for 100,000 characters that somebody chose with care).
MAX_TEXT_LENGTH: Final = 4 * MAX_KEY_BYTES
#: The most characters that an owner, a label or another fact about a holder may have.
MAX_FACT_LENGTH: Final = 256
#: The most that a token may be. Far above any real one: they start at the milliseconds since 1970.
LAST_TOKEN: Final = Int64(2**62)
#: The capacity of a shared lock: as many as like, up to `MAX_HOLDERS`.
UNLIMITED: Final = 2**31 - 1
#: How many may hold a key at once, whatever its capacity: every change of a lock writes all of its document.
MAX_HOLDERS: Final = 5_000
#: More holders and waiters than these are in no document of ours. The rule takes the server a time that grows with
#: them, and no time limit stops it in the middle of one document.
MAX_ENTRIES: Final = 12_000
LAST_CLUSTER_TIME: Final = Timestamp(2**32 - 1, 2**32 - 1)
#: How many tombstones a document has at most, the newest ones. One that had to go may let a late command leave an entry
#: that nobody renews: it ends with its lease.
MAX_TOMBSTONES: Final = 256
#: A clock that shows so many milliseconds less than it did before was set back; if it is less, it is awaited.
LEAP: Final = 1_000
#: The margin is so great a part of the lease if nothing else is said, and at least so many seconds.
MARGIN: Final = 0.1
LEAST_MARGIN: Final = 1.0
#: Who finds so many in the queue lives in it so many times as long without renewal, but no longer than a lease.
LONG_QUEUE: Final = 32
LONG_QUEUE_FACTOR: Final = 3


def check_text(name: str, value: object) -> str:
    """Return *value* if it is a plain string that can be stored and shown, composed (NFC).

    Raises TypeError for anything but `str` itself, and ValueError for control characters, line separators, lone
    surrogates, and what is far too long for anything.
    """
    if type(value) is not str:
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: pass plain text")
    check_length(name, value)
    if is_plain(value):
        return value
    for character in value:
        if unicodedata.category(character) in UNPRINTABLE:
            raise ValueError(f"{name} must not have control characters or lone surrogates: found {character!a}")
    return unicodedata.normalize("NFC", value)


def is_plain(text: str) -> bool:
    """Is it without control characters, and composed, at the first glance? Most text is."""
    return text.isascii() and text.isprintable()


def check_length(name: str, text: str) -> None:
    """Raise ValueError for a text that is too long to be looked at, whatever is in it."""
    if len(text) > MAX_TEXT_LENGTH:
        raise ValueError(f"{name} has at most {MAX_KEY_BYTES} bytes: this one has {len(text)} characters")


def check_key(key: object, prefix: str = "") -> str:
    """Return the id of the document of *key*: prefix and key, composed (NFC).

    Raises TypeError or ValueError, and always before anything is sent.
    """
    text = check_text("a lock key", key)
    if not text:
        raise ValueError("a lock key must not be empty")
    text = unicodedata.normalize("NFC", prefix + text)
    if (size := len(text.encode())) > MAX_KEY_BYTES:
        raise ValueError(f"a lock key has at most {MAX_KEY_BYTES} bytes, prefix included: this one has {size}")
    return text


def check_fact(name: str, value: object) -> str | None:
    """Return *value* as it may be stored beside a holder, or None if there is none. Raises TypeError, ValueError."""
    if value is None:
        return None
    text = check_text(name, value)
    if not text or len(text) > MAX_FACT_LENGTH:
        raise ValueError(f"{name} has 1 to {MAX_FACT_LENGTH} characters: this one has {len(text)}")
    return text


def tidy_fact(value: object) -> str:
    """Return *value* as text that may be stored, whatever it was: for facts that we look up, not the caller."""
    text = str(value)[:MAX_FACT_LENGTH]
    if is_plain(text):
        return text
    text = "".join("?" if unicodedata.category(c) in UNPRINTABLE else c for c in text)
    return unicodedata.normalize("NFC", text)[:MAX_FACT_LENGTH]


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def margin_of(lease: float, part: float = MARGIN, least: float = LEAST_MARGIN) -> float:
    """How much longer the server lets a lease live than its holder believes, since no two clocks run equally fast."""
    return max(least, lease * part)


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a lock is asked for. Times are in seconds.

    lease: how long a grant lives without renewal. margin: the least time by which the server lets it live longer than
    its holder believes; clock_margin: the same as a part of the lease. waiter_lease: how long an entry in the queue
    lives without renewal, no longer than the lease; one that comes when the queue is long lives `LONG_QUEUE_FACTOR` as
    long. min_hold: how long a grant stays at least, even if it is released before. capacity: how many may hold the key
    at once, in this mode.
    """

    mode: Mode = "exclusive"
    capacity: int = 1
    lease: float = 30.0
    margin: float = LEAST_MARGIN
    waiter_lease: float = 10.0
    min_hold: float = 0.0
    owner: str | None = None
    clock_margin: float = MARGIN

    def server_lease_of(self, lease: float) -> float:
        """How long the server lets a grant of that *lease* live without renewal."""
        return lease + margin_of(lease, self.clock_margin, self.margin)

    def holder_lease_of(self, server_lease: float) -> float:
        """How long the holder may count on what the server lets live for *server_lease*."""
        return server_lease - margin_of(server_lease, self.clock_margin, self.margin)

    @property
    def server_lease(self) -> float:
        """How long the server lets a grant live without renewal."""
        return self.server_lease_of(self.lease)


def entry(
    grant: str, session: str, terms: Terms, facts: Mapping[str, str | int], worker: str = "", *, process: str = ""
) -> dict[str, Any]:
    """The entry of one grant, as it stands among the waiters and then among the holders of its document.

    worker: a name of the thread or task, by which deadlocks are found. process: a name of the process, by which an
    owner finds out that its former one is gone (`processes`).
    """
    made: dict[str, Any] = {
        "grant": grant,
        "session": session,
        "worker": worker,
        "mode": terms.mode,
        "capacity": terms.capacity,
        "lease": Int64(milliseconds(terms.lease)),
        "server_lease": Int64(milliseconds(terms.server_lease)),
        "waiter_lease": Int64(milliseconds(terms.server_lease_of(terms.waiter_lease))),
        "min_hold": Int64(milliseconds(terms.min_hold)),
    }
    made = {**facts, **made}
    if terms.owner is not None:
        made |= {"owner": terms.owner, "process": process}
    return made


@dataclass(frozen=True, slots=True)
class Former:
    """Another grant of the same owner, which holds the key: of a run that may have died. process: see `entry`."""

    grant: str
    process: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered about one grant of one key. Times are in seconds, and for people and timers only.

    What a holder or waiter may believe is no time of the server: it is the length that its own command asked for,
    counted from before that was sent, if *beat* shows that this command wrote the entry.

    held: does the grant hold the key? token, acquired_at: of the grant. beat: the number of the command that last gave
    it a whole lease, or a whole place in the queue. place: how many are ahead in the queue (None: not in it).
    waiter_lease: how long the server lets that place live without renewal. waiting: how long the queue is, with those
    of each process who stand behind its entry. first_end: until the first of the holders would end (None: nobody holds
    it). holder: one of them, in words, unless it is the grant itself. found: was there a document that the command
    fitted? last_token: the last that was given to anybody. former: another grant of the asking owner. holder_owner: the
    owner of that holder. now: the server's time. mine, theirs: the grant's own entry among the holders, and the first
    of them all, as they stand in the document.
    """

    held: bool = False
    token: int = 0
    acquired_at: datetime | None = None
    beat: int = 0
    place: int | None = None
    waiter_lease: float = 0.0
    waiting: int = 0
    first_end: float | None = None
    holder: str | None = None
    found: bool = True
    last_token: int = 0
    former: Former | None = None
    holder_owner: str | None = None
    now: datetime | None = field(default=None, compare=False)
    mine: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    theirs: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def free(self) -> bool:
        """Does nobody hold the key, nor wait for it?"""
        return self.first_end is None and self.waiting == 0


def read_reply(key: str, raw: Mapping[str, Any] | None) -> Reply:
    """Read the answer to a step. None is the answer for a document that is not there.

    Raises LockDocumentDamaged where what came back is not what we write.
    """
    if raw is None:
        return Reply(found=False)
    now: datetime = raw["now"]
    mine, holder, place, first_end = (raw.get(name) for name in ("mine", "holder", "place", "first_end"))
    queued = raw.get("queued")
    for entry_ in (mine, holder):
        if entry_ is not None and not is_holder(entry_):
            raise LockDocumentDamaged(key, "an entry of its holders is damaged")
    if queued is not None and not is_waiter(queued):
        raise LockDocumentDamaged(key, "an entry of its waiters is damaged")
    if first_end is not None and type(first_end) is not datetime:
        raise LockDocumentDamaged(key, "an entry of its holders has no end that is a date")
    return Reply(
        held=mine is not None,
        token=mine["token"] if mine else 0,
        acquired_at=mine["acquired_at"] if mine else None,
        beat=_read_beat(mine or queued),
        place=place if place is not None and place >= 0 else None,
        waiter_lease=queued["waiter_lease"] / 1000 if queued else 0.0,
        waiting=raw["waiting"],
        first_end=_until(first_end, now, holder) if first_end else None,
        holder=None if holder is None or holder == mine else describe(holder, now),
        last_token=raw["token"] if isinstance(raw.get("token"), int) else 0,
        former=_read_former(raw.get("former")),
        holder_owner=holder.get("owner") if holder else None,
        now=now,
        mine=mine,
        theirs=holder,
    )


def read_taken(key: str, raw: Mapping[str, Any]) -> Reply:
    """Read the answer to the short form of a step, which has found a free lock and taken it: see `read_reply`."""
    mine = raw["mine"]
    return read_reply(key, {**raw, "place": -1, "waiting": 0, "first_end": mine.get("until"), "holder": mine})


def _read_beat(entry_: Mapping[str, Any] | None) -> int:
    number = entry_.get("beat") if entry_ else 0
    return number if isinstance(number, int) else 0


def _until(end: datetime, now: datetime, holder: Mapping[str, Any] | None) -> float:
    """How many seconds are left until *end*, for a timer. A mere read may show it by a clock that is none any more:
    so it is no more than a whole lease."""
    left = (end - now).total_seconds()
    return min(left, holder["server_lease"] / 1000) if holder else left


def _read_former(raw: object) -> Former | None:
    match raw:
        case {"grant": str(grant), "process": str(process)}:
            return Former(grant, process)
    return None


#: The type that every field has which we write; the same as in `step`, for the driver's side.
WAITER_FIELDS: Final[dict[str, type]] = {
    "grant": str, "session": str, "worker": str, "mode": str, "capacity": int, "lease": Int64, "server_lease": Int64,
    "waiter_lease": Int64, "min_hold": Int64, "since": datetime, "until": datetime,
}  # fmt: skip
#: What a grant adds to them.
GRANTED_FIELDS: Final[dict[str, type]] = {"acquired_at": datetime, "token": Int64}
HOLDER_FIELDS: Final[dict[str, type]] = {**WAITER_FIELDS, **GRANTED_FIELDS}
DOCUMENT_FIELDS: Final[dict[str, type]] = {
    "v": int, "holders": list, "waiters": list, "tombstones": list, "clock": str, "token": Int64, "granted": str,
    "written_at": datetime, "purge_at": datetime, "changes": Int64, "acquisitions": Int64, "contended": Int64,
    "expired": Int64, "waited_ms": Int64, "held_ms": Int64, "longest_wait_ms": Int64, "longest_hold_ms": Int64,
}  # fmt: skip


#: A standalone server has none.
_CLUSTER_TIME: Final[dict[str, type]] = {"cluster_time": Timestamp}


def _wrong_field(document: object, types: Mapping[str, type]) -> str | None:
    if not isinstance(document, Mapping):
        return "it is not a document"
    for name, type_ in types.items():
        if type(document.get(name)) is not type_:
            return f"its field {name!r} is {_bson_name(document.get(name))}, not {type_.__name__}"
    return None


def _bson_name(value: object) -> str:
    return "missing" if value is None else type(value).__name__


def is_holder(value: object) -> bool:
    return _wrong_field(value, HOLDER_FIELDS) is None


def is_waiter(value: object) -> bool:
    return _wrong_field(value, WAITER_FIELDS) is None


def find_damage(document: Mapping[str, Any]) -> str | None:
    """Say what makes a stored document unusable, or None if it can be used."""
    return _find_damage(document) or _find_damaged_entry(document)


def _find_damage(document: Mapping[str, Any]) -> str | None:
    if problem := _wrong_field(document, DOCUMENT_FIELDS):
        return problem
    cluster_time = document.get("cluster_time")
    if cluster_time is not None and (problem := _wrong_field({"cluster_time": cluster_time}, _CLUSTER_TIME)):
        return problem
    if document["v"] != SCHEMA:
        return f"its version is {document['v']}, and this release of django_mongolock knows version {SCHEMA}"
    if document["token"] >= LAST_TOKEN:
        return "its token is too large"
    if (size := len(document["holders"]) + len(document["waiters"])) > MAX_ENTRIES:
        return f"it has {size} holders and waiters"
    return None


def _find_damaged_entry(document: Mapping[str, Any]) -> str | None:
    for name, types in (("holders", HOLDER_FIELDS), ("waiters", WAITER_FIELDS)):
        for number, item in enumerate(document[name]):
            if problem := _wrong_field(item, types):
                return f"{name}[{number}]: {problem}"
    return None


@dataclass(frozen=True, slots=True)
class News:
    """What the change stream tells of one grant: that it has the lock."""

    token: int
    acquired_at: datetime


#: No more digits than make a token and a moment: the document may be somebody else's.
_NEWS: Final = re.compile(r"(\S+) ([0-9]{1,19}) ([0-9]{1,14})")


def read_news(granted: object) -> dict[str, News]:
    """Read the field `granted` of a document: ``"<grant> <token> <milliseconds since 1970>;"`` for each."""
    news: dict[str, News] = {}
    for item in granted.split(";") if isinstance(granted, str) else ():
        if (found := _NEWS.fullmatch(item)) is not None:
            grant, token, moment = found.groups()
            news[grant] = News(int(token), datetime.fromtimestamp(int(moment) / 1000, UTC))
    return news


def describe(holder: Mapping[str, Any], now: datetime) -> str:
    """Say in one line who a holder or waiter is, and for how long. Never shows a grant id.

    It goes into errors and logs: whatever was written into the document, the line is one, and not long.
    """
    facts = {name: tidy_fact(holder.get(name) or "") for name in ("label", "place", "owner", "user", "host", "pid")}
    label, place, host = facts["label"], facts["place"], facts["host"] or "?"
    if holder.get("released"):
        return f"nobody any more, but it is kept locked for a minimum hold (host {host})"
    words = [word for word in ("" if label in place else label, place) if word]
    words += [f"{name} {facts[name]}" for name in ("owner", "user") if facts[name]]
    words.append(f"host {host} pid {facts['pid'] or '?'}")
    acquired_at = holder.get("acquired_at")  # of a waiter it is nothing that we wrote
    since = acquired_at if isinstance(acquired_at, datetime) else holder["since"]
    words.append(f"for {max(0.0, (now - since).total_seconds()):.1f} s")
    return ", ".join(words)
