"""The lock with one defect each. A checker that has never found anything proves nothing: it must find all of these.

It is kept like a list of old bugs that must stay catchable: whoever adds a defence adds the variant that lacks it. A
variant patches the real engine in this process: `broken` for the length of a block, `breaking` for good,
`from_environment` as MONGOLOCK_BROKEN says, in a process that a test starts. A patch that finds nothing to patch
raises NothingToBreak: a refactoring must not heal a variant unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import pymongo
from bson.raw_bson import RawBSONDocument
from pymongo import WriteConcern
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import mongo_store, protocol, rule
from django_mongolock.engine.actions import Answer, Apply, WaitResult
from django_mongolock.engine.document import LEAP, Terms, entry
from django_mongolock.engine.election import CLOCK, CLUSTER_TIME, ClockEncoder
from django_mongolock.engine.expressions import after, for_each, merge, only
from django_mongolock.engine.grant import Grant, State
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.protocol import Acquisition
from django_mongolock.engine.replies import REPLY, Beat, Found, Reply, read_found, read_reply
from django_mongolock.engine.session.commands import Commands
from django_mongolock.engine.session.per_process import Sessions
from django_mongolock.engine.session.renewals import Renewals
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.session.waits import Waits
from django_mongolock.engine.step import Limits, Step

#: The variable that says which variant a process is.
VARIABLE: Final = "MONGOLOCK_BROKEN"

Document = dict[str, Any]


class NothingToBreak(AssertionError):
    """What a variant patches is not there any more."""


class Patches:
    """Changes to the engine of this process, which can be undone."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        if name not in vars(owner):
            raise NothingToBreak(f"{owner.__name__} has no {name}")
        self._undo.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def swap(self, old: Any, new: Any) -> None:
        """Replace an expression wherever it stands in the rule (`engine/rule.py`); free keys are given by it, too."""
        hits: list[None] = []
        encode: Callable[[Document], RawBSONDocument] = vars(rule)["encoded"]  # which may be swapped already

        def encode_swapped(document: Document) -> RawBSONDocument:
            return encode(_swapped(document, old, new, hits))

        self.set(rule, "encoded", encode_swapped)
        self.set(MongoStore, "take_free", lambda *_: None)
        rule._pipeline.cache_clear()
        for made in _EVERY_KIND:
            rule.pipeline(made)
        if not hits:
            raise NothingToBreak(f"the rule has no {old}")

    def undo(self) -> None:
        """Make the engine whole again."""
        self._undo.close()
        rule._pipeline.cache_clear()


def _swapped(expression: Any, old: Any, new: Any, hits: list[None]) -> Any:
    if expression == old:
        hits.append(None)
        return new
    if isinstance(expression, dict):
        return {name: _swapped(value, old, new, hits) for name, value in expression.items()}
    if isinstance(expression, list):
        return [_swapped(value, old, new, hits) for value in expression]
    return expression


#: A command of every kind.
_EVERY_KIND: Final = (
    Step(add=entry("g", "s", Terms(), {})),
    Step(add=entry("g", "s", Terms(owner="o"), {})),
    Step(add=entry("g", "s", Terms(), {}), waited=1),
    Step(remove=("g",)),
    Step(renew=("g",)),
    Step(remove=("g",), force=True, tombstone_ttl=1),
)


# The variants


def _w1_grants(patches: Patches) -> None:
    patches.set(mongo_store, "MAJORITY", WriteConcern(w=1))


def _hand_over_w1(patches: Patches) -> None:
    handing_over = threading.local()

    class Weaker(WriteConcern):
        @property
        def document(self) -> Document:
            return {"w": 1} if getattr(handing_over, "now", False) else super().document

    apply = MongoStore.apply

    def weakly(self: MongoStore, key: str, made: Step, timeout: float) -> Reply:
        handing_over.now = bool(made.given)
        try:
            return apply(self, key, made, timeout)
        finally:
            handing_over.now = False

    patches.set(mongo_store, "MAJORITY", Weaker(w="majority"))
    patches.set(MongoStore, "apply", weakly)


