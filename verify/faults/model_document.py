"""What the server has in the model of the protocol (`verify/faults/model.py`), and what a command makes of it.

That is not written here once more: it is `engine/rule_in_python.py`, the rule in Python, which
`tests/engine/test_rule.py` compares with the real pipeline on a real server.

All times are what is left of them, in ticks, by the clock of the server as it is now. So two states that differ only in
the time of day are one state, and there are only so many. For the same reason a cluster time is only its place in an
order.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, NamedTuple

from bson.timestamp import Timestamp

from django_mongolock.engine.document import Terms, entry
from django_mongolock.engine.rule_in_python import Moment, apply_rule
from django_mongolock.engine.step import Limits, Step

#: How much longer the server lets a lease live than its holder believes.
MARGIN: Final = 1
#: Longer than any command is on its way. This is the one thing about the network that the protocol relies on.
TOMBSTONE_TTL: Final = 1_000_000
FOREVER: Final = TOMBSTONE_TTL
#: A tick is so many seconds: no clock is set back by less than a tick, and each time that it is gets noticed.
TICK: Final = 10
#: Who has waited for so long has waited longest.
LONG_AGO: Final = 4
#: The time of the server is always this. It is long before 1970: tokens are counted up from 1.
NOW: Final = datetime(1950, 1, 1, tzinfo=UTC)
#: The cluster time of the last writer.
ORDER: Final = 1_000
LIMITS: Final = Limits()
BLANK: Final = apply_rule(None, Step(tombstone_ttl=1), LIMITS, Moment(NOW)) or {}

#: Commands that do nothing unless their sender holds the lock.
CONDITIONAL: Final = ("release", "release for good", "hand over")


class Rules(NamedTuple):
    """What all clients of a world ask for, in ticks, and what is wrong with them.

    lease, waiter_lease: how long they believe in a lease, or in a place in the queue. min_hold: for how long a lock is
    kept at least. more: by how much a holder may make its lease longer. arrivals: does the queue stand in the order of
    arrival? bug: the defect that is built in.
    """

    lease: int = 1
    waiter_lease: int = 1
    min_hold: int = 0
    more: int = 0
    arrivals: bool = False
    bug: str = ""

    @property
    def server_lease(self) -> int:
        """How long the server lets a lease live."""
        return self.lease + MARGIN


class Holder(NamedTuple):
    """Who holds the lock, how much is left of its lease by the server's clock, and its token.

    kept: how much is left of its minimum hold, if it has one. released: is it kept for that only? more: by how much its
    lease was made longer.
    """

    name: str
    left: int
    token: int
    kept: int = 0
    released: bool = False
    more: int = 0


class Waiter(NamedTuple):
    """Who waits, and how much is left of its place in the queue. waited: for how long, from 1 on, where
    the order of arrival counts."""

    name: str
    left: int
    waited: int = 0


class Document(NamedTuple):
    """The document of the key. token: the last one given. clock: the election under which it was written last."""

    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()
    tombstones: frozenset[str] = frozenset()
    token: int = 0
    clock: int = 0

    def names(self) -> set[str]:
        """Who is in it."""
        return {holder.name for holder in self.holders} | {waiter.name for waiter in self.waiters}

    @property
    def released(self) -> Holder | None:
        """Who has given the lock back, and is only kept for a minimum hold."""
        return next((holder for holder in self.holders if holder.released), None)

    def after(self, ticks: int, floor: int = 0) -> Document:
        """When so many ticks have gone by; fewer than none: when the clock was set back. floor: what was over before
        is as good as over just then."""
        return _elapsed(self, ticks, floor)


@cache
def _elapsed(document: Document, ticks: int, floor: int) -> Document:
    return document._replace(
        holders=tuple(
            holder._replace(left=max(floor, holder.left - ticks), kept=max(0, holder.kept - ticks))
            for holder in document.holders
        ),
        waiters=tuple(
            waiter._replace(left=max(floor, waiter.left - ticks), waited=_longer(waiter.waited, ticks))
            for waiter in document.waiters
        ),
    )


def _longer(waited: int, ticks: int) -> int:
    return waited and min(LONG_AGO, waited + ticks)


class Parsed(NamedTuple):
    """What the server read when it parsed a command: how many ticks ago that was, and its cluster time.

    age: fewer than none if the clock was set back since. order: 0 is that of the last writer of the document.
    """

    age: int = 0
    order: int = 1


class Reply(NamedTuple):
    """What a command answers about who sent it. state: does it hold the lock, or stand in the queue? whole: was that
    given or renewed by this very command? token: of its grant. last: the last one given to anybody. found: for a
    release. left: what a read shows of its time; nobody counts on that."""

    state: str = ""
    whole: bool = False
    token: int = 0
    last: int = 0
    found: bool = True
    left: int = 0


class Command(NamedTuple):
    """A command that is carried out: what it does, for whom, and when it was parsed. next_waiter: to whom it hands the
    lock over. waited: for how long whoever asks has waited, from 1 on, where the order of arrival counts."""

    kind: str
    name: str
    parsed: Parsed = Parsed()
    next_waiter: str = ""
    waited: int = 0


class Written(NamedTuple):
    """The document as a command has left it, when that was parsed, and the answer."""

    document: Document
    parsed: Parsed
    reply: Reply


@cache
def execute(document: Document, written: Parsed, command: Command, election: int, rules: Rules) -> Written:
    """What the primary of *election* makes of a command, by the rule that the real pipeline is compared with.

    written: when the command was parsed that wrote the document last.
    """
    kind, name, parsed, next_waiter, _ = command
    found = kind not in CONDITIONAL or name in {holder.name for holder in document.holders}
    if not found and rules.bug != "release by key":
        return Written(document, written, Reply(last=document.token, found=False))  # it is sent with that condition
    before = _stored(document, written, rules)
    moment = Moment(_at(-parsed.age), str(election), Timestamp(ORDER + parsed.order, 1))
    before, moment = _with_bug(before, moment, rules)
    step = _step(command, document, rules)
    stored = apply_rule(before, step, LIMITS, moment)
    assert stored is not None
    if rules.bug == "a renewal revives what was released":
        stored["holders"] = [_revived(e, step) for e in stored["holders"]]
    wrote = Parsed(_ticks(NOW - stored["written_at"]), stored["cluster_time"].time - ORDER)
    return Written(_read(stored, rules), wrote, _reply(stored, next_waiter or name, found=found))


def read(document: Document, name: str, rules: Rules) -> Reply:
    """What somebody reads about himself."""
    for holder in document.holders:
        if holder.name == name:
            left = min(rules.lease, holder.left - MARGIN)
            return Reply("held", token=holder.token, last=document.token, left=left)
    for waiter in document.waiters:
        if waiter.name == name:
            return Reply("queued", last=document.token, left=min(rules.lease, waiter.left - MARGIN))
    return Reply(last=document.token)


def _reply(stored: dict[str, Any], name: str, *, found: bool) -> Reply:
    last = int(stored["token"])
    for state, field in (("held", "holders"), ("queued", "waiters")):
        for e in stored[field]:
            if e["grant"] == name:
                return Reply(state, e["beat"] == 1, int(e.get("token", 0)), last, found)
    return Reply(last=last, found=found)


# The document as it is stored, at the time NOW


def _stored(document: Document, written: Parsed, rules: Rules) -> dict[str, Any]:
    asked = {waiter.name: _asked(waiter.name, rules) for waiter in document.waiters}
    return {
        **BLANK,
        "holders": [_held(holder, rules) for holder in document.holders],
        "waiters": [
            {**asked[w.name], "until": _at(w.left), "since": _at(-w.waited), "beat": 0} for w in document.waiters
        ],
        "tombstones": [{"grant": name, "until": _at(TOMBSTONE_TTL)} for name in sorted(document.tombstones)],
        "token": document.token,
        "clock": str(document.clock),
        "written_at": _at(-written.age),
        "cluster_time": Timestamp(ORDER + written.order, 1),
    }


def _held(holder: Holder, rules: Rules) -> dict[str, Any]:
    at = _at(holder.kept - rules.min_hold)
    e = {**_asked(holder.name, rules, holder.more), "since": at, "acquired_at": at, "beat": 0}
    e |= {"until": _at(holder.left), "token": holder.token}
    return {**e, "released": NOW} if holder.released else e


def _read(stored: dict[str, Any], rules: Rules) -> Document:
    return Document(
        tuple(
            Holder(
                e["grant"],
                _ticks(e["until"] - NOW),
                int(e["token"]),
                max(0, rules.min_hold - _ticks(NOW - e["acquired_at"])),
                "released" in e,
                e["lease"] // (TICK * 1_000) - rules.lease,
            )
            for e in stored["holders"]
        ),
        tuple(
            Waiter(
                e["grant"],
                _ticks(e["until"] - NOW),
                min(LONG_AGO, _ticks(NOW - e["since"])) if rules.arrivals else 0,
            )
            for e in stored["waiters"]
        ),
        frozenset(tombstone["grant"] for tombstone in stored["tombstones"]),
        int(stored["token"]),
        int(stored["clock"]),
    )


def _at(ticks: int) -> datetime:
    return NOW + timedelta(seconds=TICK * ticks)


def _ticks(span: timedelta) -> int:
    return span // timedelta(seconds=TICK)


# Commands as the library sends them


def _step(command: Command, document: Document, rules: Rules) -> Step:
    kind, name, _, next_waiter, _ = command
    tombstone_ttl = 0 if rules.bug == "no tombstone" else TOMBSTONE_TTL * TICK * 1_000
    everybody = tuple(holder.name for holder in document.holders)
    steps = {
        "ask": Step(ask=name, add=_asked(name, rules)),
        "try": Step(ask=name, add=_asked(name, rules), trial=True),
        "confirm": Step(ask=name, renew=(name,)),
        "renewal": Step(renew=(name,)),
        "renewal of its place": Step(renew=(name,)),
        "extend": _extension(name, rules),
        "release": Step(remove=everybody if rules.bug == "release by key" else (name,), force=not rules.min_hold),
        # Another command that asks for it may still be on its way.
        "release for good": Step(remove=(name,), force=not rules.min_hold, tombstone_ttl=tombstone_ttl),
        "ensure removed": Step(ask=name, remove=(name,), force=True, tombstone_ttl=tombstone_ttl),
        "hand over": Step(ask=next_waiter, add=_asked(next_waiter, rules), remove=(name,), force=True, given=name),
        "force": Step(remove=everybody, force=True),
    }
    waited = 0 if rules.bug == "arrivals are forgotten" else command.waited
    return replace(steps[kind], beat=1, waited=waited * TICK * 1_000)


def _extension(name: str, rules: Rules) -> Step:
    longer = _asked(name, rules, rules.more)
    return Step(ask=name, renew=(name,), lease=longer["lease"], server_lease=longer["server_lease"])


@cache
def _asked(name: str, rules: Rules, more: int = 0) -> dict[str, Any]:
    terms = Terms(
        lease=(rules.lease + more) * TICK,
        margin=0 if rules.bug == "no margin" else MARGIN * TICK,
        clock_margin=0,
        waiter_lease=rules.waiter_lease * TICK,
        min_hold=rules.min_hold * TICK,
    )
    return entry(name, "", terms, {})


# Defects of the server's side


def _with_bug(stored: dict[str, Any], moment: Moment, rules: Rules) -> tuple[dict[str, Any], Moment]:
    now, before, clock = moment.now, stored["cluster_time"], moment.clock
    cluster_time = moment.cluster_time or before
    newer = Timestamp(before.time + 1, 1)
    match rules.bug:
        case "no clock stamp":
            clock = stored["clock"]
        case "late is not noticed":
            cluster_time = max(cluster_time, newer)
        case "equal cluster times: an earlier time cuts":
            cluster_time = newer if cluster_time == before and now < stored["written_at"] else cluster_time
        case "equal cluster times: a later time prunes":
            cluster_time = newer if cluster_time == before and now > stored["written_at"] else cluster_time
        case "set back is not noticed":
            if cluster_time >= before:
                stored["written_at"] = min(stored["written_at"], now)
        case "an old time cuts":
            for field, length in (("holders", rules.lease), ("waiters", rules.waiter_lease)):
                longest = now + timedelta(seconds=TICK * (length + MARGIN))
                stored[field] = [{**e, "until": min(e["until"], longest)} for e in stored[field]]
    return stored, Moment(now, clock, cluster_time)


def _revived(e: dict[str, Any], step: Step) -> dict[str, Any]:
    renewed = e["grant"] in step.renew and "released" in e
    return {**e, "until": max(e["until"], NOW + timedelta(milliseconds=e["min_hold"]))} if renewed else e
