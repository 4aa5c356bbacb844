"""The one update behind every operation on a lock: prune, remove, renew, add, grant. The two most frequent operations
have shorter updates with the same result: see `short_forms`.

To understand the rule, read `in_python` first. The same rule runs there without a server.

The rule is an aggregation pipeline. The primary evaluates it on the one document of a key, by its own clock. The
variable ``$$c`` (`Step.arguments`) holds the instructions of the command, all of them inside one ``$literal``, so that
no text of a caller is ever read as an expression. The pipeline itself is a constant.

The time of a command, ``$$now``, is not simply ``$$NOW``. The server reads ``$$NOW`` when it parses a command, but may
write seconds later, after commands that it has parsed since. The cluster time tells these cases apart. The server reads
the cluster time together with ``$$NOW``, and the cluster time never goes back. The document remembers both of its last
writer (`written_at`, `cluster_time`). A command that was parsed before the last writer is *late*, and is judged by the
time of that writer. If a command was parsed after the last writer and its clock still shows an earlier time, the clock
was set back. The times in the document are then those of another clock, as after an election (`other_primary`). This
order is Lamport's (https://dl.acm.org/doi/10.1145/359545.359563). For these reasons a clock alone never brings an end
nearer.

The steps:

1. A document that is damaged, or was not written by this package, stays exactly as it is (`IS_WHOLE`).
2. *Prune* holders and waiters whose time is over. If the times in the document are those of another clock, they mean
   nothing to this clock. No entry is pruned then, and every end is a whole lease from now.
3. *Remove* the given grants. If asked, leave a tombstone for them, so that a command that was held up on its way
   cannot bring them back. A holder with a minimum hold stays until that is over, unless removed by force.
4. *Renew* the given grants, except released ones. A renewal never brings an end nearer.
5. *Add* the given entry to the queue, in the order of arrival, unless the entry is there already or has a tombstone. An
   entry that *resumes* a removed holder is put at the head, if the holder was there until now.
6. *Grant* the key from the head of the queue, to as many as fit. The first that does not fit blocks all behind it.
7. If this was only a trial, take the added entry out of the queue again.

Parsing the pipeline costs the server more than evaluating it (about 40 us per KB). For that reason `pipeline` leaves
out the parts that a command does not need.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from bson.raw_bson import RawBSONDocument

from .document import LEAP, LONGEST_CLAIM, MAX_ENTRIES, MAX_HOLDERS, MAX_TOMBSTONES, SAME_TIME, Step
from .expressions import (
    BLANK,
    IS_ASKED,
    IS_BLANK,
    IS_WHOLE,
    Expression,
    after,
    encoded,
    for_each,
    is_late,
    let,
    merge,
    only,
    purge_time,
    size,
)

#: Whether the document was written by the clock of another primary, or by this one's before it was set back.
#:
#: `clock` names the last election that the sender of a command knew of. The primary that writes the command may be of a
#: later election, if the command was held up, or if its sender has not heard of the election yet. For that reason the
#: names are compared only where the cluster times leave the question open:
#:
#: - If the cluster times are equal, the command and the last writer were parsed with no write in between. Every
#:   election writes, and one primary therefore parsed both, in an unknown order. If the command shows a much later
#:   time, the command may have been first, and the clock been set back after it.
#: - A late command was parsed before the last writer, and is judged by the time of that writer.
#: - Any other command was parsed after the last writer. The clock is another one if the names differ. The clock was set
#:   back if it shows a much earlier time.
_IS_OTHER_PRIMARY: Expression = {
    "$cond": [
        {"$and": ["$$op", {"$eq": ["$$op", "$$doc.cluster_time"]}]},
        {"$gt": ["$$NOW", {"$add": ["$$doc.written_at", LEAP]}]},
        {
            "$and": [
                {"$not": ["$$late"]},
                {
                    "$or": [
                        {"$ne": ["$$doc.clock", "$$c.clock"]},
                        {"$and": ["$$op", {"$lt": ["$$NOW", {"$subtract": ["$$doc.written_at", LEAP]}]}]},
                    ]
                },
            ]
        },
    ]
}
#: The time by which the command is judged. A clock that went back by less than a leap stands still until it catches up.
_TIME: Expression = {
    "$cond": [
        "$$other_primary",
        "$$NOW",
        {"$cond": ["$$late", "$$doc.written_at", {"$max": ["$$NOW", "$$doc.written_at"]}]},
    ]
}


def from_now(milliseconds: Expression) -> Expression:
    return after("$$now", milliseconds)


_LIVES: Expression = {"$gt": ["$$e.until", "$$now"]}
#: The time since the last write, if the same clock measured both moments.
_APART: Expression = {"$subtract": ["$$now", "$$doc.written_at"]}


def _live(field: str, renewed: dict[str, Expression]) -> Expression:
    """Return the entries whose time is not over. With times of another clock, set the fields of *renewed* first."""
    entries = f"$$doc.{field}"
    return only({"$cond": ["$$other_primary", for_each(entries, merge("$$e", renewed)), entries]}, _LIVES)


#: The fields of a holder after an election. A released holder that is only kept for a minimum hold gets no whole lease.
#: Nothing breaks if the clocks differ, but a daily job would miss a day after every failover.
_HOLDER_RENEWED: dict[str, Expression] = {
    "until": {"$min": [from_now("$$e.server_lease"), {"$cond": ["$$e.released", "$$e.until", None]}]}
}
#: The fields of a waiter after an election. The order of the queue stays. If the two clocks may be the same one,
#: the moments of arrival stay, and compare with those of new waiters. If not, each has waited as long as at the last
#: write.
_WAITER_RENEWED: dict[str, Expression] = {
    "until": from_now("$$e.waiter_lease"),
    "since": {
        "$cond": [
            {"$and": [{"$gte": [_APART, 0]}, {"$lte": [_APART, SAME_TIME]}]},
            "$$e.since",
            after("$$e.since", _APART),
        ]
    },
}

_IS_REMOVED: Expression = {"$in": ["$$e.grant", "$$c.remove"]}
_IS_NEW: Expression = {"$eq": ["$$e.grant", "$$c.add.grant"]}


def _without_removed(holders: Expression) -> Expression:
    """Return the holders without the removed ones.

    A removed holder stays, unchanged, until its minimum hold is over.
    """
    end = {"$add": [{"$min": ["$$e.acquired_at", "$$now"]}, "$$e.min_hold"]}
    return for_each(
        only(holders, {"$or": [{"$not": [_IS_REMOVED]}, {"$gt": [end, "$$now"]}]}),
        {
            "$cond": [
                {"$and": [_IS_REMOVED, {"$not": ["$$e.released"]}]},
                merge("$$e", {"until": end, "server_lease": "$$e.min_hold", "released": "$$now"}),
                "$$e",
            ]
        },
    )


def _renewed(entries: Expression, length: str, counts: bool = False) -> Expression:
    """Return the entries. A renewed entry ends a whole lease from now, unless its present end is later.

    - length: name of the field with the length of the lease.
    - counts: whether the step says how many grants wait behind each renewed one.
    """
    is_renewed: Expression = {"$in": ["$$e.grant", "$$c.renew"]}
    changes: dict[str, Expression] = {
        "until": {"$max": ["$$e.until", from_now({"$max": [f"$$e.{length}", "$$c.server_lease"]})]},
        "beat": "$$c.beat",
    }
    if length == "server_lease":
        is_renewed = {"$and": [is_renewed, {"$not": ["$$e.released"]}]}
        changes |= {
            "lease": {"$max": ["$$e.lease", "$$c.lease"]},
            "server_lease": {"$max": ["$$e.server_lease", "$$c.server_lease"]},
        }
    if counts:
        changes["behind"] = {"$arrayElemAt": ["$$c.behind", {"$indexOfArray": ["$$c.renew", "$$e.grant"]}]}
    return for_each(entries, {"$cond": [is_renewed, merge("$$e", changes), "$$e"]})


#: The arrival of the new entry's waiter, as the waiter claims.
_CAME_AT: Expression = {"$subtract": ["$$now", {"$min": ["$$c.waited", LONGEST_CLAIM]}]}


def _with_new(resumes: bool, arrived: bool) -> Expression:
    """Return the queue with the new entry, unless the entry is there already, has a tombstone, or finds no room.

    - resumes: whether the entry goes to the head, if the command removes a holder that was there.
    - arrived: whether the waiter has waited before. The entry then goes behind the entries that came before it, and
      before the others. If the entry is there already with a later arrival, because the command that brought it was
      held up on its way, the entry moves to that place. Without *arrived*, the entry goes to the end.
    """
    since = _CAME_AT if arrived else "$$now"
    entry = merge("$$c.add", {"since": since, "until": from_now("$$c.add.waiter_lease"), "beat": "$$c.beat"})
    before: Expression = "$$queue"
    parts = [before, [entry]]
    if arrived:
        came_before: Expression = {"$lte": ["$$e.since", _CAME_AT]}
        before = only("$$queue", came_before)
        there = {"$first": only("$$queue", _IS_NEW)}
        moved = merge({"$ifNull": [there, entry]}, {"since": _CAME_AT})
        parts = [before, [moved], only("$$queue", {"$not": [{"$or": [came_before, _IS_NEW]}]})]
    stands = for_each(before, "$$e.grant") if arrived else "$$queue.grant"
    known = {"$in": ["$$c.add.grant", {"$concatArrays": ["$$kept.grant", stands, "$$doc.tombstones.grant"]}]}
    full = {"$gte": [{"$add": [size("$$queue"), {"$sum": "$$queue.behind"}]}, "$$c.waiters"]}
    in_order = {"$cond": [{"$or": [known, full]}, "$$queue", {"$concatArrays": parts}]}
    if not resumes:
        return in_order
    # The entry may stand in the queue already. If the removed holder is gone, there is nothing to resume. A second copy
    # of the command therefore changes nothing.
    done = {"$in": ["$$c.add.grant", {"$concatArrays": ["$$kept.grant", "$$doc.tombstones.grant"]}]}
    is_there = {"$gt": [size({"$setIntersection": ["$$live_holders.grant", "$$c.remove"]}), 0]}
    at_head = {"$concatArrays": [[entry], only("$$queue", {"$not": [_IS_NEW]})]}
    return {"$cond": [{"$and": [is_there, {"$not": [done]}]}, at_head, in_order]}


#: The number of holders that the key may have together with the waiter at the place `$$i` and all before it.
_CAPACITY: Expression = {"$min": [MAX_HOLDERS, {"$min": "$$kept.capacity"}, {"$min": "$$head.capacity"}]}
_FITS: Expression = {
    "$and": [
        {"$eq": [{"$arrayElemAt": ["$$queued.mode", "$$i"]}, "$$first.mode"]},
        let(
            {"head": {"$slice": ["$$queued", {"$add": ["$$i", 1]}]}},
            {"$lt": [{"$add": ["$$used", "$$i", {"$sum": "$$head.more_permits"}]}, _CAPACITY]},
        ),
    ]
}
#: The places that may be granted, no more than the capacity of the first waiter.
_PLACES: Expression = {"$range": [0, {"$min": [size("$$queued"), {"$first": "$$queued.capacity"}]}]}
#: The number of waiters that fit, from the head of the queue. The first that does not fit blocks all behind it. If the
#: entries do not agree on the number of permits, the smallest among the resulting holders counts.
_GRANT_COUNT: Expression = let(
    {
        "first": {"$ifNull": [{"$first": "$$kept"}, {"$first": "$$queued"}]},
        "used": {"$add": [size("$$kept"), {"$sum": "$$kept.more_permits"}]},
    },
    {"$indexOfArray": [{"$concatArrays": [{"$map": {"input": _PLACES, "as": "i", "in": _FITS}}, [False]]}, False]},
)


def _granted(asks: bool) -> Expression:
    """Return the entries that fit, as holders.

    The grant that the command asks about gets a whole lease, because its holder sees the answer. Any other keeps the
    end that it had as a waiter, until its holder renews it. A waiter that has died therefore costs the queue no more
    than it would have anyway. A live waiter can hold the lock at once, according to its last renewal.
    """
    granted = merge("$$e", {"acquired_at": "$$now", "token": {"$add": ["$$first_token", "$$i"]}})
    if asks:
        whole = {"until": from_now("$$e.server_lease"), "beat": "$$c.beat"}
        granted["$mergeObjects"].append({"$cond": [IS_ASKED, whole, None]})
    return {
        "$map": {
            "input": {"$range": [0, "$$grant_count"]},
            "as": "i",
            "in": let({"e": {"$arrayElemAt": ["$$queued", "$$i"]}}, granted),
        }
    }


#: Whether the lease ended without a release. A released holder that was kept for its minimum hold has not expired.
_HAS_EXPIRED: Expression = {"$not": [{"$or": [_LIVES, "$$e.released"]}]}


def _total(field: str, more: Expression) -> Expression:
    return {"$add": [f"$$doc.{field}", more]}


def _result(leaves_tombstones: bool) -> dict[str, Expression]:
    """Return the fields that a command changes."""
    fields = {
        "holders": "$$holders",
        "waiters": "$$waiting",
        "token": {"$max": ["$$doc.token", {"$max": "$$granted.token"}]},
        "clock": {"$cond": ["$$late", "$$doc.clock", "$$c.clock"]},
        "written_at": "$$now",
        "cluster_time": {"$cond": ["$$late", "$$doc.cluster_time", "$$op"]},
        "expires_at": "$$expires_at",
        "purge_at": purge_time("$$now", "$$doc.purge_at", "$$expires_at", "$$doc.contended"),
        # Every command writes, because a primary that has lost its majority acknowledges updates without a change.
        "changes": _total("changes", 1),
        "acquisitions": _total("acquisitions", "$$grant_count"),
        "contended": _total("contended", size({"$filter": {"input": "$$waits", "cond": "$$this"}})),
        "waited_ms": _total("waited_ms", {"$sum": "$$waits"}),
        "longest_wait_ms": {"$max": ["$$doc.longest_wait_ms", {"$max": "$$waits"}]},
        "expired": _total("expired", size(only("$$ended", _HAS_EXPIRED))),
        "held_ms": _total("held_ms", {"$sum": "$$holds"}),
        "longest_hold_ms": {"$max": ["$$doc.longest_hold_ms", {"$max": "$$holds"}]},
        "last_holder": {"$ifNull": [{"$last": "$$ended"}, "$$doc.last_holder"]},
    }
    if leaves_tombstones:
        new = for_each("$$c.remove", {"grant": "$$e", "until": from_now("$$c.tombstone_ttl")})
        old = only("$$doc.tombstones", _LIVES)
        fields["tombstones"] = {"$slice": [{"$concatArrays": [old, new]}, -MAX_TOMBSTONES]}
    return fields


#: The fields of a step that add parts to the pipeline.
_PARTS: Final = (
    "ask", "add", "resumes", "trial", "remove", "force", "renew", "tombstone_ttl", "request_release_of", "waited",
    "behind",
)  # fmt: skip


def pipeline(step: Step) -> list[RawBSONDocument]:
    """Return the update of a command. The update is the rule with the parts that *step* needs."""
    return _pipeline(frozenset(part for part in _PARTS if getattr(step, part)))


@lru_cache
def _pipeline(parts: frozenset[str]) -> list[RawBSONDocument]:
    """Return the rule for steps with these fields. Each stage binds variables for those after it."""
    upserts = "add" in parts or "tombstone_ttl" in parts
    kept: Expression = "$$live_holders"
    queue: Expression = "$$live_waiters"
    if "remove" in parts:
        kept = only(kept, {"$not": [_IS_REMOVED]}) if "force" in parts else _without_removed(kept)
        queue = only(queue, {"$not": [_IS_REMOVED]})
    if "renew" in parts:
        kept, queue = _renewed(kept, "server_lease"), _renewed(queue, "waiter_lease", "behind" in parts)
    if "request_release_of" in parts:
        is_meant = {"$in": ["$$e.grant", "$$c.request_release_of"]}
        asked = merge("$$e", {"release_requested_by": "$$c.requested_by", "release_requested_at": "$$now"})
        kept = for_each(kept, {"$cond": [is_meant, asked, "$$e"]})
    waiting: Expression = {"$slice": ["$$queued", "$$grant_count", MAX_ENTRIES + 1]}
    stages: list[dict[str, Expression]] = [
        {"doc": {"$cond": [IS_BLANK, BLANK, "$$ROOT"]} if upserts else "$$ROOT"},
        {"late": is_late("$$doc.cluster_time")},
        {"other_primary": _IS_OTHER_PRIMARY},
        {"now": _TIME},
        # Prune
        {"live_holders": _live("holders", _HOLDER_RENEWED), "live_waiters": _live("waiters", _WAITER_RENEWED)},
        # Remove, renew
        {"kept": kept, "queue": queue},
        # Add
        {
            "queued": _with_new("resumes" in parts, "waited" in parts) if "add" in parts else "$$queue",
            # The difference of two sets takes one pass. A search for each holder among the kept would not.
            "ended_ids": {"$setDifference": ["$$doc.holders.grant", "$$kept.grant"]},
        },
        # A token is at least the time. Tokens go on growing when the document was removed, or an older copy restored.
        {"grant_count": _GRANT_COUNT, "first_token": {"$max": [{"$add": ["$$doc.token", 1]}, {"$toLong": "$$now"}]}},
        # Grant
        {"granted": _granted("ask" in parts)},
        {
            "holders": {"$concatArrays": ["$$kept", "$$granted"]},
            "waiting": only(waiting, {"$not": [_IS_NEW]}) if "trial" in parts else waiting,
            "ended": only("$$doc.holders", {"$in": ["$$e.grant", "$$ended_ids"]}),
        },
        {
            "expires_at": {"$max": "$$holders.until"},
            "waits": for_each("$$granted", {"$subtract": ["$$now", "$$e.since"]}),
            "holds": for_each(
                "$$ended", {"$subtract": [{"$min": ["$$now", "$$e.until", "$$e.released"]}, "$$e.acquired_at"]}
            ),
        },
    ]
    rule: Expression = merge("$$doc", _result("tombstone_ttl" in parts))
    for variables in reversed(stages):
        rule = let(variables, rule)
    valid = {"$or": [IS_BLANK, IS_WHOLE]} if upserts else IS_WHOLE
    return [encoded({"$replaceWith": {"$cond": [valid, rule, "$$ROOT"]}})]
