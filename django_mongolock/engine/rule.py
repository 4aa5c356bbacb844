"""The rule of `step` once more, in plain Python, on the same documents: for locks that are kept in memory.

There is one rule, and two that carry it out: MongoDB's primary, and these lines. A test lets both do the same things
in any order, and compares every field of the two documents.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from bson.int64 import Int64

from .document import FAR, FAR_TIMES, SCHEMA
from .step import PURGE_STEP, Limits, Step

Document = dict[str, Any]
Entries = list[Document]

_COUNTERS = (
    "changes", "acquisitions", "contended", "lapsed", "waited_ms", "held_ms", "longest_wait_ms", "longest_hold_ms",
)  # fmt: skip


def apply_rule(document: Document | None, step: Step, limits: Limits, now: datetime, clock: str) -> Document | None:
    """The document as *step* leaves it at the time *now* of the *clock*; None where there is none, nor is one made.

    *document* is not changed.
    """
    if document is None and not step.upserts:
        return None
    return _Rule(step, limits, now).apply(document or _blank(now, clock), clock)


def _blank(now: datetime, clock: str) -> Document:
    """What an upsert starts from, without its key."""
    return {
        "v": SCHEMA, "holders": [], "waiters": [], "graves": [], "token": Int64(_since_1970(now)), "granted": "",
        "clock": clock, "purge_at": now, **dict.fromkeys(_COUNTERS, Int64(0)),
    }  # fmt: skip


class _Rule:
    """One application of it; the words are those of `step`."""

    def __init__(self, step: Step, limits: Limits, now: datetime) -> None:
        self.step = step
        self.limits = limits
        self.now = now

    def apply(self, document: Document, clock: str) -> Document:
        step, foreign = self.step, document["clock"] != clock
        living = self.living(document["holders"], "term", foreign=foreign)
        lining = self.living(document["waiters"], "patience", foreign=foreign)
        kept = self.renewed(self.without_removed(living), "term")
        kept = [{**e, "asked": step.caller} if e["grant"] in step.call else e for e in kept]
        queue = [e for e in lining if e["grant"] not in step.remove]
        queue = self.renewed(queue, "patience")
        if step.add is not None:
            done = {e["grant"] for e in (*kept, *document["graves"])}
            resumes = step.resumes and any(e["grant"] in step.remove for e in living)
            queue = self.with_new(step.add, queue, done, resumes=resumes)
        fitting = self.fitting(kept, queue)
        granted = [self.granted(e, document["token"] + 1 + place) for place, e in enumerate(queue[:fitting])]
        waiting = queue[fitting:]
        if step.trial and step.add is not None:
            waiting = [e for e in waiting if e["grant"] != step.add["grant"]]
        stay = {e["grant"] for e in kept}
        ended = [e for e in document["holders"] if e["grant"] not in stay]
        changed = {**document, "holders": kept + granted, "waiters": waiting, "clock": clock}
        return {**changed, **self.ends(changed), **self.counted(document, granted, ended), **self.buried(document)}

    def after(self, milliseconds: int) -> datetime:
        return self.now + timedelta(milliseconds=milliseconds)

    def living(self, entries: Entries, length: str, *, foreign: bool) -> Entries:
        """The entries whose time is not over, with ends that mean something to this clock. *length*: a whole lease.

        One that is only kept for a minimum hold needs no whole lease.
        """
        living = []
        for e in entries:
            whole, gives = self.after(e[length]), foreign and "released" not in e
            if gives or e["until"] > self.now:
                living.append({**e, "until": whole} if gives or e["until"] > whole else e)
        return living

    def without_removed(self, holders: Entries) -> Entries:
        """Holders without the removed. One that must stay a while is renewed no more: it only waits for its end."""
        kept = []
        for e in holders:
            end = e["acquired_at"] + timedelta(milliseconds=e["hold"])
            if e["grant"] not in self.step.remove:
                kept.append(e)
            elif e["hold"] and end > self.now and not self.step.force:
                kept.append({**e, "until": end, "term": e["hold"], "released": self.now})
        return kept

    def renewed(self, entries: Entries, length: str) -> Entries:
        """The entries, those that the command renews pushed to a whole lease from now and never nearer."""
        return [self.renew(e, length) if e["grant"] in self.step.renew else e for e in entries]

    def renew(self, entry: Document, length: str) -> Document:
        step = self.step
        return {
            **entry,
            "until": max(entry["until"], self.after(max(entry[length], step.term))),
            "beat": Int64(step.beat),
            "lease": Int64(max(entry["lease"], step.lease)),
            "term": Int64(max(entry["term"], step.term)),
        }

    def with_new(self, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Entries:
        """The queue with the new entry, unless it is there already, lies under a tombstone, or finds no room.

        resumes: it takes the place of a holder that was removed, and goes to the head, from wherever it stands.
        """
        if new["grant"] in done:
            return queue
        far = min(new["patience"] * FAR_TIMES, new["term"])
        patience = Int64(far if len(queue) >= FAR else new["patience"])
        entry = {**new, "since": self.now, "patience": patience, "until": self.after(patience)}
        others = [e for e in queue if e["grant"] != new["grant"]]
        if resumes:
            return [entry, *others]
        return queue if len(others) < len(queue) or len(queue) >= self.limits.waiters else [*queue, entry]

    def fitting(self, kept: Entries, queue: Entries) -> int:
        """How many fit, counted from the head of the queue."""
        mode = next((e["mode"] for e in (*kept, *queue)), None)
        for place, e in enumerate(queue):
            if e["mode"] != mode or len(kept) + place >= e["capacity"]:
                return place
        return len(queue)

    def granted(self, entry: Document, token: int) -> Document:
        """The entry as a holder. Unless its holder sees the answer, it knows of no more than its place in the queue."""
        until = self.after(entry["term"]) if entry["grant"] == self.step.ask else entry["until"]
        return {**entry, "acquired_at": self.now, "token": Int64(token), "until": until}

    def ends(self, document: Document) -> Document:
        """When the last lease ends, and when the document may go."""
        expires_at = max((e["until"] for e in document["holders"]), default=None)
        keep = max(self.now, expires_at or self.now) + timedelta(milliseconds=self.limits.retention)
        stays = document["purge_at"] >= keep
        purge_at = document["purge_at"] if stays else keep + timedelta(milliseconds=PURGE_STEP)
        return {"expires_at": expires_at, "purge_at": purge_at}

    def counted(self, document: Document, granted: Entries, ended: Entries) -> Document:
        """The token and the statistics; the news."""
        now = self.now
        waits = [_milliseconds(now - e["since"]) for e in granted]
        holds = [_milliseconds(min(now, e["until"], e.get("released", now)) - e["acquired_at"]) for e in ended]
        more = {
            "token": len(granted),
            "changes": 1,
            "acquisitions": len(granted),
            # Fewer than none as well: a clock was set back meanwhile.
            "contended": sum(wait != 0 for wait in waits),
            "lapsed": sum(e["until"] <= now and "released" not in e for e in ended),
            "waited_ms": sum(waits),
            "held_ms": sum(holds),
        }
        fields: Document = {name: Int64(document[name] + number) for name, number in more.items()}
        fields["longest_wait_ms"] = Int64(max(document["longest_wait_ms"], *waits, 0))
        fields["longest_hold_ms"] = Int64(max(document["longest_hold_ms"], *holds, 0))
        others = [e for e in granted if e["grant"] != self.step.ask]
        if others:
            fields["granted"] = "".join(f"{e['grant']} {e['token']} {_since_1970(now)};" for e in others)
        if ended:
            fields["last_holder"] = ended[-1]
        return fields

    def buried(self, document: Document) -> Document:
        """The tombstones, where the command leaves some."""
        if not self.step.bury:
            return {}
        old = [e for e in document["graves"] if e["until"] > self.now]
        return {"graves": old + [{"grant": grant, "until": self.after(self.step.bury)} for grant in self.step.remove]}


def _milliseconds(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _since_1970(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
