"""The one update that every operation on a lock is: prune, remove, renew, add, grant.

The rule is an aggregation pipeline, evaluated by the primary on the one document of a key, by the primary's own
clock (``$$NOW``). What a single command wants is passed as the variable ``$$c`` (`Step.arguments`), all of it inside
one ``$literal``, so that no string of a caller is ever read as an expression. The pipeline itself is a constant.

In words:

1. A document that is damaged, or not ours, stays exactly as it is (`_VALID`).
2. *Prune* holders and waiters whose time is over. Where the document was last written under another primary
   (`clock`), its times mean nothing to this one: nobody is pruned, and everybody gets a whole lease once. A time
   further ahead than a whole lease (a clock was set back) is cut to a lease.
3. *Remove* the given grants; leave a tombstone for them if asked, so that a command that was held up on its way
   cannot bring them back. A holder with a minimum hold stays until that is over, unless removed by force.
4. *Renew* the given grants. A renewal never brings an end nearer: it may have been held up as well.
5. *Add* the given entry at the end of the queue, unless it is there already or lies under a tombstone. Where the
   queue is long it lives longer: each renewal costs the server a time that grows with the queue. An entry that
   *resumes* a removed holder, which was there until now, is put at the head.
6. *Grant*: from the head of the queue, as many as fit. The first that does not fit blocks all behind it.
7. If this was only a trial, take what was added out of the queue again.

Parsing the pipeline costs the server more than evaluating it (about 40 us per KB). So a command carries only the
parts that it needs: `pipeline` leaves the others out of the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from .document import (
    DOCUMENT_FIELDS,
    FAR,
    FAR_TIMES,
    GRANTED_FIELDS,
    LAST_TOKEN,
    MAX_ENTRIES,
    MAX_HOLDERS,
    SCHEMA,
    WAITER_FIELDS,
)
from .expressions import Expression, encoded, for_each, from_now, has_types, let, merge, only, size


@dataclass(frozen=True, slots=True)
class Limits:
    """What is the same for every command of a session. Times are in milliseconds.

    waiters: how long a queue may be. retention: how long the document of a free lock is kept, at least.
    """

    waiters: int = 1_000
    retention: int = 7 * 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Step:
    """What one command asks of the rule. Times are in milliseconds.

    ask: the grant id that the answer is about. add: a new entry (`document.entry`). trial: it must not stay in
    the queue. remove, renew: grant ids. bury: how long the removed ids stay under a tombstone, 0 for not at all.
    force: end a minimum hold too. lease, term: lengthen the lease of the renewed grants to this. beat: the number
    of the renewal, which it leaves on what it renewed. call: ids of holders that *caller* asks to release the lock.
    given: apply the step only while this grant holds the lock. resumes: the new entry takes the place of the removed.
    """

    ask: str = ""
    add: dict[str, Any] | None = None
    trial: bool = False
    remove: tuple[str, ...] = ()
    renew: tuple[str, ...] = ()
    bury: int = 0
    force: bool = False
    lease: int = 0
    term: int = 0
    beat: int = 0
    given: str = ""
    call: tuple[str, ...] = ()
    caller: str = ""
    resumes: bool = False

    @property
    def owner(self) -> str | None:
        """Whose new entry it adds, if somebody's."""
        return None if self.add is None else self.add.get("owner")

    @property
    def upserts(self) -> bool:
        """May the step make the document? Not with a condition: that would be seeded into the new one."""
        return (self.add is not None or self.bury > 0) and not self.given

    @property
    def only_adds(self) -> bool:
        """Does it do nothing but add an entry?"""
        return self.add is not None and not (self.remove or self.renew or self.given)

    def pipeline(self) -> list[RawBSONDocument]:
        """The command's update."""
        return _pipeline(
            asks=bool(self.ask),
            adds=self.add is not None,
            resumes=self.resumes,
            trial=self.trial,
            removes=bool(self.remove),
            force=self.force,
            renews=bool(self.renew),
            buries=self.bury > 0,
            calls=bool(self.call),
        )

    def arguments(self, limits: Limits, clock: object) -> dict[str, Any]:
        """The command's ``let``. *clock* names the primary that is going to evaluate it."""
        values: dict[str, Any] = {
            "ask": self.ask,
            "clock": clock,
            "retention": Int64(limits.retention),
        }
        if self.add is not None:
            values |= {"add": self.add, "waiters": limits.waiters}
        if self.remove:
            values |= {"remove": self.remove, "bury": Int64(self.bury)}
        if self.renew:
            values |= {
                "renew": self.renew,
                "lease": Int64(self.lease),
                "term": Int64(self.term),
                "beat": Int64(self.beat),
            }
        if self.call:
            values |= {"call": self.call, "caller": self.caller}
        return {"c": {"$literal": values}}