def _client_clock(patches: Patches) -> None:
    arguments = Step.arguments

    def with_our_time(self: Step, limits: Limits, clock: object, cluster_time: object) -> Document:
        made = arguments(self, limits, clock, cluster_time)
        made["c"]["$literal"]["now"] = datetime.fromtimestamp(time.time(), UTC)
        return made

    patches.set(Step, "arguments", with_our_time)
    patches.swap("$$NOW", "$$c.now")


def _deadline_from_reply(patches: Patches) -> None:
    answer, judge = Commands.answer, Renewals.judge

    def answer_from_now(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        return answer(self, grant_id, reply, self.now(), number)

    def judge_from_now(self: Renewals, grant: Grant, found: Found | None, number: int, *times: float) -> None:
        judge(self, grant, found, number, self._now(), grant.length)

    patches.set(Commands, "answer", answer_from_now)
    patches.set(Renewals, "judge", judge_from_now)


def _deadline_from_news(patches: Patches) -> None:
    hear = Waits.result

    def hear_a_whole_lease(self: Waits, grant: Grant) -> WaitResult:
        result = hear(self, grant)
        return result if result.news is None else replace(result, queued_until=self._now() + grant.terms.lease)

    patches.set(Waits, "result", hear_a_whole_lease)


def _place_as_lease(patches: Patches) -> None:
    judge = Renewals.judge

    def judge_as_held(self: Renewals, grant: Grant, found: Found | None, number: int, *times: float) -> None:
        sent, length = times
        judge(self, grant, found, number, sent, grant.length if grant.state is State.HELD else length)

    patches.set(Renewals, "judge", judge_as_held)


def _look_as_renewal(patches: Patches) -> None:
    answer = Commands.answer

    def believe_a_look(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        return answer(self, grant_id, reply, sent, reply.beat if number == -1 else number)

    patches.set(Commands, "answer", believe_a_look)


def _no_deadline(patches: Patches) -> None:
    patches.set(Grant, "held", property(lambda self: self.state is State.HELD))


def _release_by_key(patches: Patches) -> None:
    apply = MongoStore.apply

    def release(self: MongoStore, key: str, _: str, timeout: float) -> bool:
        with pymongo.timeout(timeout):
            nobody: Document = {"$set": {"holders": [], "expires_at": None}}
            return self.collection.update_one({"_id": key}, nobody).matched_count == 1

    def release_or_apply(self: MongoStore, key: str, step: Step, timeout: float) -> Reply:
        if step.given and step.add is None:
            return Reply(found=release(self, key, "", timeout))
        return apply(self, key, step, timeout)

    patches.set(MongoStore, "apply", release_or_apply)
    patches.set(MongoStore, "release_uncontended", release)


def _renewal_without_grant(patches: Patches) -> None:
    judge = Renewals.judge

    def renew(self: MongoStore, keys: Sequence[str], made: Step, timeout: float) -> dict[str, Found]:
        mine = {"_id": {"$in": list(keys)}}
        with pymongo.timeout(timeout):
            self.collection.update_many(mine, rule.pipeline(made), let=made.arguments(self.limits, CLOCK, CLUSTER_TIME))
            found = list(self.collection.find(mine, {"holders": 1, "waiters": 1, "token": 1, "now": "$$NOW"}))
        return {document["_id"]: read_found(document) for document in found}

    def judge_by_key(self: Renewals, grant: Grant, found: Found | None, number: int, *times: float) -> None:
        if found is not None and grant.state is State.HELD:
            anybody = next(iter(found.holders.values()), None)
            found = replace(found, holders={grant.id: replace(anybody, token=grant.token)} if anybody else {})
        judge(self, grant, found, number, *times)

    patches.set(MongoStore, "renew", renew)
    patches.set(Renewals, "judge", judge_by_key)
    patches.swap({"$in": ["$$e.grant", "$$c.renew"]}, True)


def _no_tombstone(patches: Patches) -> None:
    patches.set(protocol, "TOMBSTONE_TTL", 0)


def _unknown_outcome_forgotten(patches: Patches) -> None:
    def forget(self: Session, grant: Grant) -> None:
        grant.release()
        self.forget(grant)
        grant.owner_ref = None

    patches.set(Session, "abandon", forget)


def _taken_and_forgotten(patches: Patches) -> None:
    lost = Session.lost

    def lost_without_doubt(self: Session, grant: Grant) -> None:
        grant.outcome_unknown = False
        lost(self, grant)

    patches.set(Session, "lost", lost_without_doubt)


def _counter_token(patches: Patches) -> None:
    next_one: Document = {"$add": ["$$doc.token", 1]}
    patches.swap({"$max": [next_one, {"$toLong": "$$now"}]}, next_one)


def _local_read(patches: Patches) -> None:
    apply = MongoStore.apply

    def read(self: Acquisition) -> Apply:
        return Apply(self.key, Step(ask=self.grant))

    def apply_or_look(self: MongoStore, key: str, made: Step, timeout: float) -> Reply:
        if made != Step(ask=made.ask, beat=made.beat):
            return apply(self, key, made, timeout)
        local = self.collection.with_options(read_concern=ReadConcern("local"))
        let = {"c": {"$literal": {"ask": made.ask}}}
        reply = read_reply(key, local.find_one({"_id": {"$eq": key}}, REPLY, let=let))
        return replace(reply, beat=made.beat) if reply.held else reply

    patches.set(Acquisition, "read", read)
    patches.set(MongoStore, "apply", apply_or_look)


def _no_op_as_proof(patches: Patches) -> None:
    def renew(self: MongoStore, keys: Sequence[str], made: Step, timeout: float) -> dict[str, Found]:
        mine = {"_id": {"$in": list(keys)}, "holders.grant": {"$in": made.renew}}
        with pymongo.timeout(timeout):
            self.collection.update_many(mine, {"$set": {"v": 1}})
            local = self.collection.with_options(read_concern=ReadConcern("local"))
            documents = list(local.find(mine))
        return {
            document["_id"]: Found(
                document["token"],
                {item["grant"]: Beat(made.beat, token=item["token"]) for item in document["holders"]},
                {},
            )
            for document in documents
        }

    patches.set(MongoStore, "renew", renew)


def _old_time_cuts(patches: Patches) -> None:
    holders = rule._live("holders", rule._HOLDER_RENEWED)
    no_longer = {"$min": ["$$e.until", after("$$NOW", "$$e.server_lease")]}
    patches.swap(holders, for_each(holders, merge("$$e", {"until": no_longer})))


def _late_unnoticed(patches: Patches) -> None:
    patches.swap(rule.is_late("$$doc.cluster_time"), False)


def _set_back_unnoticed(patches: Patches) -> None:
    patches.swap({"$lt": ["$$NOW", {"$subtract": ["$$doc.written_at", LEAP]}]}, False)


def _no_clock_stamp(patches: Patches) -> None:
    patches.set(ClockEncoder, "transform_python", lambda self, value: "")


def _waiters_never_pruned(patches: Patches) -> None:
    patches.swap(rule._live("waiters", rule._WAITER_RENEWED), "$$doc.waiters")


def _newest_first(patches: Patches) -> None:
    one, before = [rule._new_entry(False)], {"$lte": ["$$e.since", rule._CAME_AT]}
    patches.swap({"$concatArrays": ["$$queue", one]}, {"$concatArrays": [one, "$$queue"]})
    patches.swap(only("$$queue", before), [])
    patches.swap(only("$$queue", {"$not": [{"$or": [before, rule._IS_NEW]}]}), "$$queue")


def _arrival_forgotten(patches: Patches) -> None:
    patches.set(Commands, "with_arrival", lambda self, made, entry, grant, now: made)


def _released_renewed(patches: Patches) -> None:
    renewed = {"$in": ["$$e.grant", "$$c.renew"]}
    patches.swap({"$and": [renewed, {"$not": ["$$e.released"]}]}, renewed)


def _no_type_guards(patches: Patches) -> None:
    patches.swap(rule.IS_WHOLE, True)


def _no_fork_guard(patches: Patches) -> None:
    def close_all(cls: type[Sessions[Any]]) -> None:
        for inherited in cls._inherited:  # also what other tests have left, of which some cannot be closed any more
            with contextlib.suppress(Exception):
                inherited.close()

    patches.set(Sessions, "close_all", classmethod(close_all))


@dataclass(frozen=True)
class Variant:
    """One defect. harm: what it would do. breaks: the promises and rows of the failure table. finder: the scenario in
    `scenarios` that finds it."""

    name: str
    defect: str
    harm: str
    breaks: str
    finder: str
    patch: Callable[[Patches], None]

    def __str__(self) -> str:
        return self.name


VARIANTS: Final = {
    variant.name: variant
    for variant in (
        Variant(
            "w1-grants",
            "a grant is reported when the primary alone has it",
            "a failover forgets the grant, and a second one holds the lock as well",
            "P3, F4, F5",
            "held_without_the_majority",
            _w1_grants,
        ),
        Variant(
            "hand-over-w1",
            "a lock that is handed over within the process is taken before the majority has it",
            "a failover forgets the hand-over: two holders",
            "P3, F5",
            "handed_over_without_the_majority",
            _hand_over_w1,
        ),
        Variant(
            "client-clock",
            "leases are judged by the wall clock of the caller",
            "a host whose clock is ahead takes locks that are held",
            "P4, F25",
            "wall_clock_ahead",
            _client_clock,
        ),
        Variant(
            "deadline-from-reply",
            "a lease is counted from the answer, not from before the command was sent",
            "after a slow answer the holder's deadline is later than the lease on the server",
            "P1, F16, F19",
            "slow_answer",
            _deadline_from_reply,
        ),
        Variant(
            "deadline-from-news",
            "a waiter counts its lease from the moment when a bell tells of its grant",
            "the server gave it only the rest of its place in the queue: two holders",
            "P1, F42",
            "news_at_the_last_moment",
            _deadline_from_news,
        ),
        Variant(
            "place-as-lease",
            "a renewal that a waiter sent counts for a whole lease if it holds the lock by the time of the answer",
            "the server gave it only its place in the queue: two holders",
            "P1, F62",
            "granted_while_renewed",
            _place_as_lease,
        ),
        Variant(
            "look-as-renewal",
            "a waiter that reads its place counts this as a renewal",
            "no command has extended that place on the server: two holders",
            "P1, F62",
            "looked_at_its_place",
            _look_as_renewal,
        ),
        Variant(
            "no-deadline",
            "`held` does not check the time",
            "a holder that could not renew still believes that it holds the lock: two holders",
            "P1, P7, F28",
            "lease_over",
            _no_deadline,
        ),
        Variant(
            "release-by-key",
            "a release removes the present holder of the key",
            "a late release frees the lock of the next holder, and a third one gets it",
            "P1, F38",
            "late_release",
            _release_by_key,
        ),
        Variant(
            "renewal-without-grant",
            "a renewal extends any lease of the key, and counts it as its own",
            "a loss is never reported",
            "P7, F39, F50",
            "lock_taken_away",
            _renewal_without_grant,
        ),
        Variant(
            "no-tombstone",
            "an id that was abandoned can still be queued",
            "a command that was held up in the network acquires the lock without a holder, for a whole lease",
            "P6, F17",
            "late_command",
            _no_tombstone,
        ),
        Variant(
            "taken-and-forgotten",
            "a lock that was taken away is not removed for good, though an earlier command for it got no answer",
            "that command arrives and acquires the lock without a holder, for a whole lease",
            "P6, F17",
            "late_command_of_a_lost_lock",
            _taken_and_forgotten,
        ),
        Variant(
            "unknown-outcome-forgotten",
            "the possible grant of a cancelled or failed acquisition is not removed",
            "the lock is taken without a holder until its lease ends",
            "P6, F15, F36",
            "cancelled_after_the_grant",
            _unknown_outcome_forgotten,
        ),
        Variant(
            "counter-token",
            "fencing tokens count from 1 in every new document",
            "after a purge a storage refuses the new holder and accepts the writes of an old one",
            "P2, F10",
            "purged_document",
            _counter_token,
        ),
        Variant(
            "local-read-grant",
            "a waiter relies on a read from the primary that shows its grant",
            "a release that a failover undoes leads to a second holder",
            "P3, F5, F7",
            "looked_before_the_majority",
            _local_read,
        ),
        Variant(
            "no-op-as-proof",
            "a renewal that changes nothing counts because it was acknowledged",
            "a primary that was cut off acknowledges it at once: two holders",
            "P1, F6",
            "renewed_by_nobody",
            _no_op_as_proof,
        ),
        Variant(
            "old-time-cuts",
            "a lease that ends later than a whole lease from the command's own `$$NOW` is cut to that",
            "a command that was held up cuts the lease that was renewed meanwhile: two holders",
            "P1, F61",
            "held_up_after_parsing",
            _old_time_cuts,
        ),
        Variant(
            "late-unnoticed",
            "a command is judged by its own `$$NOW`, also if it was parsed before the last writer",
            "it looks like the first after a clock was set back, and cuts the lease: two holders",
            "P1, F61",
            "held_up_after_parsing",
            _late_unnoticed,
        ),
        Variant(
            "set-back-unnoticed",
            "the rule does not check whether the clock shows less than when the document was written",
            "after the clock was set back, a dead holder keeps the lock for longer by that time",
            "P6, F23",
            "clock_set_back",
            _set_back_unnoticed,
        ),
        Variant(
            "no-clock-stamp",
            "a new primary judges times that another one wrote",
            "after a failover to a member whose clock is ahead: two holders",
            "P1, P4, F21",
            "failover_to_a_clock_ahead",
            _no_clock_stamp,
        ),
        Variant(
            "waiters-never-pruned",
            "a waiter stays in the queue when it is dead",
            "a dead waiter blocks all waiters behind it that would fit",
            "P5, F41",
            "dead_waiter",
            _waiters_never_pruned,
        ),
        Variant(
            "newest-first",
            "a newcomer is queued before all waiters",
            "under load a waiter waits for ever",
            "P5",
            "order_of_arrival",
            _newest_first,
        ),
        Variant(
            "arrival-forgotten",
            "a waiter of a local queue enters the document's queue as if it had just arrived",
            "a process that arrived later is served first",
            "P5, F69",
            "line_and_queue",
            _arrival_forgotten,
        ),
        Variant(
            "released-renewed",
            "a renewal extends a released lock that is kept for its minimum hold",
            "a job that is to run once in a period misses one",
            "F64",
            "renewed_after_the_release",
            _released_renewed,
        ),
        Variant(
            "no-type-guards",
            "a document is used whatever it contains",
            "a live lock whose end is not a date is taken over, and the document rewritten",
            "F55",
            "damaged_document",
            _no_type_guards,
        ),
        Variant(
            "no-fork-guard",
            "at its exit a forked child releases what it has inherited",
            "the child of a fork frees its parent's lock",
            "P1, F30",
            "child_exits",
            _no_fork_guard,
        ),
    )
}


def breaking(name: str) -> Patches:
    """Break the engine of this process; for good, unless the patches are undone. Raises NothingToBreak, KeyError."""
    patches = Patches()
    try:
        VARIANTS[name].patch(patches)
    except BaseException:
        patches.undo()
        raise
    return patches


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Break the engine of this process for a block. Sessions that live on behave as patched, so make new ones in it."""
    patches = breaking(name)
    try:
        yield
    finally:
        patches.undo()


def from_environment() -> str:
    """Break the engine of this process as MONGOLOCK_BROKEN says; return the variant's name, or "" for none."""
    name = os.environ.get(VARIABLE, "")
    if name:
        breaking(name)
    return name


def table() -> str:
    """The variants as the table of `docs/evidence/mutants.md`: `python -m verify.faults.broken` prints it."""
    rows = [("variant", "defect", "consequence", "breaks", "found by"), ("---",) * 5]
    rows += [(f"`{v.name}`", v.defect, v.harm, v.breaks, f"`{v.finder}`") for v in VARIANTS.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(table())
