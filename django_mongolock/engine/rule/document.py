"""The lock document, with its limits, the terms of a lock, the entries, the steps of the rule, and damage checks.

Rules for changes of its shape. Processes of an older and a newer version share the documents during a deployment. For
that reason, a change only ever adds fields, and a new field is optional. The rule (`pipeline`, and its twin
`in_python`) gives a missing field a default, and keeps every field that it does not know, of the document and of each
entry. A change that an older version would get wrong takes a new `SCHEMA`. The older versions then refuse the document,
and say why.
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
#: The largest token. Real tokens start at the milliseconds since 1970, far below it.
LAST_TOKEN: Final = Int64(2**62)
LAST_CLUSTER_TIME: Final = Timestamp(2**32 - 1, 2**32 - 1)
#: The capacity of a shared lock. `MAX_HOLDERS` is still a limit.
UNLIMITED: Final = 2**31 - 1
#: The largest number of holders of a key, whatever its capacity. Every change of a lock writes all of its document.
MAX_HOLDERS: Final = 5_000
#: The largest number of holders and waiters. A document with more was not written by this package. The time that the
#: server needs for the rule grows with the entries, and no time limit stops the server within one document.
MAX_ENTRIES: Final = 12_000
#: The largest number of tombstones of a document. The newest are kept. Without an older one, a late command may leave
#: an entry that no process renews. Such an entry ends with its lease.
MAX_TOMBSTONES: Final = 256
#: A clock that goes back by more than this many milliseconds was set back. If it goes back by less, commands wait for
#: it.
LEAP: Final = 1_000
#: The longest time, in milliseconds, that a waiter may claim to have waited. Nobody can check the waiter's clock.
LONGEST_CLAIM: Final = 600_000
#: Two primaries' clocks count as one clock if the later one shows at most this many milliseconds more than the last
#: write. This rule is only for the order in a queue, never for the end of a lease.
SAME_TIME: Final = 20_000
#: The least time, in milliseconds, that the document of a free lock is kept if there was never a queue for it. Fencing
#: tokens go on growing without the document, because a token is at least the time. Keys that strangers make up are not
#: kept for long. The document is removed up to an hour later: see `PURGE_STEP`.
BRIEF_RETENTION: Final = 3_600_000


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True)
class Terms:
    """The choices of `LockOptions`, and the project's settings, that the rule needs to know. Times are in seconds.

    - lease: time that a grant lives without renewal.
    - margin: least time by which the server lets a grant live longer than its holder believes.
    - clock_margin: least value of this time as a part of the lease.
    - waiter_lease: time that an entry in the queue lives without renewal, no longer than the lease.
    - min_hold: time that a grant stays at least, even if it is released before.
    - capacity: number of holders that the key may have at once in this mode.
    - weight: number of holders as which this grant counts.
    - resize: whether the holders may have another capacity. If they do, the smallest counts.
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
        """Return how long the server lets a grant of that *lease* live without renewal."""
        return lease + self._margin_of(lease)

    def holder_lease_of(self, server_lease: float) -> float:
        """Return how long the holder may rely on a grant that the server lets live for *server_lease*."""
        return server_lease - self._margin_of(server_lease)

    def _margin_of(self, lease: float) -> float:
        """Return how much longer the server lets a lease live than its holder believes.

        No two clocks run equally fast.
        """
        return max(self.margin, lease * self.clock_margin)

    @property
    def server_lease(self) -> float:
        """The time that the server lets a grant live without renewal."""
        return self.server_lease_of(self.lease)


