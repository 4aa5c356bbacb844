"""The lock document: its limits, the terms of a lock, the entries of holders and waiters, what a command asks of it,
and how damage is found.

How its shape changes. Processes of an older and a newer version share the documents during a deployment. So a field is
only ever added, and it is optional: the rule (`pipeline`, and its twin `in_python`) gives it a default where it is
missing, and keeps every field that it does not know, of the document and of each entry. A change that an older version
would get wrong takes a new `SCHEMA`: the older versions then refuse the document, and say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from bson.int64 import Int64
from bson.timestamp import Timestamp

from ...exceptions import LockDocumentDamaged, printable
from ..text_checks import tidy_fact

Mode = Literal["exclusive", "shared", "semaphore"]

#: The version of the document's shape, its field `v`.
SCHEMA: Final = 1
#: The largest token. Far above any real one: they start at the milliseconds since 1970.
LAST_TOKEN: Final = Int64(2**62)
LAST_CLUSTER_TIME: Final = Timestamp(2**32 - 1, 2**32 - 1)
#: The capacity of a shared lock: any number, up to `MAX_HOLDERS`.
UNLIMITED: Final = 2**31 - 1
#: How many may hold a key at once, whatever its capacity: every change of a lock writes all of its document.
MAX_HOLDERS: Final = 5_000
#: A document with more holders and waiters was not written by this package. The rule takes the server a time that grows
#: with them, and no time limit stops it in the middle of one document.
MAX_ENTRIES: Final = 12_000
#: How many tombstones a document has at most, the newest ones. Without an older one, a late command may leave an entry
#: that no process renews: it ends with its lease.
MAX_TOMBSTONES: Final = 256
#: A clock that shows this many milliseconds less than before was set back. If it is less, commands wait for it.
LEAP: Final = 1_000
#: How long somebody may say to have waited, in milliseconds: it is by a clock that nobody can check.
LONGEST_CLAIM: Final = 600_000
#: How much later another primary's clock may show than the last write for the two to count as one clock, in
#: milliseconds. Only for the order in a queue, never for the end of a lease.
SAME_TIME: Final = 20_000
#: How long the document of a free lock is kept for which there was never a queue, in milliseconds: enough for its
#: fencing tokens to go on growing, as tokens are at least the time. So keys that strangers make up are not kept for
#: long. It is this long at least, and up to an hour longer: see `PURGE_STEP`.
BRIEF_RETENTION: Final = 3_600_000


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a lock is asked for: of what was chosen (`LockOptions`, with the project's settings for the rest),
    that which the rule needs to know. Times are in seconds.

    lease: how long a grant lives without renewal. margin: the least time by which the server lets it live longer than
    its holder believes; clock_margin: the same as a part of the lease. waiter_lease: how long an entry in the queue
    lives without renewal, no longer than the lease. min_hold: how long a grant stays at least, even if it is released
    before. capacity: how many may hold the key at once, in this mode. weight: as how many of them this one counts.
    resize: whether the holders may have another capacity; then the smallest counts.
    """

    mode: Mode = "exclusive"
    capacity: int = 1
    lease: float = 30.0
    margin: float = 1.0
    waiter_lease: float = 10.0
    min_hold: float = 0.0
    owner: str | None = None
    clock_margin: float = 0.1
    resize: bool = True
    weight: int = 1

    def server_lease_of(self, lease: float) -> float:
        """How long the server lets a grant of that *lease* live without renewal."""
        return lease + self._margin_of(lease)

    def holder_lease_of(self, server_lease: float) -> float:
        """How long the holder may count on what the server lets live for *server_lease*."""
        return server_lease - self._margin_of(server_lease)

    def _margin_of(self, lease: float) -> float:
        """How much longer the server lets a lease live than its holder believes: no two clocks run equally fast."""
        return max(self.margin, lease * self.clock_margin)

    @property
    def server_lease(self) -> float:
        """How long the server lets a grant live without renewal."""
        return self.server_lease_of(self.lease)