#: `purge_at` is moved in steps of this many milliseconds, so that its index stays quiet.
PURGE_STEP = 3_600_000


#: Has an upsert only just made this document?
_IS_BLANK: Expression = {"$eq": ["$$ROOT", {"_id": "$_id"}]}

#: Is it one that we wrote, and are its fields what they should be, apart from what stands in its arrays?
SOUND: list[Expression] = [
    has_types("$", DOCUMENT_FIELDS),
    {"$eq": ["$v", SCHEMA]},
    {"$lt": ["$token", LAST_TOKEN]},
]
#: Is it whole, then?
IS_WHOLE: Expression = {
    "$and": [
        *SOUND,
        {"$lte": [{"$add": [size("$holders"), size("$waiters")]}, MAX_ENTRIES]},
        {"$allElementsTrue": [for_each({"$concatArrays": ["$holders", "$waiters"]}, has_types("$$e.", WAITER_FIELDS))]},
        {"$allElementsTrue": [for_each("$holders", has_types("$$e.", GRANTED_FIELDS))]},
    ]
}

#: What an upsert starts from. The first token is the server's time, so that tokens go on growing when a document
#: is made again after a purge: nobody takes one lock a thousand times a second for as long as its document lives.
_ZERO = Int64(0)
_BLANK: dict[str, Expression] = {
    "_id": "$_id", "v": SCHEMA, "holders": [], "waiters": [], "graves": [], "token": {"$toLong": "$$NOW"},
    "granted": "", "clock": "$$c.clock", "purge_at": "$$NOW", "changes": _ZERO, "acquisitions": _ZERO,
    "contended": _ZERO, "lapsed": _ZERO, "waited_ms": _ZERO, "held_ms": _ZERO, "longest_wait_ms": _ZERO,
    "longest_hold_ms": _ZERO,
}  # fmt: skip


def _living(entries: Expression, length: str) -> Expression:
    """The entries whose time is not over, with ends that mean something to this clock. *length*: a whole lease.

    Who has released the lock and is only kept for a minimum hold needs no whole lease: nothing breaks if the clocks
    differ, while a job that runs once a day would miss a day after every failover.
    """
    whole = from_now(f"$$e.{length}")
    foreign: Expression = {"$and": ["$$foreign", {"$not": ["$$e.released"]}]} if length == "term" else "$$foreign"
    return for_each(
        only(entries, {"$or": [foreign, {"$gt": ["$$e.until", "$$NOW"]}]}),
        {"$cond": [{"$or": [foreign, {"$gt": ["$$e.until", whole]}]}, merge("$$e", {"until": whole}), "$$e"]},
    )


_IS_REMOVED: Expression = {"$in": ["$$e.grant", "$$c.remove"]}
_IS_NEW: Expression = {"$eq": ["$$e.grant", "$$c.add.grant"]}
_IS_ASKED: Expression = {"$eq": ["$$e.grant", "$$c.ask"]}


