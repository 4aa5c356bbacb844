"""The one update on a real server, compared with the rule in Python, and step by step where it matters most."""

import datetime as dt
import itertools
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import bson
import pytest
from bson import Timestamp
from bson.int64 import Int64
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from django_mongolock.engine.rule.document import (
    LEAP,
    LONGEST_CLAIM,
    UNLIMITED,
    Limits,
    Mode,
    Step,
    Terms,
    entry,
    find_damage,
)
from django_mongolock.engine.rule.in_python import Moment, apply_rule, reply_of
from django_mongolock.engine.rule.pipeline import pipeline
from django_mongolock.engine.rule.replies import Reply
from django_mongolock.engine.store.base import Store
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockBackendFailed, LockDocumentDamaged
from tests.engine.twins import CALM, TIMEOUT, Twin, in_mongodb
from tests.support.lock_documents import document as lock_document
from tests.support.lock_documents import entry as lock_entry

Document = dict[str, Any]

TERMS = Terms(lease=20, margin=2, waiter_lease=10)
CAPACITIES: dict[Mode, int] = {"exclusive": 1, "shared": UNLIMITED, "semaphore": 3}

_numbers = itertools.count(1)


def asks(grant: str, terms: Terms = TERMS) -> Step:
    """Return the step that asks for a grant."""
    return Step(ask=grant, add=entry(grant, "s", terms, {}))


def add(store: Store, key: str, grant: str) -> Reply:
    """Ask for a grant of one of several keys."""
    return store.apply(key, asks(grant), TIMEOUT)


def shifted(items: str, names: tuple[str, ...], milliseconds: int) -> Document:
    moved = {name: {"$subtract": [f"$$e.{name}", milliseconds]} for name in names}
    return {"$map": {"input": items, "as": "e", "in": {"$mergeObjects": ["$$e", moved]}}}


def travel(collection: Collection[Document], key: str, seconds: float) -> None:
    """Let *seconds* go by for one document. A negative number sets the server's clock back."""
    milliseconds = round(seconds * 1000)
    changes = {
        "holders": shifted("$holders", ("until", "since", "acquired_at"), milliseconds),
        "waiters": shifted("$waiters", ("until", "since"), milliseconds),
        "tombstones": shifted("$tombstones", ("until",), milliseconds),
        "written_at": {"$subtract": ["$written_at", milliseconds]},
    }
    collection.update_one({"_id": key}, [{"$set": changes}])


# The two that carry the rule out

#: All lengths end in 5 s, and time goes by in steps of 10 s. The speed of the test never decides an outcome.
LENGTHS = st.sampled_from([5, 15, 25, 45])
SOME = st.integers(1, 3)


@dataclass
class Place:
    """The place in which a machine works. (Hypothesis inspects all attributes of a machine class, and a client has
    everything.)"""

    server: MongoClient[Document]
    store: MongoStore


def now_and_election(server: MongoClient[Document]) -> tuple[dt.datetime, str]:
    hello = server.admin.command("hello")
    return hello["localTime"].replace(tzinfo=dt.UTC), str(hello["electionId"])


