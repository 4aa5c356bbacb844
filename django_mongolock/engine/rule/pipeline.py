"""The one update that every operation on a lock is: prune, remove, renew, add, grant. (For the two most frequent
operations there are also shorter updates, which do the same: see `short_forms`.)

To understand it, read `in_python` first: the same rule, which runs without a server.

The rule is an aggregation pipeline, evaluated by the primary on the one document of a key, by the primary's own
clock. What a command asks is passed as the variable ``$$c`` (`Step.arguments`), all of it inside one ``$literal``, so
that no text of a caller is ever read as an expression. The pipeline itself is a constant.

The time of a command, ``$$now``, is not simply ``$$NOW``: the server reads that when it parses a command, and may
write seconds later, after commands that it has parsed since. The cluster time, which the server reads together with
``$$NOW`` and which never goes back, tells them apart. The document remembers both of its last writer (`written_at`,
`cluster_time`). A command that was parsed before the last writer is *late*: it is judged by the time of that
writer. If a command was parsed after the last writer, and its clock shows an earlier time all the same, the clock was
set back; then the times in the document are those of another clock, as after an election (`other_primary`). (The order
is Lamport's: https://dl.acm.org/doi/10.1145/359545.359563.) So no end is ever brought nearer by a clock alone.

In words:

1. A document that is damaged, or was not written by this package, stays exactly as it is (`IS_WHOLE`).
2. *Prune* holders and waiters whose time is over. If the times in the document are those of another clock, they mean
   nothing to this one: no entry is pruned, and every end is a whole lease from now.
3. *Remove* the given grants; leave a tombstone for them if asked, so that a command that was held up on its way
   cannot bring them back. A holder with a minimum hold stays until that is over, unless removed by force.
4. *Renew* the given grants, but none that was released already. A renewal never brings an end nearer.
5. *Add* the given entry to the queue, in the order of arrival, unless it is there already or has a tombstone. An entry
   that *resumes* a removed holder, which was there until now, is put at the head.
6. *Grant*: from the head of the queue, as many as fit. The first that does not fit blocks all behind it.
7. If this was only a trial, take what was added out of the queue again.

Parsing the pipeline costs the server more than evaluating it (about 40 us per KB). So a command carries only the
parts that it needs: `pipeline` leaves out the others.
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
#: `clock` names an election: the last one that the sender of a command knew of. The primary that writes the command may
#: be of a later one, if the command was held up, or its sender has not heard of that yet. So the names are compared
#: only where the cluster times leave it open:
#:
#: - The cluster times are equal: the command and the last writer were parsed with no write in between. Every election
#:   writes, so one primary parsed both, but it is not known in which order. If the command shows a much later time, it
#:   may have been first, and the clock been set back after it.
#: - The command is late: it was parsed before the last writer, and is judged by the time of that.
#: - Else it was parsed after the last writer. The clock is another one if the names differ; or it was set back, if it
#:   shows a much earlier time.
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
#: The time by which the command is judged. A clock that went back by less than a leap stands still for as long.
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
#: The time since the last write, if both clocks are the same one.
_APART: Expression = {"$subtract": ["$$now", "$$doc.written_at"]}


def _live(field: str, renewed: dict[str, Expression]) -> Expression:
    """The entries whose time is not over. With times of another clock, they get the fields of *renewed* first."""
    entries = f"$$doc.{field}"
    return only({"$cond": ["$$other_primary", for_each(entries, merge("$$e", renewed)), entries]}, _LIVES)


#: A released holder that is only kept for a minimum hold needs no whole lease after an election: nothing breaks if the
#: clocks differ, while a job that runs once a day would miss a day after every failover.
_HOLDER_RENEWED: dict[str, Expression] = {
    "until": {"$min": [from_now("$$e.server_lease"), {"$cond": ["$$e.released", "$$e.until", None]}]}
}
#: Keeps the order. Where the two clocks may be the same one, each has come when it came: by the scale of those who come
#: now and say how long they have waited. If not, each has waited as long as at the last write.
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
    """Holders without the removed. One with a minimum hold that is not over is kept, and changed no more."""
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
    """The entries, those that the command renews pushed to a whole lease from now and never nearer."""
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


#: When the waiter of the new entry came, as it says.
_CAME_AT: Expression = {"$subtract": ["$$now", {"$min": ["$$c.waited", LONGEST_CLAIM]}]}


def _with_new(resumes: bool, arrived: bool) -> Expression:
    """The queue with the new entry, unless it is there already, has a tombstone, or finds no room.

    It is put at the end; or, where *arrived* (its waiter has waited before), behind those that came before it, and
    before the others. If the entry is there, but as one that came later, it moves to that place: the command that
    brought it was held up on its way. resumes: it is put at the head, if the command removes a holder that was there.
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
    # It may stand in the queue already. If the removed is not there any more, there is nothing to resume; so the second
    # copy of the command changes nothing.
    done = {"$in": ["$$c.add.grant", {"$concatArrays": ["$$kept.grant", "$$doc.tombstones.grant"]}]}
    is_there = {"$gt": [size({"$setIntersection": ["$$live_holders.grant", "$$c.remove"]}), 0]}
    at_head = {"$concatArrays": [[entry], only("$$queue", {"$not": [_IS_NEW]})]}
    return {"$cond": [{"$and": [is_there, {"$not": [done]}]}, at_head, in_order]}