def _without_removed(holders: Expression) -> Expression:
    """Holders without the removed. One that must stay a while is renewed no more: it only waits for its end."""
    end = {"$add": ["$$e.acquired_at", "$$e.hold"]}
    return for_each(
        only(holders, {"$or": [{"$not": [_IS_REMOVED]}, {"$and": ["$$e.hold", {"$gt": [end, "$$NOW"]}]}]}),
        {"$cond": [_IS_REMOVED, merge("$$e", {"until": end, "term": "$$e.hold", "released": "$$NOW"}), "$$e"]},
    )


def _renewed(entries: Expression, length: str) -> Expression:
    """The entries, those that the command renews pushed to a whole lease from now and never nearer."""
    changes = {
        "until": {"$max": ["$$e.until", from_now({"$max": [f"$$e.{length}", "$$c.term"]})]},
        "beat": "$$c.beat",
        "lease": {"$max": ["$$e.lease", "$$c.lease"]},
        "term": {"$max": ["$$e.term", "$$c.term"]},
    }
    return for_each(entries, {"$cond": [{"$in": ["$$e.grant", "$$c.renew"]}, merge("$$e", changes), "$$e"]})


#: How long the new entry lives without renewal.
_PATIENCE: Expression = {
    "$cond": [
        {"$gte": [size("$$queue"), FAR]},
        {"$min": [{"$multiply": ["$$c.add.patience", FAR_TIMES]}, "$$c.add.term"]},
        "$$c.add.patience",
    ]
}
NEW_ENTRY: Expression = [
    let(
        {"patience": _PATIENCE},
        merge("$$c.add", {"since": "$$NOW", "patience": "$$patience", "until": from_now("$$patience")}),
    )
]


def _with_new(resumes: bool) -> Expression:
    """The queue with the new entry, unless it is there already, lies under a tombstone, or finds no room."""
    known = {"$in": ["$$c.add.grant", {"$concatArrays": ["$$kept.grant", "$$queue.grant", "$$doc.graves.grant"]}]}
    full = {"$gte": [size("$$queue"), "$$c.waiters"]}
    at_end = {"$cond": [{"$or": [known, full]}, "$$queue", {"$concatArrays": ["$$queue", NEW_ENTRY]}]}
    if not resumes:
        return at_end
    # It may stand in the queue already. Where the removed is not there any more, there is nothing to resume; so the
    # second copy of the command changes nothing.
    done = {"$in": ["$$c.add.grant", {"$concatArrays": ["$$kept.grant", "$$doc.graves.grant"]}]}
    is_there = {"$gt": [size({"$setIntersection": ["$$living.grant", "$$c.remove"]}), 0]}
    at_head = {"$concatArrays": [NEW_ENTRY, only("$$queue", {"$not": [_IS_NEW]})]}
    return {"$cond": [{"$and": [is_there, {"$not": [done]}]}, at_head, at_end]}


#: How many fit, counted from the head of the queue: the place of the first that does not.
_FITTING: Expression = let(
    {"mode": {"$first": {"$concatArrays": ["$$kept.mode", "$$queued.mode"]}}, "held": size("$$kept")},
    {
        "$indexOfArray": [
            {
                "$concatArrays": [
                    {
                        "$map": {
                            "input": {"$range": [0, size("$$queued")]},
                            "as": "i",
                            "in": let(
                                {"e": {"$arrayElemAt": ["$$queued", "$$i"]}},
                                {
                                    "$and": [
                                        {"$eq": ["$$e.mode", "$$mode"]},
                                        {"$lt": [{"$add": ["$$held", "$$i"]}, {"$min": ["$$e.capacity", MAX_HOLDERS]}]},
                                    ]
                                },
                            ),
                        }
                    },
                    [False],
                ]
            },
            False,
        ]
    },
)