class Machine(RuleBasedStateMachine):
    """A machine that does the same to a stored document and, by the Python rule, to a copy of it."""

    place: Place

    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.store, self.limits = self.place.store, self.place.store.config.limits
        # A release is not confirmed by the majority, and looked at all the same.
        self.locks = self.store.collection.with_options(read_concern=ReadConcern("local"))
        self.key = uuid.uuid4().hex
        self.real = {"_id": self.key}
        self.tokens: list[int] = []
        self.document: Document | None = None

    def entries(self, field: str) -> list[Document]:
        return list(self.document[field]) if self.document else []

    def ids(self, field: str) -> list[str]:
        return [e["grant"] for e in self.entries(field)]

    def look(self) -> None:
        self.document = self.locks.find_one(self.real)

    def both(self, step: Step, send: Callable[[], Any], sent: bool = True) -> Any:
        """Let the server carry out *step* by calling *send*, and compare the result with the Python rule.

        The server carries out the step at a moment between two reads of its clock. The results of the Python rule at
        both reads are the bounds of every date and number. Everything else must be equal.

        - sent: whether the step reaches the document.
        """
        before = self.document
        earliest, clock = now_and_election(self.place.server)
        outcome = send()
        latest, _ = now_and_election(self.place.server)
        self.look()
        if not sent:
            assert self.document == before
            return outcome
        # The time of this command, unless the document has a later one.
        op = (self.document or {}).get("cluster_time")
        if before is not None and op == before["cluster_time"]:
            op = Timestamp(1, 1)  # late
        first, last = (apply_rule(before, step, self.limits, Moment(now, clock, op)) for now in (earliest, latest))
        real = None if self.document is None else {k: v for k, v in self.document.items() if k != "_id"}
        for bound in (first, last):
            if bound is not None:
                bound.pop("_id", None)
        assert_between(first, real, last)
        if isinstance(outcome, Reply):
            bounds = [
                asdict(reply_of("k", d, step.ask, now, step.owner)) for d, now in ((first, latest), (last, earliest))
            ]
            told = {name: value for name, value in asdict(outcome).items() if name != "holder"}
            for name, one in told.items():
                # In milliseconds, because the rest is a difference of two moments that both lie between.
                low, high = (bound[name] for bound in bounds)
                value = one
                if isinstance(one, tuple):
                    low, value, high = list(low), list(one), list(high)
                elif not isinstance(value, dict):
                    low, high = sorted((low, high), key=lambda bound: (bound is not None, bound))
                assert_between(low, value, high, name)
        return outcome

    def apply(self, step: Step) -> None:
        self.both(step, lambda: self.store.apply(self.key, step, TIMEOUT))

    @rule(
        target=grants,
        mode=st.sampled_from(list(CAPACITIES)),
        lease=LENGTHS,
        waiter_lease=LENGTHS,
        min_hold=st.sampled_from([0, 0, 0, 15, 35]),
        owner=st.sampled_from([None, "$bob"]),
        trial=st.booleans(),
        waited=st.sampled_from([0, 0, 5_000, 25_000]),
        weight=st.sampled_from([1, 1, 2]),
    )
    def enter(self, *, mode: Mode, lease: int, trial: bool, waited: int, weight: int, **more: Any) -> Document:
        weight = weight if mode == "semaphore" else 1
        terms = Terms(mode, CAPACITIES[mode], lease, 0, **more, clock_margin=0, weight=weight)
        new = entry(f"g{next(_numbers)}", "s", terms, {"label": "$holders"})
        if waited:
            new["behind"] = waited // 5_000
        self.apply(Step(ask=new["grant"], add=new, trial=trial, waited=waited, beat=next(_numbers)))
        return new

    @rule(new=grants, trial=st.booleans())
    def enter_again(self, new: Document, trial: bool) -> None:
        """Send a command again, or late."""
        self.apply(Step(ask=new["grant"], add=new, trial=trial))

    @rule(new=grants, former=grants, trial=st.booleans())
    def resume(self, new: Document, former: Document, trial: bool) -> None:
        """Let *new* take the place of *former*, as a caller that knows that the process of *former* is gone."""
        if new["grant"] != former["grant"]:
            remove = (former["grant"],)
            self.apply(Step(ask=new["grant"], add=new, remove=remove, force=True, resumes=True, trial=trial))

    @rule(
        removed=st.lists(grants, min_size=1, max_size=2),
        tombstone_ttl=st.sampled_from([0, 25_000]),
        force=st.booleans(),
    )
    def remove(self, removed: list[Document], tombstone_ttl: int, force: bool) -> None:
        ids = tuple(dict.fromkeys(new["grant"] for new in removed))
        self.apply(Step(ask=ids[0], remove=ids, tombstone_ttl=tombstone_ttl, force=force))

    @rule(new=grants, giver=grants)
    def hand_over(self, new: Document, giver: Document) -> None:
        """Only while the giver holds it."""
        step = Step(ask=new["grant"], add=new, remove=(giver["grant"],), given=giver["grant"])
        sent = giver["grant"] in self.ids("holders")
        reply = self.both(step, lambda: self.store.apply(self.key, step, TIMEOUT)) if sent else None
        assert (reply is not None and reply.found) == sent

    @rule(asked=grants)
    def ask_to_release(self, asked: Document) -> None:
        self.apply(Step(request_release_of=(asked["grant"],), requested_by="$ann"))

    @rule(removed=grants)
    def release(self, removed: Document) -> None:
        step = Step(remove=(removed["grant"],))
        was_there = removed["grant"] in self.ids("holders")
        given = replace(step, given=removed["grant"])
        reply = self.both(step, partial(self.store.apply, self.key, given, TIMEOUT), sent=was_there)
        assert reply.found == was_there

    @rule(removed=grants)
    def release_alone(self, removed: Document) -> None:
        """Release by the short form. The short form works only if its effect is the same, except for the time of the
        purge."""
        if removed["min_hold"]:
            return
        alone = self.ids("holders") == [removed["grant"]] and not self.entries("waiters")
        before, left = self.document, set() if alone else {self.key}
        assert self.store.release_uncontended([self.key], [removed["grant"]], TIMEOUT) == left
        self.look()
        if alone and before and self.document:
            moment = Moment(*now_and_election(self.place.server))
            after = apply_rule(before, Step(remove=(removed["grant"],)), self.limits, moment)
            assert after is not None
            numbers = ("held_ms", "longest_hold_ms", "expired")
            for name in after.keys() - {"purge_at", "clock", "written_at", "cluster_time", *numbers}:
                assert self.document[name] == after[name], name

    @rule(
        target=grants,
        mode=st.sampled_from(list(CAPACITIES)),
        lease=LENGTHS,
        owner=st.sampled_from([None, "$bob"]),
        trial=st.booleans(),
    )
    def take_free(self, mode: Mode, lease: int, owner: str | None, trial: bool) -> Document:
        """Add by the short form. The short form works only if its effect is the same."""
        new = entry(f"g{next(_numbers)}", "s", Terms(mode, CAPACITIES[mode], lease, 0, 5, 0, owner, clock_margin=0), {})
        free = not self.entries("holders") and not self.entries("waiters")
        free = free and (self.document is None or self.document["cluster_time"] < Timestamp(2**31, 1))  # it is not late
        step = Step(ask=new["grant"], add=new, trial=trial)
        reply = self.both(step, lambda: self.store.take_free(self.key, step, TIMEOUT), sent=free)
        assert (reply is not None) == free
        return new

    @rule(gone=consumes(grants))
    def ensure_removed(self, gone: Document) -> None:
        self.apply(Step(ask=gone["grant"], remove=(gone["grant"],), force=True, tombstone_ttl=615_000))

    @rule(renewed=st.lists(grants, min_size=1, max_size=4), longer=st.sampled_from([0, 0, 65]))
    def renew(self, renewed: list[Document], longer: int) -> None:
        ids = tuple(dict.fromkeys(new["grant"] for new in renewed))
        self.apply(Step(ask=ids[0], renew=ids, beat=next(_numbers), lease=longer * 1000, server_lease=longer * 1000))

    @rule(renewed=st.lists(grants, min_size=1, max_size=4), counts=st.booleans())
    def renew_in_bulk(self, renewed: list[Document], counts: bool) -> None:
        ids = tuple(dict.fromkeys(new["grant"] for new in renewed))
        step = Step(renew=ids, beat=next(_numbers), behind=tuple(range(len(ids))) if counts else ())
        gone = self.document is None
        sent = gone or bool({*self.ids("holders"), *self.ids("waiters")} & set(ids))
        made_again = Step(remove=("",), tombstone_ttl=1)  # F144: a missing document is made before that counts
        carried_out = made_again if gone else step
        found = self.both(carried_out, lambda: self.store.renew([self.key], step, TIMEOUT), sent=sent)
        for field in ("holders", "waiters"):
            numbers = {grant: beat.number for grant, beat in getattr(found.get(self.key), field, {}).items()}
            assert numbers == {e["grant"]: e.get("beat", 0) for e in self.entries(field)}

    @rule(tens=SOME)
    def time_goes_by(self, tens: int) -> None:
        travel(self.locks, self.key, tens * 10)
        self.look()

    @rule()
    def clock_is_set_back(self) -> None:
        travel(self.locks, self.key, -1_000)
        self.look()

    @rule()
    def others_were_parsed_later(self) -> None:
        """Let the server have fixed the time of later commands before that of the last writer."""
        self.locks.update_one(self.real, {"$set": {"cluster_time": Timestamp(2**31, 1)}})
        self.look()

    @rule()
    def commands_come_in_order(self) -> None:
        self.locks.update_one(self.real, {"$set": {"cluster_time": Timestamp(2, 1)}})
        self.look()

    @rule()
    def failover(self) -> None:
        """Let the document look as if another primary with an unrelated clock had written it last."""
        self.locks.update_one(self.real, {"$set": {"clock": "another election"}})
        self.look()

    @rule()
    def purge(self) -> None:
        """Remove the document (TTL), with everything in it."""
        if not self.entries("holders") and not self.entries("waiters"):
            self.locks.delete_one(self.real)
            self.look()

    @invariant()
    def whole(self) -> None:
        assert self.document is None or find_damage(self.document) is None

    @invariant()
    def tokens_grow(self) -> None:
        """P2: Tokens grow, also after a purge."""
        fresh = [e["token"] for e in self.entries("holders") if e["token"] not in self.tokens]
        assert fresh == sorted(fresh)
        assert not fresh or fresh[0] > max(self.tokens, default=0)
        self.tokens += fresh

    @invariant()
    def holders_may_hold_together(self) -> None:
        """P1."""
        holders = self.entries("holders")
        assert len({e["mode"] for e in holders}) <= 1
        assert not holders or sum(1 + e.get("more_permits", 0) for e in holders) <= min(e["capacity"] for e in holders)