def entry(
    grant: str, session: str, terms: Terms, facts: Mapping[str, str | int], worker: str = "", *, process: str = ""
) -> dict[str, Any]:
    """The entry of one grant, as it stands among the waiters and then among the holders of its document.

    worker: a name of the thread or task, by which deadlocks are found. process: a name of the process, by which an
    owner finds out that its former process is gone (`processes`).
    """
    made: dict[str, Any] = {
        **facts,
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
    if terms.weight > 1:
        made["more_permits"] = terms.weight - 1
    if terms.owner is not None:
        made |= {"owner": terms.owner, "process": process}
    return made


@dataclass(frozen=True, slots=True)
class Limits:
    """What is the same for every command of a session. Times are in milliseconds.

    waiters: how long a queue may be. retention: how long the document of a free lock is kept, at least, if there has
    been a queue for it.
    """

    waiters: int = 1_000
    retention: int = 7 * 24 * 3_600_000

    def brief(self, tombstone_ttl: int) -> int:
        """Return how long the document of a free lock is kept without a queue: no less than its tombstones."""
        return min(self.retention, max(BRIEF_RETENTION, tombstone_ttl))


@dataclass(frozen=True, slots=True)
class Step:
    """What one command asks of the rule. Times are in milliseconds.

    ask: the grant id that the answer is about. add: a new entry (`document.entry`). trial: it must not stay in
    the queue. remove, renew: grant ids. tombstone_ttl: how long a tombstone keeps the removed ids out, 0 for none.
    force: end a minimum hold too. lease, server_lease: lengthen the lease of the renewed grants to this. beat: the
    number of the command, which it leaves on each entry that it gives a whole lease or a whole place in the queue: only
    the session that finds it there may count on them. request_release_of: ids of holders that *requested_by* asks to
    release the lock. given: apply the step only while this grant holds the lock. resumes: the new entry takes the place
    of the removed. waited: for how long the new entry has waited already. behind: for each renewed waiter, how many of
    its process wait behind it.
    """

    ask: str = ""
    add: dict[str, Any] | None = None
    trial: bool = False
    remove: tuple[str, ...] = ()
    renew: tuple[str, ...] = ()
    tombstone_ttl: int = 0
    force: bool = False
    lease: int = 0
    server_lease: int = 0
    beat: int = 0
    given: str = ""
    request_release_of: tuple[str, ...] = ()
    requested_by: str = ""
    resumes: bool = False
    waited: int = 0
    behind: tuple[int, ...] = ()

    @property
    def owner(self) -> str | None:
        """The owner that its new entry names, if it has one."""
        return None if self.add is None else self.add.get("owner")

    @property
    def upserts(self) -> bool:
        """Whether it may make the document. Not with a condition: that would be seeded into the new one."""
        return (self.add is not None or self.tombstone_ttl > 0) and not self.given

    @property
    def only_adds(self) -> bool:
        """Whether it does nothing but add an entry."""
        return self.add is not None and not (self.remove or self.renew or self.given or self.waited)

    def arguments(self, limits: Limits, clock: object, cluster_time: object) -> dict[str, Any]:
        """The command's ``let``.

        clock: names the primary that evaluates it. cluster_time: an expression for that primary's cluster time; None
        where it has none.
        """
        values: dict[str, Any] = {
            "ask": self.ask,
            "clock": clock,
            "retention": Int64(limits.retention),
            "brief": Int64(limits.brief(self.tombstone_ttl)),
            "beat": Int64(self.beat),
        }
        if self.add is not None:
            values |= {"add": self.add, "waiters": limits.waiters}
        if self.waited:
            values["waited"] = Int64(self.waited)
        if self.behind:
            values["behind"] = self.behind
        if self.remove:
            values |= {"remove": self.remove, "tombstone_ttl": Int64(self.tombstone_ttl)}
        if self.renew:
            values |= {"renew": self.renew, "lease": Int64(self.lease), "server_lease": Int64(self.server_lease)}
        if self.request_release_of:
            values |= {"request_release_of": self.request_release_of, "requested_by": self.requested_by}
        return {"c": {"$literal": values}, "op": cluster_time}


#: What every entry and every document must have: where one of these is missing, the document is damaged. A new field is
#: optional, and does not belong here (see the schema above).
WAITER_FIELDS: Final[dict[str, type]] = {
    "grant": str, "session": str, "worker": str, "mode": str, "capacity": int, "lease": Int64, "server_lease": Int64,
    "waiter_lease": Int64, "min_hold": Int64, "since": datetime, "until": datetime,
}  # fmt: skip
#: What a grant adds to them.
GRANTED_FIELDS: Final[dict[str, type]] = {"acquired_at": datetime, "token": Int64}
HOLDER_FIELDS: Final[dict[str, type]] = {**WAITER_FIELDS, **GRANTED_FIELDS}
DOCUMENT_FIELDS: Final[dict[str, type]] = {
    "v": int, "holders": list, "waiters": list, "tombstones": list, "clock": str, "token": Int64,
    "written_at": datetime, "purge_at": datetime, "changes": Int64, "acquisitions": Int64, "contended": Int64,
    "expired": Int64, "waited_ms": Int64, "held_ms": Int64, "longest_wait_ms": Int64, "longest_hold_ms": Int64,
}  # fmt: skip


def _wrong_field(document: object, types: Mapping[str, type]) -> str | None:
    if not isinstance(document, Mapping):
        return "it is not a document"
    for name, type_ in types.items():
        if type(document.get(name)) is not type_:
            return f"its field {name!r} is {_bson_name(document.get(name))}, not {type_.__name__}"
    return None


def _bson_name(value: object) -> str:
    return "missing" if value is None else type(value).__name__


def weight(entry: Mapping[str, Any]) -> int:
    """As how many holders this one counts."""
    return 1 + int(entry.get("more_permits", 0))


def is_holder(value: object) -> bool:
    return _wrong_field(value, HOLDER_FIELDS) is None


def is_waiter(value: object) -> bool:
    return _wrong_field(value, WAITER_FIELDS) is None


def find_damage(document: Mapping[str, Any]) -> str | None:
    """Say what makes a stored document unusable, or None if it can be used."""
    version = document.get("v")
    if isinstance(version, int) and version > SCHEMA:  # first: its other fields may have another shape
        return f"{LockDocumentDamaged.NEWER} (version {version}, and this one knows version {SCHEMA})"
    # A standalone server has no cluster time.
    types = DOCUMENT_FIELDS if document.get("cluster_time") is None else {**DOCUMENT_FIELDS, "cluster_time": Timestamp}
    if problem := _wrong_field(document, types):
        return problem
    if document["v"] != SCHEMA:
        return f"its version is {document['v']}, and this release of django_mongolock knows version {SCHEMA}"
    if document["token"] >= LAST_TOKEN:
        return "its token is too large"
    if (size := len(document["holders"]) + len(document["waiters"])) > MAX_ENTRIES:
        return f"it has {size} holders and waiters"
    return _find_damaged_entry(document)


def _find_damaged_entry(document: Mapping[str, Any]) -> str | None:
    for name, types in (("holders", HOLDER_FIELDS), ("waiters", WAITER_FIELDS)):
        for number, item in enumerate(document[name]):
            if problem := _wrong_field(item, types):
                return f"{name}[{number}]: {problem}"
    return None


def describe(holder: Mapping[str, Any], now: datetime) -> str:
    """Say in one line who a holder or waiter is, and for how long. Never shows a grant id.

    It goes into errors and logs: whatever was written into the document, it is one line, and a short one.
    """
    facts = {name: tidy_fact(holder.get(name) or "") for name in ("label", "place", "owner", "user", "host", "pid")}
    label, place, host, pid = facts["label"], facts["place"], facts["host"] or "?", facts["pid"]
    if holder.get("released"):
        return f"released, and kept locked for its minimum hold (host {host})"
    words = [word for word in ("" if label in place else label, place) if word]
    words += [f"{name} {facts[name]}" for name in ("owner", "user") if facts[name] and facts[name] not in place.split()]
    # A claim and an edit lock have no process, and a description of that in place of the host.
    words.append(host if facts["host"] and not pid else f"host {host} pid {pid or '?'}")
    acquired_at = holder.get("acquired_at")  # in a waiter's entry, this package did not write it
    since = acquired_at if isinstance(acquired_at, datetime) else holder["since"]
    words.append(f"for {max(0.0, (now - since).total_seconds()):.1f} s")
    return printable(", ".join(words))