def _granted(asks: bool) -> Expression:
    """The entries that fit, as holders.

    The grant that the command asks about gets a whole lease: its holder sees the answer. Any other keeps the end
    that it had as a waiter, until its holder renews it. So a waiter that has died costs the queue no more than it
    would have anyway, and a living one can hold the lock at once, by what it knows of its last renewal.
    """
    changes = {
        "acquired_at": "$$NOW",
        "token": {"$add": ["$$doc.token", Int64(1), "$$i"]},
    }
    if asks:
        changes["until"] = {"$cond": [_IS_ASKED, from_now("$$e.term"), "$$e.until"]}
    return {
        "$map": {
            "input": {"$range": [0, "$$fitting"]},
            "as": "i",
            "in": let({"e": {"$arrayElemAt": ["$$queued", "$$i"]}}, merge("$$e", changes)),
        }
    }


#: Did its lease end without a release? One that was released and only kept for its minimum hold did not lapse.
_HAS_LAPSED: Expression = {"$and": [{"$lte": ["$$e.until", "$$NOW"]}, {"$not": ["$$e.released"]}]}


def _total(field: str, more: Expression) -> Expression:
    return {"$add": [f"$$doc.{field}", {"$sum": more}]}


def _told(asks: bool) -> Expression:
    """News for those who were granted by somebody else's command, for the change stream: see `document.read_news`."""
    others = only("$$granted", {"$not": [_IS_ASKED]}) if asks else "$$granted"
    fields = ["$$this.grant", " ", {"$toString": "$$this.token"}, " ", {"$toString": {"$toLong": "$$NOW"}}, ";"]
    news = {"$reduce": {"input": others, "initialValue": "", "in": {"$concat": ["$$value", *fields]}}}
    return {"$cond": [{"$eq": [others, []]}, "$$doc.granted", news]}


def purge_time(before: Expression, expires_at: Expression) -> Expression:
    """When the document may go, if it was *before* until now, and the last lease ends at *expires_at*."""
    keep = {"$add": [{"$max": ["$$NOW", expires_at]}, "$$c.retention"]}
    return {"$cond": [{"$gte": [before, keep]}, before, {"$add": [keep, PURGE_STEP]}]}


def _result(asks: bool, buries: bool) -> dict[str, Expression]:
    """The fields that a command changes."""
    fields = {
        "holders": "$$holders",
        "waiters": "$$waiting",
        "token": {"$add": ["$$doc.token", "$$fitting"]},
        "granted": _told(asks),
        "clock": "$$c.clock",
        "expires_at": "$$expires_at",
        "purge_at": purge_time("$$doc.purge_at", "$$expires_at"),
        # So that every command writes: a primary that has lost its majority acknowledges what changes nothing.
        "changes": {"$add": ["$$doc.changes", 1]},
        "acquisitions": {"$add": ["$$doc.acquisitions", "$$fitting"]},
        "contended": _total("contended", {"$map": {"input": "$$waits", "in": {"$cond": ["$$this", 1, 0]}}}),
        "waited_ms": _total("waited_ms", "$$waits"),
        "longest_wait_ms": {"$max": ["$$doc.longest_wait_ms", {"$max": "$$waits"}]},
        "lapsed": _total("lapsed", for_each("$$ended", {"$cond": [_HAS_LAPSED, 1, 0]})),
        "held_ms": _total("held_ms", "$$holds"),
        "longest_hold_ms": {"$max": ["$$doc.longest_hold_ms", {"$max": "$$holds"}]},
        "last_holder": {"$ifNull": [{"$last": "$$ended"}, "$$doc.last_holder"]},
    }
    if buries:
        new = for_each("$$c.remove", {"grant": "$$e", "until": from_now("$$c.bury")})
        old = only("$$doc.graves", {"$gt": ["$$e.until", "$$NOW"]})
        fields["graves"] = {"$concatArrays": [old, new]}
    return fields


