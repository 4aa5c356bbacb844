"""What one command asks of the rule, and what is the same for every command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bson.int64 import Int64

#: How long the document of a free lock is kept for which there was never a queue, in milliseconds: enough for its
#: fencing tokens to go on growing, as tokens are at least the time. So keys that strangers make up are not kept for
#: long.
BRIEF_RETENTION: Final = 3_600_000


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
