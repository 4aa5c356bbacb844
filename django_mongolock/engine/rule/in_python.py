"""The rule of `pipeline` in plain Python, on the same documents.

This module is the executable specification of the rule, and runs the locks in memory. A test sends the same steps in
any order to MongoDB's primary and to this module, and compares every field of the two documents. The filters of the
commands and the reply follow the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from bson.int64 import Int64
from bson.timestamp import Timestamp

from .document import LEAP, LONGEST_CLAIM, MAX_HOLDERS, MAX_TOMBSTONES, SAME_TIME, SCHEMA, Limits, Step, weight
from .expressions import PURGE_STEP
from .replies import Reply, read_reply

Document = dict[str, Any]
Entries = list[Document]

_COUNTERS = (
    "changes", "acquisitions", "contended", "expired", "waited_ms", "held_ms", "longest_wait_ms", "longest_hold_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moment:
    """The time when the server parsed a command, the name of the *clock* that shows it, and the cluster time."""

    now: datetime
    clock: str = ""
    cluster_time: Timestamp | None = None


def apply_rule(document: Document | None, step: Step, limits: Limits, moment: Moment) -> Document | None:
    """Return a copy of *document* after *step*, parsed at *moment*.

    Return None if there is no document, and the step makes none.
    """
    if document is None and not step.upserts:
        return None
    return _Rule(step, limits, moment, document or _blank(moment)).apply()


def _blank(moment: Moment) -> Document:
    """Return the document from which an upsert starts, without its key."""
    return {
        "v": SCHEMA, "holders": [], "waiters": [], "tombstones": [], "token": Int64(0),
        "clock": moment.clock, "written_at": moment.now, "cluster_time": moment.cluster_time, "purge_at": moment.now,
        **dict.fromkeys(_COUNTERS, Int64(0)),
    }  # fmt: skip


class _Rule:
    """One application of the rule. The names are those of `pipeline`."""

    def __init__(self, step: Step, limits: Limits, moment: Moment, document: Document) -> None:
        self.step = step
        self.limits = limits
        self.document = document
        op, before = moment.cluster_time, document.get("cluster_time")
        self.late = op is not None and before is not None and op < before
        self.cluster_time = before if self.late else op
        self.other_primary = not self.late and self.is_other_primary(moment)
        self.clock = document["clock"] if self.late else moment.clock
        self.now = document["written_at"] if self.late else moment.now
        if not (self.late or self.other_primary):
            self.now = max(moment.now, document["written_at"])

    def is_other_primary(self, moment: Moment) -> bool:
        """Return whether another primary's clock wrote the document, or this primary's clock before it was set back."""
        document, leap = self.document, timedelta(milliseconds=LEAP)
        op = moment.cluster_time
        if op is not None and op == document.get("cluster_time"):
            return bool(moment.now > document["written_at"] + leap)
        was_set_back = op is not None and moment.now < document["written_at"] - leap
        return bool(document["clock"] != moment.clock or was_set_back)

    def apply(self) -> Document:
        step, document = self.step, self.document
        live_holders, live_waiters = self.live_holders(), self.live_waiters()
        kept = self.renewed(self.without_removed(live_holders), "server_lease")
        asked = {"release_requested_by": step.requested_by, "release_requested_at": self.now}
        kept = [{**e, **asked} if e["grant"] in step.request_release_of else e for e in kept]
        queue = [e for e in live_waiters if e["grant"] not in step.remove]
        queue = self.renewed(queue, "waiter_lease")
        if step.add is not None:
            done = {e["grant"] for e in (*kept, *document["tombstones"])}
            resumes = step.resumes and any(e["grant"] in step.remove for e in live_holders)
            queue = self.with_new(step.add, queue, done, resumes=resumes)
        grant_count = self.grant_count(kept, queue)
        first_token = max(document["token"] + 1, _since_1970(self.now))
        granted = [self.granted(e, first_token + place) for place, e in enumerate(queue[:grant_count])]
        waiting = queue[grant_count:]
        if step.trial and step.add is not None:
            waiting = [e for e in waiting if e["grant"] != step.add["grant"]]
        stay = {e["grant"] for e in kept}
        ended = [e for e in document["holders"] if e["grant"] not in stay]
        written = {"clock": self.clock, "written_at": self.now, "cluster_time": self.cluster_time}
        changed = {**document, "holders": kept + granted, "waiters": waiting, **written}
        if granted:
            changed["token"] = granted[-1]["token"]
        return {**changed, **self.ends(changed), **self.counted(document, granted, ended), **self.tombstones(document)}

    def after(self, milliseconds: int) -> datetime:
        return self.now + timedelta(milliseconds=milliseconds)

    def live_holders(self) -> Entries:
        """Return the holders whose time is not over.

        If the times are those of another clock, each holder begins a whole lease again. Except a released holder that
        is only kept for its minimum hold.
        """
        holders: Entries = self.document["holders"]
        if self.other_primary:
            holders = [{**e, "until": self.whole_end(e)} for e in holders]
        return [e for e in holders if e["until"] > self.now]

    def whole_end(self, e: Document) -> datetime:
        whole = self.after(e["server_lease"])
        return min(whole, e["until"]) if "released" in e else whole

    def live_waiters(self) -> Entries:
        """Return the waiters whose time is not over. With times of another clock, each begins a whole place again."""
        waiters: Entries = self.document["waiters"]
        if self.other_primary:
            apart = self.now - self.document["written_at"]
            if timedelta(0) <= apart <= timedelta(milliseconds=SAME_TIME):
                apart = timedelta(0)
            waiters = [{**e, "until": self.after(e["waiter_lease"]), "since": e["since"] + apart} for e in waiters]
        return [e for e in waiters if e["until"] > self.now]

    def without_removed(self, holders: Entries) -> Entries:
        """Return the holders without the removed ones.

        A removed holder stays, unchanged, until its minimum hold is over.
        """
        kept = []
        for e in holders:
            end = min(e["acquired_at"], self.now) + timedelta(milliseconds=e["min_hold"])
            if e["grant"] not in self.step.remove:
                kept.append(e)
            elif end > self.now and not self.step.force:
                released = {"until": end, "server_lease": e["min_hold"], "released": self.now}
                kept.append(e if "released" in e else {**e, **released})
        return kept

    def renewed(self, entries: Entries, length: str) -> Entries:
        """Return the entries. A renewed entry ends a whole lease from now, unless its present end is later."""
        renew = self.step.renew
        return [self.renew(e, length) if e["grant"] in renew and "released" not in e else e for e in entries]

    def renew(self, entry: Document, length: str) -> Document:
        step = self.step
        until = max(entry["until"], self.after(max(entry[length], step.server_lease)))
        renewed = {**entry, "until": until, "beat": Int64(step.beat)}
        if length == "server_lease":
            renewed["lease"] = Int64(max(entry["lease"], step.lease))
            renewed["server_lease"] = Int64(max(entry["server_lease"], step.server_lease))
        elif step.behind:
            renewed["behind"] = step.behind[step.renew.index(entry["grant"])]
        return renewed

    def with_new(self, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Entries:
        """Return the queue with the new entry, unless the entry is there already, has a tombstone, or finds no room.

        The queue is in the order of arrival. If the entry is there already with a later arrival, the entry moves. If
        *resumes*, the entry takes the place of a removed holder at the head, even if the entry is in the queue already.
        """
        if new["grant"] in done:
            return queue
        since = self.now - timedelta(milliseconds=min(self.step.waited, LONGEST_CLAIM))
        until = self.after(new["waiter_lease"])
        entry = {**new, "since": since, "until": until, "beat": Int64(self.step.beat)}
        others = [e for e in queue if e["grant"] != new["grant"]]
        if resumes:
            return [entry, *others]
        if len(queue) + sum(e.get("behind", 0) for e in queue) >= self.limits.waiters:
            return queue
        for there in queue:
            if there["grant"] == new["grant"]:
                if there["since"] <= since:
                    return queue
                entry = {**there, "since": since}
        return [
            *(e for e in others if e["since"] <= since),
            entry,
            *(e for e in others if e["since"] > since),
        ]

    def grant_count(self, kept: Entries, queue: Entries) -> int:
        """Return how many waiters fit, from the head of the queue. The smallest number of permits counts."""
        mode = next((e["mode"] for e in (*kept, *queue)), None)
        capacity = min((MAX_HOLDERS, *(e["capacity"] for e in kept)))
        used = sum(map(weight, kept))
        for place, e in enumerate(queue):
            capacity, used = min(capacity, e["capacity"]), used + weight(e)
            if e["mode"] != mode or used > capacity:
                return place
        return len(queue)

    def granted(self, entry: Document, token: int) -> Document:
        """Return the entry as a holder, with a whole lease if its holder sees the answer: see `pipeline._granted`."""
        granted = {**entry, "acquired_at": self.now, "token": Int64(token)}
        if entry["grant"] != self.step.ask:
            return granted
        return {**granted, "until": self.after(entry["server_lease"]), "beat": Int64(self.step.beat)}

    def ends(self, document: Document) -> Document:
        """Return when the last lease ends, and when the document may be removed."""
        expires_at = max((e["until"] for e in document["holders"]), default=None)
        brief = self.limits.brief(self.step.tombstone_ttl)
        retention = timedelta(milliseconds=self.limits.retention if document["contended"] else brief)
        keep = (expires_at or self.now) + retention
        stays = document["purge_at"] >= keep
        purge_at = document["purge_at"] if stays else keep + timedelta(milliseconds=PURGE_STEP)
        return {"expires_at": expires_at, "purge_at": purge_at}

    def counted(self, document: Document, granted: Entries, ended: Entries) -> Document:
        """Return the changed statistics."""
        now = self.now
        waits = [_milliseconds(now - e["since"]) for e in granted]
        holds = [_milliseconds(min(now, e["until"], e.get("released", now)) - e["acquired_at"]) for e in ended]
        more = {
            "changes": 1,
            "acquisitions": len(granted),
            # Negative waits count too. A clock was set back meanwhile.
            "contended": sum(wait != 0 for wait in waits),
            "expired": sum(e["until"] <= now and "released" not in e for e in ended),
            "waited_ms": sum(waits),
            "held_ms": sum(holds),
        }
        fields: Document = {name: Int64(document[name] + number) for name, number in more.items()}
        fields["longest_wait_ms"] = Int64(max((document["longest_wait_ms"], *waits)))
        fields["longest_hold_ms"] = Int64(max((document["longest_hold_ms"], *holds)))
        if ended:
            fields["last_holder"] = ended[-1]
        return fields

    def tombstones(self, document: Document) -> Document:
        """Return the field of tombstones, if the command leaves some."""
        if not self.step.tombstone_ttl:
            return {}
        old = [e for e in document["tombstones"] if e["until"] > self.now]
        new = [{"grant": grant, "until": self.after(self.step.tombstone_ttl)} for grant in self.step.remove]
        return {"tombstones": (old + new)[-MAX_TOMBSTONES:]}


def _milliseconds(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _since_1970(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


#: The stand-in for a missing document, for the filters of commands.
NOTHING: Final[Document] = {"holders": [], "waiters": [], "tombstones": []}


def is_held(document: Document, grants: Sequence[str]) -> bool:
    return any(e["grant"] in grants for e in document["holders"])


def _is_former(holder: Document, grant: str, owner: str | None) -> bool:
    return owner is not None and holder.get("owner") == owner and holder["grant"] != grant and "released" not in holder


def is_uncontended(document: Document, grant: str) -> bool:
    return [e["grant"] for e in document["holders"]] == [grant] and not document["waiters"]


def is_free(document: Document, grant: str) -> bool:
    return not (document["holders"] or document["waiters"]) and all(e["grant"] != grant for e in document["tombstones"])


def is_there(document: Document, grants: Sequence[str]) -> bool:
    return any(e["grant"] in grants for e in (*document["holders"], *document["waiters"]))


def reply_of(key: str, document: Document | None, grant: str, now: datetime, owner: str | None = None) -> Reply:
    """Return what MongoDB answers by the projection `replies.REPLY`, or for an owner `replies.REPLY_TO_OWNER`."""
    if document is None:
        return read_reply(key, None)
    holders, waiters = document["holders"], document["waiters"]
    places = [e["grant"] for e in waiters]
    answer = {
        "now": now,
        "token": document["token"],
        "mine": next((e for e in holders if e["grant"] == grant), None),
        "place": places.index(grant) if grant in places else -1,
        "queued": next((e for e in waiters if e["grant"] == grant), None),
        "waiting": len(waiters) + sum(e.get("behind", 0) for e in waiters),
        "granted": [
            {"to": e["session"], "grant": e["grant"], "token": e["token"], "at": e["acquired_at"]}
            for e in holders
            if e["acquired_at"] >= document["written_at"] and e["grant"] != grant
        ],
        "first_end": min((e["until"] for e in holders), default=None),
        "holder": next(iter(holders), None),
        "former": next((e for e in holders if _is_former(e, grant, owner)), None),
    }
    return read_reply(key, answer)