def entry(
    grant: str, session: str, terms: Terms, facts: Mapping[str, str | int], worker: str = "", *, process: str = ""
) -> dict[str, Any]:
    """Return the entry of one grant, as it stands among the waiters and later among the holders of its document.

    - worker: name of the thread or task, by which deadlocks are found.
    - process: name of the process, by which an owner finds out that its former process is gone (`processes`).
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
    """The limits that every command of a session has in common. Times are in milliseconds.

    - waiters: largest length of a queue.
    - retention: least time that the document of a free lock is kept if there has been a queue for it.
    """

    waiters: int = 1_000
    retention: int = 7 * 24 * 3_600_000

    def brief(self, tombstone_ttl: int) -> int:
        """Return how long the document of a free lock is kept without a queue, at least as long as its tombstones."""
        return min(self.retention, max(BRIEF_RETENTION, tombstone_ttl))


@dataclass(frozen=True, slots=True)
class Step:
    """The instructions of one command to the rule. Times are in milliseconds.

    - ask: grant id that the answer is about.
    - add: new entry (`document.entry`).
    - trial: whether the new entry must not stay in the queue.
    - remove, renew: grant ids.
    - tombstone_ttl: time that a tombstone keeps the removed ids out, 0 for none.
    - force: whether a minimum hold ends too.
    - lease, server_lease: times to which the leases of the renewed grants are lengthened.
    - beat: number of the command. The command leaves it on each entry that it gives a whole lease or a whole place in
      the queue. Only the session that finds its own number there may rely on them.
    - request_release_of: ids of holders that *requested_by* asks to release the lock.
    - given: grant that must hold the lock. Otherwise the step is not applied.
    - resumes: whether the new entry takes the place of the removed one.
    - waited: time that the new entry has waited already.
    - behind: for each renewed waiter, the number of waiters of its process behind it.
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
        """The owner in the new entry, if there is one."""
        return None if self.add is None else self.add.get("owner")

    @property
    def upserts(self) -> bool:
        """Whether the step may make the document.

        A condition forbids it, because an upsert seeds it into the new one.
        """
        return (self.add is not None or self.tombstone_ttl > 0) and not self.given

    @property
    def only_adds(self) -> bool:
        """Whether the step only adds an entry."""
        return self.add is not None and not (self.remove or self.renew or self.given or self.waited)

    def arguments(self, limits: Limits, clock: object, cluster_time: object) -> dict[str, Any]:
        """Return the command's ``let``.

        - clock: name of the primary that evaluates the command.
        - cluster_time: expression for that primary's cluster time (None if it has none).
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


#: The fields that every entry must have. A document without one of these, or of `DOCUMENT_FIELDS`, is damaged. A new
#: field is optional and does not belong here (see the rules at the top of this file).
WAITER_FIELDS: Final[dict[str, type]] = {
    "grant": str, "session": str, "worker": str, "mode": str, "capacity": int, "lease": Int64, "server_lease": Int64,
    "waiter_lease": Int64, "min_hold": Int64, "since": datetime, "until": datetime,
}  # fmt: skip
#: The fields that a grant adds to the entry of a waiter.
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
    """Return the number of holders as which this one counts."""
    return 1 + int(entry.get("more_permits", 0))


def is_holder(value: object) -> bool:
    return _wrong_field(value, HOLDER_FIELDS) is None


def is_waiter(value: object) -> bool:
    return _wrong_field(value, WAITER_FIELDS) is None


def find_damage(document: Mapping[str, Any]) -> str | None:
    """Return why a stored document cannot be used, or None if it can."""
    version = document.get("v")
    if isinstance(version, int) and version > SCHEMA:  # checked first, because other fields may have another shape
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
    """Return one line about a holder or waiter and its time. The line never shows a grant id.

    The line goes into errors and logs. Whatever was written into the document, the line stays short.
    """
    facts = {name: tidy_fact(holder.get(name) or "") for name in ("label", "place", "owner", "user", "host", "pid")}
    label, place, host, pid = facts["label"], facts["place"], facts["host"] or "?", facts["pid"]
    if holder.get("released"):
        return f"released, and kept locked for its minimum hold (host {host})"
    words = [word for word in ("" if label in place else label, place) if word]
    words += [f"{name} {facts[name]}" for name in ("owner", "user") if facts[name] and facts[name] not in place.split()]
    # A claim and an edit lock have no process, and their host is a description.
    words.append(host if facts["host"] and not pid else f"host {host} pid {pid or '?'}")
    acquired_at = holder.get("acquired_at")  # in a waiter's entry, this package did not write it
    since = acquired_at if isinstance(acquired_at, datetime) else holder["since"]
    words.append(f"for {max(0.0, (now - since).total_seconds()):.1f} s")
    return printable(", ".join(words))