@lru_cache
def _pipeline(
    *,
    asks: bool,
    adds: bool,
    resumes: bool,
    trial: bool,
    removes: bool,
    force: bool,
    renews: bool,
    buries: bool,
    calls: bool,
) -> list[RawBSONDocument]:
    """The rule with the parts that such a command needs. Each stage binds variables for those after it."""
    upserts = adds or buries
    kept: Expression = "$$living"
    queue: Expression = "$$lining"
    if removes:
        kept = only(kept, {"$not": [_IS_REMOVED]}) if force else _without_removed(kept)
        queue = only(queue, {"$not": [_IS_REMOVED]})
    if renews:
        kept, queue = _renewed(kept, "term"), _renewed(queue, "patience")
    if calls:
        kept = for_each(
            kept, {"$cond": [{"$in": ["$$e.grant", "$$c.call"]}, merge("$$e", {"asked": "$$c.caller"}), "$$e"]}
        )
    waiting = {"$slice": ["$$queued", "$$fitting", {"$add": [size("$$queued"), 1]}]}
    stages: list[dict[str, Expression]] = [
        {"doc": {"$cond": [_IS_BLANK, _BLANK, "$$ROOT"]} if upserts else "$$ROOT"},
        {"foreign": {"$ne": ["$$doc.clock", "$$c.clock"]}},
        {"living": _living("$$doc.holders", "term"), "lining": _living("$$doc.waiters", "patience")},
        {"kept": kept, "queue": queue},
        {
            "queued": _with_new(resumes) if adds else "$$queue",
            # A difference of sets is found in one go; asking of each holder whether it was kept is not.
            "gone": {"$setDifference": ["$$doc.holders.grant", "$$kept.grant"]},
        },
        {"fitting": _FITTING},
        {"granted": _granted(asks)},
        {
            "holders": {"$concatArrays": ["$$kept", "$$granted"]},
            "waiting": only(waiting, {"$not": [_IS_NEW]}) if trial else waiting,
            "ended": only("$$doc.holders", {"$in": ["$$e.grant", "$$gone"]}),
        },
        {
            "expires_at": {"$max": "$$holders.until"},
            "waits": for_each("$$granted", {"$subtract": ["$$NOW", "$$e.since"]}),
            "holds": for_each(
                "$$ended", {"$subtract": [{"$min": ["$$NOW", "$$e.until", "$$e.released"]}, "$$e.acquired_at"]}
            ),
        },
    ]
    rule: Expression = merge("$$doc", _result(asks, buries))
    for variables in reversed(stages):
        rule = let(variables, rule)
    valid = {"$or": [_IS_BLANK, IS_WHOLE]} if upserts else IS_WHOLE
    return [encoded({"$replaceWith": {"$cond": [valid, rule, "$$ROOT"]}})]


#: The answer to every command, and to a read: what concerns the grant asked about, and enough of the others for
#: a helpful error. Its size does not grow with the queue.
_ANSWER: dict[str, Expression] = {
    "_id": 0,
    "now": "$$NOW",
    "token": 1,
    "mine": {"$first": only("$holders", _IS_ASKED)},
    "place": {"$indexOfArray": ["$waiters.grant", "$$c.ask"]},
    "queued": {"$first": only("$waiters", _IS_ASKED)},
    "waiting": size("$waiters"),
    "first_end": {"$min": "$holders.until"},
    "holder": {"$first": "$holders"},
}
REPLY: RawBSONDocument = encoded(_ANSWER)
#: To whoever asks for an owner: also which other grant of this owner holds the key, unless that was released and is
#: only kept for its minimum hold.
_IS_FORMER: Expression = {
    "$and": [{"$eq": ["$$e.owner", "$$c.add.owner"]}, {"$not": [_IS_ASKED]}, {"$not": ["$$e.released"]}]
}
REPLY_TO_OWNER: RawBSONDocument = encoded({**_ANSWER, "former": {"$first": only("$holders", _IS_FORMER)}})