def assert_between(low: Any, real: Any, high: Any, where: str = "") -> None:
    """Assert that every date and number of *real* lies between those of *low* and *high*, and that the rest is equal,
    types included."""
    assert type(low) is type(real) is type(high), where
    if isinstance(real, dict):
        assert low.keys() == real.keys() == high.keys(), where
        for name in real:
            assert_between(low[name], real[name], high[name], f"{where}.{name}")
    elif isinstance(real, list):
        assert len(low) == len(real) == len(high), where
        for place, item in enumerate(real):
            assert_between(low[place], item, high[place], f"{where}[{place}]")
    else:
        assert low == real == high or low <= real <= high, where


@pytest.mark.long
def test_the_rule_is_the_same_in_mongodb_and_in_python(mongo: MongoClient[Document], config: StoreConfig) -> None:
    """P1, P2, P5: Prune, remove, renew, add, grant, resume, ask, leave tombstones, clamp and fail over, in any order.
    Every field of the document, including the statistics, equals the result of a hundred lines of Python."""
    config = StoreConfig(config.client, config.database, config.collection, Limits(waiters=4))
    store = MongoStore(config)
    machine = type("Machine", (Machine,), {"place": Place(mongo, store)})
    chosen = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    finally:
        store.close()


# One by one


def test_the_short_release_does_what_the_whole_one_does(store: MongoStore, collection: Collection[Document]) -> None:
    """The short release equals the whole one field by field, including the statistics, the index and the last holder.
    Only the purge may come an hour later."""
    results, k = [], in_mongodb(store)
    ways: list[Callable[[], bool]] = [
        lambda: not store.release_uncontended(["k"], ["g2"], TIMEOUT),
        lambda: k.release("g2"),
    ]
    for give_back in ways:
        k.write(None)
        k.add("g1")
        k.apply(remove=("g1",))
        k.add("g2")
        travel(collection, "k", 7)
        assert give_back()
        results.append(k.read())
    short, whole = results
    assert short.keys() == whole.keys()
    assert short["expires_at"] is whole["expires_at"] is None
    assert (short["holders"], short["waiters"], short["tombstones"]) == ([], [], [])
    for name in ("held_ms", "longest_hold_ms"):
        assert type(short[name]) is type(whole[name]) is Int64
        assert abs(short[name] - whole[name]) < 1_000
        assert short[name] >= 7_000
    assert short["last_holder"]["grant"] == whole["last_holder"]["grant"] == "g2"
    assert short["last_holder"].keys() == whole["last_holder"].keys()
    same = {"v", "changes", "acquisitions", "contended", "expired", "waited_ms", "longest_wait_ms", "clock"}
    assert {name: short[name] for name in same} == {name: whole[name] for name in same}
    assert find_damage(short) is None