#: How many may hold the key together with the waiter at the place `$$i`, and all before it.
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
#: No more than the first of them allows.
_PLACES: Expression = {"$range": [0, {"$min": [size("$$queued"), {"$first": "$$queued.capacity"}]}]}
#: How many fit, counted from the head of the queue: the first that does not fit blocks all behind it. If the entries do
#: not agree on the number of permits, the smallest of those that then hold the key counts.
_GRANT_COUNT: Expression = let(
    {
        "first": {"$ifNull": [{"$first": "$$kept"}, {"$first": "$$queued"}]},
        "used": {"$add": [size("$$kept"), {"$sum": "$$kept.more_permits"}]},
    },
    {"$indexOfArray": [{"$concatArrays": [{"$map": {"input": _PLACES, "as": "i", "in": _FITS}}, [False]]}, False]},
)


def _granted(asks: bool) -> Expression:
    """The entries that fit, as holders.

    The grant that the command asks about gets a whole lease: its holder sees the answer. Any other keeps the end
    that it had as a waiter, until its holder renews it. So a waiter that has died costs the queue no more than it
    would have anyway, and a live one can hold the lock at once, according to its last renewal.
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


#: Whether its lease ended without a release. One that was released and only kept for its minimum hold has not expired.
_HAS_EXPIRED: Expression = {"$not": [{"$or": [_LIVES, "$$e.released"]}]}


def _total(field: str, more: Expression) -> Expression:
    return {"$add": [f"$$doc.{field}", more]}


def _result(leaves_tombstones: bool) -> dict[str, Expression]:
    """The fields that a command changes."""
    fields = {
        "holders": "$$holders",
        "waiters": "$$waiting",
        "token": {"$max": ["$$doc.token", {"$max": "$$granted.token"}]},
        "clock": {"$cond": ["$$late", "$$doc.clock", "$$c.clock"]},
        "written_at": "$$now",
        "cluster_time": {"$cond": ["$$late", "$$doc.cluster_time", "$$op"]},
        "expires_at": "$$expires_at",
        "purge_at": purge_time("$$now", "$$doc.purge_at", "$$expires_at", "$$doc.contended"),
        # So that every command writes: a primary that has lost its majority acknowledges what changes nothing.
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


#: What leaves a mark on the pipeline, if a step has it.
_PARTS: Final = (
    "ask", "add", "resumes", "trial", "remove", "force", "renew", "tombstone_ttl", "request_release_of", "waited",
    "behind",
)  # fmt: skip


def pipeline(step: Step) -> list[RawBSONDocument]:
    """The update of a command: the rule, with the parts that *step* needs."""
    return _pipeline(frozenset(part for part in _PARTS if getattr(step, part)))


@lru_cache
def _pipeline(parts: frozenset[str]) -> list[RawBSONDocument]:
    """The rule for steps with these fields. Each stage binds variables for those after it."""
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
            # A difference of sets is found in one pass; for each holder, whether it was kept is not.
            "ended_ids": {"$setDifference": ["$$doc.holders.grant", "$$kept.grant"]},
        },
        # At least the time, so that tokens go on growing when the document was removed, or an older copy brought back.
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