@pytest.mark.parametrize(
    "change",
    [
        {"$set": {"v": 2}},
        {"$set": {"holders.0.grant": "another"}},
        {"$set": {"holders.0.acquired_at": "yesterday"}},
        {"$set": {"held_ms": "much"}},
        {"$set": {"waiters": "many"}},
        {"$set": {"waiters": [1]}},
        {"$push": {"holders": {}}},
        {"$rename": {"holders": "owners"}},
    ],
    ids=str,
)
def test_the_short_release_leaves_everything_else_alone(
    store: MongoStore, collection: Collection[Document], change: Document
) -> None:
    """F38, F55: Another caller's grant, one of several, and one in a damaged document stay exactly as they are."""
    add(store, "k", "g")
    collection.update_one({"_id": "k"}, change)
    before = collection.find_one()
    assert store.release_uncontended(["k"], ["g"], TIMEOUT) == {"k"}
    assert collection.find_one() == before


def test_the_short_release_of_many_says_what_it_left(store: MongoStore) -> None:
    """F108: One command releases the locks without waiters, and no others."""
    keys, grants = ["a", "b", "c"], ["ga", "gb", "gc"]
    for key, grant in zip(keys, grants, strict=True):
        add(store, key, grant)
    add(store, "b", "waits")
    assert store.release_uncontended(keys, grants, TIMEOUT) == {"b"}
    assert [len(each["holders"]) for each in store.latest.find().sort("_id")] == [0, 1, 0]


@pytest.mark.parametrize("removed", ["g1", "g2"])
def test_the_short_acquisition_is_for_a_free_lock_only(twin: Twin, removed: str) -> None:
    """F17: The short acquisition fails for a late command that finds its tombstone."""
    twin.add("g1")
    assert twin.take_free("g2") is None
    twin.apply(ask="g1", remove=("g1", removed), tombstone_ttl=60_000)
    reply = twin.take_free("g2")
    assert (reply is not None) is (removed == "g1")
    if reply is not None:
        assert (reply.held, reply.token, reply.waiting) == (True, twin.read()["token"], 0)


def holders(twin: Twin) -> list[str]:
    return [e["grant"] for e in twin.read()["holders"]]


def test_writers_do_not_starve_among_readers(twin: Twin) -> None:
    """F46: A reader that comes after a waiting writer waits behind it. Consecutive readers are granted together."""
    reading = Terms("shared", UNLIMITED)
    assert twin.add("r1", reading).held
    assert twin.add("r2", reading).held
    assert twin.add("w").place == 0
    assert twin.add("r3", reading).place == 1
    assert twin.add("r4", reading).place == 2
    for reader in ("r1", "r2"):
        twin.apply(remove=(reader,))
    assert holders(twin) == ["w"]
    twin.apply(remove=("w",))
    assert holders(twin) == ["r3", "r4"]
    first, second = twin.read()["holders"]
    assert first["token"] < second["token"]


def test_the_second_copy_of_a_command_that_resumes_puts_nothing_at_the_head(twin: Twin) -> None:
    """P5: The second copy finds no grant to resume, and its own grant comes last."""
    owned = replace(CALM, owner="o")
    for grant, terms in (("g1", owned), ("g3", CALM), ("g4", CALM)):
        twin.add(grant, terms)
    twin.add("g2", owned, remove=("g1",), force=True, resumes=True)
    assert holders(twin) == ["g2"]
    twin.apply(remove=("g2",))
    twin.add("g2", owned, remove=("g1",), force=True, resumes=True)
    assert [e["grant"] for e in (*twin.read()["holders"], *twin.read()["waiters"])] == ["g3", "g4", "g2"]


def test_a_renewal_may_lengthen_and_count(twin: Twin) -> None:
    """A renewal lengthens a holder's lease for good, and stores the number of waiters behind a waiter."""
    twin.add("h", TERMS)
    twin.add("w", TERMS)
    twin.renew("w", "h", behind=(3, 0), lease=60_000, server_lease=66_000)
    ((holder,), (waiter,)) = (twin.read()[field] for field in ("holders", "waiters"))
    assert (holder["lease"], holder["server_lease"], holder.get("behind")) == (60_000, 66_000, None)
    assert (waiter["lease"], waiter["server_lease"], waiter["behind"]) == (20_000, 22_000, 3)


def test_a_heavy_one_counts_for_several(twin: Twin) -> None:
    """P1, P5: A heavy waiter waits until there is room for its whole weight. No lighter waiter that came later
    overtakes it."""
    terms = Terms("semaphore", 4)
    weights = {"g0": 3, "g1": 1, "g2": 2, "g3": 1, "g4": 4}
    held = [twin.add(grant, replace(terms, weight=weight)).held for grant, weight in weights.items()]
    assert held == [True, True, False, False, False]
    for removed, left in (("g1",), ["g0"]), (("g0",), ["g2", "g3"]), (("g2", "g3"), ["g4"]):
        twin.apply(remove=removed)
        assert holders(twin) == left


@pytest.mark.parametrize(
    ("asked", "first", "second"),
    [
        ((2, 1, 2), (2,), (1,)),  # the head of the queue wants to be alone, and is not passed
        ((1, 2, 2), (1,), (2, 2)),
        ((1, 2, 1, 2), (1,), (2,)),
        ((1, 3, 3, 2, 3), (1,), (3, 3)),
        ((1, 3, 2, 3), (1,), (3, 2)),
        ((3, 3, 2), (3, 3), (3, 2)),
        ((5, 5, 5, 1), (5, 5, 5), (5, 5)),
    ],
)
def test_the_smallest_number_of_permits_counts(
    twin: Twin, asked: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """P1, P5: If the users of a key disagree, never more hold it than any of them has asked for. Waiters are granted in
    their order, as long as all holders then agree."""

    def capacities() -> tuple[int, ...]:
        return tuple(holder["capacity"] for holder in twin.read()["holders"])

    for number, permits in enumerate(asked):
        terms = Terms("semaphore", permits)
        assert twin.add(f"g{number}", terms, trial=True).held or not twin.add(f"g{number}", terms).held
    assert capacities() == first
    twin.release("g0")
    assert capacities() == second


#: Steps about "g0", an owner's holder, and about the waiters "g1" and "g2".
STEPS = {
    "held": asks("g1"),
    "queued": asks("g3"),
    "renew": Step(ask="g1", renew=("g1", "g2"), beat=5),
    "remove": Step(ask="g1", remove=("g1",)),
    "ensure removed": Step(ask="g1", remove=("g1",), force=True, tombstone_ttl=60_000),
    "trial": replace(asks("g4"), trial=True),
    "resume": replace(asks("g5"), remove=("g0",), force=True, resumes=True),
    "resume queued": replace(asks("g1"), remove=("g0",), force=True, resumes=True),
    "nothing to resume": replace(asks("g2"), remove=("g1",), force=True, resumes=True),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_that_is_sent_again_changes_nothing_but_really_writes(store: MongoStore, step: Step) -> None:
    """F2, F6, F15: The second copy finds everything done and still writes, because a stale primary acknowledges a
    command that writes nothing."""
    k = in_mongodb(store)
    k.add("g0", Terms(owner="o", lease=20, margin=2))
    k.add("g1")
    k.add("g2")
    store.apply("k", step, TIMEOUT)
    once = k.read()
    store.apply("k", step, TIMEOUT)
    twice = k.read()
    assert once.pop("changes") + 1 == twice.pop("changes")
    for document in (once, twice):
        for name in ("expires_at", "purge_at", "held_ms", "waited_ms", "written_at", "cluster_time"):
            document.pop(name, None)
        for item in document["holders"] + document["waiters"] + document["tombstones"]:
            item.pop("until")
    once["tombstones"], twice["tombstones"] = (
        [tombstone["grant"] for tombstone in d["tombstones"]][:1] for d in (once, twice)
    )
    assert once == twice


#: When the server parsed the first of some commands.
BEGAN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ParsedAt = Callable[[Step, float, str, int], Document]


@pytest.fixture(params=["mongodb", "python"])
def parsed_at(request: pytest.FixtureRequest, collection: Collection[Document]) -> ParsedAt:
    """Return a function that applies steps to one document by either rule. The server seems to have parsed each step
    *seconds* after `BEGAN`, at that cluster time, under that election."""
    documents: list[Document | None] = [None]

    def apply(step: Step, seconds: float, election: str, order: int) -> Document:
        moment = Moment(BEGAN + dt.timedelta(seconds=seconds), election, Timestamp(1_000 + order, 1))
        if request.param == "python":
            documents.append(apply_rule(documents[-1], step, Limits(), moment))
            return documents[-1] or {}
        answer: Document = collection.database.command(
            {
                "findAndModify": collection.name,
                "query": {"_id": "k"},
                "update": pipeline(step),
                "upsert": step.upserts,
                "new": True,
                "let": step.arguments(Limits(), election, "$$CLUSTER_TIME"),
                # A mongos sends these constants. The server then reads no clock of its own.
                "runtimeConstants": {"localNow": moment.now, "clusterTime": moment.cluster_time},
            },
            codec_options=bson.CodecOptions(tz_aware=True),
        )
        return dict(answer["value"])

    return apply


NOTHING = Step(remove=("another",))


def test_a_clock_that_is_a_little_behind_is_the_same_clock(parsed_at: ParsedAt) -> None:
    """F23: A clock that was corrected by less than a leap judges its own earlier times, and no lease begins again."""
    until = parsed_at(asks("g1"), 9, "1", 1)["holders"][0]["until"]
    assert parsed_at(NOTHING, 9 - LEAP / 2000, "1", 2)["holders"][0]["until"] == until


@pytest.mark.parametrize("order", [1, 2])
def test_a_clock_that_leaps_while_nothing_is_written_ends_no_lease(parsed_at: ParsedAt, order: int) -> None:
    """F23, P1: The cluster time stands still while the clock says that the lease is over. A whole lease begins
    again."""
    parsed_at(asks("g1"), 0, "1", 1)
    ends = [holder["until"] for holder in parsed_at(NOTHING, 100, "1", order)["holders"]]
    assert ends == ([BEGAN + timedelta(seconds=100 + TERMS.server_lease)] if order == 1 else [])


@pytest.mark.parametrize(("seconds", "end"), [(5, 15), (3_605, 3_610)])
def test_a_minimum_hold_is_no_longer_after_a_failover(parsed_at: ParsedAt, seconds: float, end: float) -> None:
    """F64: A minimum hold under a clock that is behind would end much later. The hold lasts at most its full length
    from now."""
    parsed_at(asks("g1", replace(TERMS, min_hold=10)), 3_600, "1", 1)
    parsed_at(Step(remove=("g1",)), 3_601, "1", 2)
    (holder,) = parsed_at(NOTHING, seconds, "2", 3)["holders"]
    assert holder["until"] == BEGAN + timedelta(seconds=end)


@pytest.mark.parametrize(("apart", "order"), [(3.3, ["there", "new"]), (60.0, ["new", "there"])])
def test_after_an_election_who_came_before_stands_before(parsed_at: ParsedAt, apart: float, order: list[str]) -> None:
    """F120: The last write was 3.3 s ago and queued a waiter. A waiter that has waited for 2.3 s came later. If the
    clocks of the two primaries cannot be one, a place counts the wait known at the last write."""
    for grant in ("holder", "there"):
        parsed_at(asks(grant, CALM), 0, "1", 1)
    after = parsed_at(replace(asks("new", CALM), waited=2_300), apart, "2", 2)
    assert [e["grant"] for e in after["waiters"]] == order


def test_the_longest_wait_and_hold_are_kept(parsed_at: ParsedAt) -> None:
    document: Document = {}
    steps = (asks("g1", CALM), 0), (asks("g2", CALM), 0), (Step(remove=("g1",)), 30), (Step(remove=("g2",)), 50)
    for number, (step, seconds) in enumerate((*steps, (asks("g3", CALM), 50)), 1):
        document = parsed_at(step, seconds, "1", number)
    assert (document["longest_wait_ms"], document["longest_hold_ms"]) == (30_000, 30_000)
    assert (document["acquisitions"], document["contended"], document["expired"]) == (3, 1, 0)


@pytest.mark.parametrize("order", [1, 2], ids=["parsed before", "same cluster time"])
@pytest.mark.parametrize(("other", "mine"), [("1", "2"), ("2", "1")], ids=["an earlier election", "a later election"])
def test_a_late_command_of_an_earlier_election_ends_no_lease_earlier(
    parsed_at: ParsedAt, other: str, mine: str, order: int
) -> None:
    """F61: A command is late because its primary steps down and comes back, or because its client has not heard of the
    election yet. The command names another election than the last writer, and its time is old. The next command with
    the same election must not judge the holder by that time."""
    until = parsed_at(asks("g1"), 9, mine, 2)["holders"][0]["until"]
    late = parsed_at(asks("g2"), 0, other, order)
    assert late["holders"][0]["until"] == until
    assert late["written_at"] == BEGAN + dt.timedelta(seconds=9)
    assert late["cluster_time"] == Timestamp(1_002, 1)
    after = parsed_at(asks("g3"), TERMS.server_lease + 1, other, 3)
    assert [e["grant"] for e in after["holders"]] == ["g1"]
    assert after["holders"][0]["until"] >= until


def test_a_release_that_comes_again_moves_no_minimum_hold(parsed_at: ParsedAt) -> None:
    """F64: A repeated release moves no minimum hold, even if the clock of the new primary is behind the grant."""
    parsed_at(asks("g1", replace(TERMS, min_hold=60)), 9, "1", 1)
    until = parsed_at(Step(remove=("g1",)), 0, "2", 2)["holders"][0]["until"]
    assert until == BEGAN + timedelta(seconds=60)
    again = parsed_at(Step(remove=("g1",)), 0.5, "2", 3)["holders"][0]
    assert (again["until"], again["released"]) == (until, BEGAN)


def test_a_place_has_one_length(twin: Twin) -> None:
    """F107: A place in the queue lives as long as its waiter believes, however long the queue is."""
    for number in range(40):
        twin.add(f"g{number}", TERMS)
    places = {e["until"] - e["since"] for e in twin.read()["waiters"]}
    assert places == {timedelta(seconds=TERMS.server_lease_of(TERMS.waiter_lease))}


def test_what_a_waiter_says_of_its_time_is_bounded(twin: Twin) -> None:
    """F119: A waiter's clock that has jumped moves its waiter at most ten minutes ahead, and leaves a readable
    document."""
    twin.add("holder")
    twin.add("patient", waited=LONGEST_CLAIM)
    for number, waited in enumerate((3_600_000, 2**62)):
        assert twin.add(f"jumped{number}", waited=waited).place == number + 1
    assert find_damage(twin.read()) is None


# Damage


@pytest.mark.parametrize("end", [-5, 0, 3600])
def test_a_single_try_never_takes_over_a_damaged_document(
    store: MongoStore, collection: Collection[Document], end: float
) -> None:
    """F55: Damage is an error if nothing else explains the refusal, because nobody holds the key or its lease is over.
    Until then, the key simply counts as taken."""
    collection.insert_one(lock_document("k", [lock_entry(left=3600)], change={"clock": "", "purge_at": "never"}))
    travel(collection, "k", 3600 - end)
    step = replace(asks("g1"), trial=True)
    if end > 0:
        assert not store.apply("k", step, TIMEOUT).held
    else:
        with pytest.raises(LockDocumentDamaged, match="purge_at"):
            store.apply("k", step, TIMEOUT)


def test_a_number_beyond_all_dates_stops_only_its_own_key(store: MongoStore, collection: Collection[Document]) -> None:
    """F55, F40: A document that makes the server refuse the whole renewal costs the other keys nothing."""
    keys = [f"k{number}" for number in range(10)]
    for key in keys:
        add(store, key, f"{key}-g")
    collection.update_one({"_id": "k3"}, {"$set": {"holders.0.server_lease": Int64(2**63 - 1)}})
    grants = {key: (f"{key}-g",) for key in keys}
    with pytest.raises(LockBackendFailed):  # who renews takes the keys one by one then, see `session`
        store.renew(keys, Step(renew=tuple(f"{key}-g" for key in keys), beat=5), TIMEOUT)
    for key in set(keys) - {"k3"}:
        assert store.renew([key], Step(renew=grants[key], beat=6), TIMEOUT)[key].holders[f"{key}-g"].number == 6
    assert not add(store, "k3", "g2").held


def test_who_asks_again_keeps_its_place(twin: Twin) -> None:
    """P5: A waiter that asks again stands there once, with the earliest time that it has told. An earlier one moves
    up."""
    asked = [
        ("h", 0, ""),
        ("a", 5_000, "a"),
        ("b", 4_000, "ab"),
        ("a", 0, "ab"),
        ("a", 1_000, "ab"),
        ("b", 60_000, "ba"),
    ]
    for grant, waited, queue in asked:
        twin.add(grant, waited=waited)
        assert [each["grant"] for each in twin.read()["waiters"]] == list(queue)
