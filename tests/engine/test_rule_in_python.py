"""The rule in Python alone, at the bounds of its times and numbers. (`test_rule` compares it with MongoDB.)"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson.timestamp import Timestamp

from django_mongolock.engine.rule.document import (
    LEAP,
    LONGEST_CLAIM,
    MAX_HOLDERS,
    MAX_TOMBSTONES,
    SAME_TIME,
    UNLIMITED,
    Limits,
    Step,
    Terms,
    entry,
)
from django_mongolock.engine.rule.in_python import (
    NOTHING,
    Moment,
    _is_former,
    _Rule,
    apply_rule,
    is_free,
    is_held,
    is_there,
    is_uncontended,
    reply_of,
)

Document = dict[str, Any]

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
#: A lease of 22 s on the server, and a place of 12 s.
TERMS = Terms(lease=20, margin=2, waiter_lease=10)
READING = replace(TERMS, mode="shared", capacity=UNLIMITED)
HOUR = 3_600


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


class Key:
    """A document, and the results of commands that are parsed so many seconds after BEGAN."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.document: Document = {}

    def do(self, seconds: float, clock: str = "c", **step: Any) -> Document:
        moment = Moment(at(seconds), clock)
        self.document = apply_rule(self.document or None, Step(**step), self.limits, moment) or {}
        return self.document

    def ask(self, seconds: float, grant: str, terms: Terms = TERMS, **step: Any) -> Document:
        return self.do(seconds, ask=grant, add=entry(grant, "s", terms, {}), **step)

    def look(self, seconds: float, clock: str = "c") -> Document:
        """Do nothing but prune and grant."""
        return self.do(seconds, clock, remove=("another",))

    def told(self, field: str, *names: str) -> list[Any]:
        """Return the grant of each entry, and its values of *names*. Times are in seconds."""

        def value(found: Any) -> Any:
            return (found - BEGAN).total_seconds() if isinstance(found, datetime) else found

        return [(e["grant"], *(value(e.get(name)) for name in names)) for e in self.document[field]]

    @property
    def holders(self) -> str:
        return "".join(e["grant"] for e in self.document["holders"])

    @property
    def queue(self) -> str:
        return "".join(e["grant"] for e in self.document["waiters"])


# The time of a command


@pytest.mark.parametrize(
    ("written", "parsed", "seconds", "clock", "late", "other"),
    [
        *((1, 1, seconds, "c", False, False) for seconds in (-10, 0, LEAP / 1000)),
        *((1, 1, seconds, "c", False, True) for seconds in (LEAP / 1000 + 0.001, 10)),
        (1, 1, 0, "another", False, False),
        *((1, 2, seconds, "c", False, False) for seconds in (-LEAP / 1000, 0, 10)),
        *((1, 2, seconds, "c", False, True) for seconds in (-LEAP / 1000 - 0.001, -10)),
        (1, 2, 0, "another", False, True),
        *((2, 1, seconds, clock, True, False) for seconds in (-10, 0, 10) for clock in ("c", "another")),
        *((None, None, seconds, "c", False, False) for seconds in (-10, 0, 10)),
        (None, None, 0, "another", False, True),
        (1, None, -10, "c", False, False),
        (None, 1, -10, "c", False, True),
    ],
)
def test_by_which_time_a_command_is_judged(
    written: int | None, parsed: int | None, *, seconds: float, clock: str, late: bool, other: bool
) -> None:
    """F61: Two commands with one cluster time were parsed with no write in between, in an unknown order. Neither cuts
    the leases of the other. An earlier time does not prove that the clock was set back. A much later command may come
    from before a set-back, and does not judge the times of the other. A late command is judged by the time of the last
    writer."""
    orders = [None if order is None else Timestamp(order, 1) for order in (written, parsed)]
    document = {"clock": "c", "written_at": BEGAN, "cluster_time": orders[0]}
    rule = _Rule(Step(), Limits(), Moment(at(seconds), clock, orders[1]), document)
    assert (rule.late, rule.other_primary) == (late, other)
    assert rule.now == (BEGAN if late else at(seconds) if other else at(max(0, seconds)))
    assert (rule.clock, rule.cluster_time) == (("c", orders[0]) if late else (clock, orders[1]))


# The document


def test_what_makes_a_document_and_what_that_begins_with() -> None:
    """A removal alone makes no document, unless a tombstone must be remembered."""
    assert apply_rule(None, Step(remove=("g",)), Limits(), Moment(BEGAN)) is None
    assert Key().do(0, remove=("g",), tombstone_ttl=60_000) == {
        "v": 1, "holders": [], "waiters": [], "tombstones": [{"grant": "g", "until": at(60)}], "token": 0,
        "clock": "c", "written_at": BEGAN, "cluster_time": None, "expires_at": None, "purge_at": at(2 * HOUR),
        "changes": 1, "acquisitions": 0, "contended": 0, "expired": 0, "waited_ms": 0, "held_ms": 0,
        "longest_wait_ms": 0, "longest_hold_ms": 0,
    }  # fmt: skip


def test_a_document_is_kept_for_an_hour_after_the_last_lease_and_longer_after_a_queue() -> None:
    """The date of the removal moves in steps of an hour, and never moves nearer."""
    key = Key(Limits(retention=24 * HOUR * 1000))
    assert key.ask(0, "g")["expires_at"] == at(22)
    both = Key()
    both.ask(0, "a", replace(READING, lease=60))
    assert both.ask(0, "b", READING)["expires_at"] == at(66)
    for seconds, purged in ((0, 22), (22 + HOUR, 22), (HOUR + 22.001, HOUR + 22.001)):
        assert key.look(seconds)["purge_at"] == at(purged + 2 * HOUR)
    key = Key(key.limits)
    for grant in "ab":
        key.ask(0, grant)
    assert key.look(1)["purge_at"] == at(22 + 2 * HOUR)
    key.do(2, remove=("a",))
    assert key.look(3)["purge_at"] == at(12 + 25 * HOUR)


def test_what_is_counted() -> None:
    """Waits and holds are counted. A lease that ended by itself counts as held until its end. A grant kept for its
    minimum hold counts until its release."""
    key = Key()
    names = ("acquisitions", "contended", "waited_ms", "longest_wait_ms", "held_ms", "longest_hold_ms", "expired")

    def counted() -> tuple[int, ...]:
        return tuple(key.document[name] for name in names)

    key.ask(0, "a", READING)
    key.ask(1, "b", READING)
    key.ask(2, "c", replace(TERMS, min_hold=10))
    assert "last_holder" not in key.document
    key.do(3, remove=("a",))
    assert counted() == (2, 0, 0, 0, 3_000, 3_000, 0)
    assert key.document["last_holder"]["grant"] == "a"
    key.do(5, remove=("b",))
    assert counted() == (3, 1, 3_000, 3_000, 7_000, 4_000, 0)
    key.do(7, remove=("c",))
    key.ask(8, "d")
    key.look(15)
    assert counted() == (4, 2, 10_000, 7_000, 9_000, 4_000, 0)
    key.do(15, renew=("d",))
    assert key.look(36.999)["expired"] == 0
    key.look(40)
    assert counted() == (4, 2, 10_000, 7_000, 31_000, 22_000, 1)
    assert (key.document["last_holder"]["grant"], key.document["changes"]) == ("d", 11)
    key = Key()
    key.ask(0, "g", replace(TERMS, min_hold=10))
    key.do(9, remove=("g",))
    assert key.do(5, "another", remove=("g",), force=True)["held_ms"] == 5_000


@pytest.mark.parametrize("mark", [0, 2**50])
def test_tokens_go_on_from_the_largest_and_from_the_time(mark: int) -> None:
    """P2: Tokens go on from the largest token and from the time, also after the document was removed."""
    key = Key()
    key.ask(0, "w")
    key.document["token"] = mark
    key.ask(1, "a", READING)
    key.ask(1, "b", READING)
    first = max(mark + 1, int(at(2).timestamp()) * 1000)
    key.do(2, remove=("w",))
    assert key.told("holders", "token") == [("a", first), ("b", first + 1)]
    assert key.document["token"] == first + 1
    assert key.look(3)["token"] == first + 1


# Ends


def test_what_ends_now_is_over() -> None:
    """Holders, waiters and tombstones are over at their ends. A millisecond earlier each of them lives."""
    key = Key()
    key.ask(0, "a")
    key.ask(9, "b")
    key.look(20.999)
    assert (key.holders, key.queue) == ("a", "b")
    key.look(21)
    assert (key.holders, key.queue) == ("a", "")
    key.look(21.999)
    assert key.holders == "a"
    key.look(22)
    assert key.holders == ""
    for seconds, left in ((0, ["a"]), (0.999, ["a", "b"]), (1, ["b", "c"])):
        key = key if seconds else Key()
        key.do(seconds, remove=(left[-1],), tombstone_ttl=1_000)
        assert [e["grant"] for e in key.document["tombstones"]] == left
    grants = tuple(str(number) for number in range(MAX_TOMBSTONES))
    key.do(1, remove=grants, tombstone_ttl=1_000)
    assert [e["grant"] for e in key.document["tombstones"]] == list(grants)
    assert len(key.do(60, remove=("g",))["tombstones"]) == MAX_TOMBSTONES


def test_a_renewal_gives_a_whole_lease_or_place_and_never_less() -> None:
    """A renewal gives a whole lease or place from now on, or a longer one on request. A holder gets the longer lease
    for good. A waiter keeps its number of waiters behind it unless a new number is told."""
    key = Key()
    for grant in "hvw":
        key.ask(0, grant)
    key.do(5, renew=("h", "v"), beat=7)
    lease = ("until", "beat", "lease", "server_lease")
    assert key.told("holders", *lease) == [("h", 27, 7, 20_000, 22_000)]
    assert key.told("waiters", *lease) == [("v", 17, 7, 20_000, 22_000), ("w", 12, 0, 20_000, 22_000)]
    key.do(6, renew=("w", "h", "v"), beat=8, lease=60_000, server_lease=66_000, behind=(3, 0, 5))
    assert key.told("holders", *lease, "behind") == [("h", 72, 8, 60_000, 66_000, None)]
    assert key.told("waiters", *lease, "behind") == [
        ("v", 72, 8, 20_000, 22_000, 5),
        ("w", 72, 8, 20_000, 22_000, 3),
    ]
    key.do(7, renew=("h", "v"), lease=1, server_lease=1)
    assert key.told("holders", *lease) == [("h", 73, 0, 60_000, 66_000)]
    assert key.told("waiters", *lease, "behind")[0] == ("v", 72, 0, 20_000, 22_000, 5)


@pytest.mark.parametrize(("seconds", "force", "left"), [(4, False, True), (4, True, False), (10, False, False)])
def test_a_minimum_hold_lasts_until_its_end(seconds: float, force: bool, left: bool) -> None:
    """A minimum hold lasts until its end, unless it is ended by force. A released grant is not renewed and not released
    again."""
    key = Key()
    key.ask(0, "g", replace(TERMS, min_hold=10))
    key.ask(0, "other")
    for more in (0, 1):
        key.do(seconds + more, remove=("g",), force=force)
        key.do(seconds + more, renew=("g",), beat=9)
        kept = [("g", 10, 0, 4, 10_000)]
        assert key.told("holders", "until", "beat", "released", "server_lease")[: len(kept)] == kept or not left
        assert key.holders == ("g" if left else "other")


@pytest.mark.parametrize(
    ("seconds", "since"),
    [(0, 0), (SAME_TIME / 1000, 0), (SAME_TIME / 1000 + 1, SAME_TIME / 1000 + 1), (-0.5, -0.5), (HOUR, HOUR)],
)
def test_after_an_election_every_lease_and_place_begins_again(seconds: float, since: float) -> None:
    """P4: The times in the document are those of another clock. A waiter keeps the wait known at the last write, unless
    the two clocks may be one."""
    key = Key()
    for grant in "hw":
        key.ask(0, grant)
    key.look(seconds, "another")
    assert key.told("holders", "until", "since") == [("h", seconds + 22, 0)]
    assert key.told("waiters", "until", "since") == [("w", seconds + 12, since)]


# The queue


def test_the_order_of_arrival() -> None:
    """P5: A waiter that came at the same time keeps its place. The waiter with the longest wait stands first, and moves
    up when it asks again."""
    key = Key()
    for grant in "hab":
        key.ask(0, grant)
    key.ask(5, "a", waited=5_000)
    assert key.queue == "ab"
    key.ask(5, "c", waited=5_000)
    key.ask(6, "d", waited=5_999)
    assert key.queue == "abcd"
    key.ask(6, "e", beat=4)
    key.ask(7, "e", waited=8_000)
    assert key.queue == "eabcd"
    assert key.told("waiters", "since", "until", "beat")[0] == ("e", -1, 18, 4)
    key.ask(7, "f", waited=LONGEST_CLAIM + 1, beat=3)
    assert key.told("waiters", "since", "until", "beat")[0] == ("f", 7 - LONGEST_CLAIM / 1000, 19, 3)
    key.do(8, remove=("a", "d"))
    assert key.queue == "febc"


@pytest.mark.parametrize(("waiters", "queue"), [(1, "a"), (2, "a"), (5, "a"), (6, "ab")])
def test_a_queue_that_is_full(waiters: int, queue: str) -> None:
    """Waiters behind an entry count against the limit. A caller that resumes a lock needs no room."""
    key = Key(Limits(waiters=waiters))
    for grant in "ha":
        key.ask(0, grant)
    key.do(1, renew=("a",), behind=(4,))
    key.ask(2, "b")
    assert key.queue == queue
    key.ask(3, "c", remove=("h",), resumes=True)
    assert (key.holders, key.queue) == ("c", queue)


def test_who_resumes_a_reader_stands_at_the_head() -> None:
    """F49: A resumed reader stands at the head, even if other readers hold the lock or it already waits. If the former
    grant is gone, it does not."""
    key = Key()
    for grant in "pq":
        key.ask(0, grant, READING)
    key.ask(0, "w")
    key.ask(0, "r", READING)
    key.ask(1, "r", READING, remove=("gone",), resumes=True)
    assert (key.holders, key.queue) == ("pq", "wr")
    key.ask(1, "r", READING, remove=("p",), resumes=True)
    assert (key.holders, key.queue) == ("qr", "w")
    key.ask(2, "x", READING, remove=("q",))  # a hand-over stands behind earlier waiters
    assert (key.holders, key.queue) == ("r", "wx")


def test_what_is_done_is_not_done_again() -> None:
    """F15, F17: A repeated command changes nothing if its grant holds the lock or has a tombstone."""
    key = Key()
    key.ask(0, "h")
    key.ask(1, "h")
    assert (key.holders, key.queue) == ("h", "")
    assert key.told("holders", "until") == [("h", 22)]
    key.do(2, remove=("h", "x"), tombstone_ttl=60_000)
    for grant in "hx":
        key.ask(3, grant)
        assert (key.holders, key.queue) == ("", "")


def test_a_trial_leaves_nothing_in_the_queue() -> None:
    """A trial leaves nothing in the queue. Only its own entry is removed from there."""
    key = Key()
    for grant in "hab":
        key.ask(0, grant)
    for grant in "ca":
        key.ask(1, grant, trial=True)
        assert (key.holders, key.queue) == ("h", "ab" if grant == "c" else "b")
    key.do(2, remove=("h",))
    assert key.holders == "b"


def test_a_request_is_written_to_its_holder_only() -> None:
    """The request is written with its author and its time."""
    key = Key()
    for grant in "ab":
        key.ask(0, grant, READING)
    key.do(3, request_release_of=("b",), requested_by="ann")
    names = ("release_requested_by", "release_requested_at")
    assert key.told("holders", *names) == [("a", None, None), ("b", "ann", 3)]


# Grants


def test_only_who_asks_is_given_a_whole_lease() -> None:
    """A holder that sees the answer gets a whole lease. Another one holds the lock as long as its place was good."""
    key = Key()
    for grant in "habc":
        key.ask(0, grant, READING if grant in "ab" else TERMS)
    key.do(5, ask="b", remove=("h",), beat=6)
    assert key.told("holders", "until", "beat", "acquired_at") == [("a", 12, 0, 5), ("b", 27, 6, 5)]
    assert key.queue == "c"


def test_no_more_than_the_largest_number_hold_a_key() -> None:
    """The number of holders is limited, whatever the capacity. Each holder counts by its weight."""
    for heavy, holders in ((MAX_HOLDERS - 1, "ab"), (MAX_HOLDERS, "a"), (MAX_HOLDERS + 1, "")):
        key = Key()
        key.ask(0, "a", Terms("semaphore", UNLIMITED, weight=heavy))
        key.ask(0, "b", Terms("semaphore", UNLIMITED))
        assert key.holders == holders


def test_modes_do_not_mix() -> None:
    """Modes do not mix, even if there is room. A waiter of another mode blocks those behind it."""
    key = Key()
    for grant, terms in (("a", READING), ("b", Terms("semaphore", 9)), ("c", READING)):
        key.ask(0, grant, terms)
    assert (key.holders, key.queue) == ("a", "bc")


# The filters and the reply


def test_what_the_filters_find() -> None:
    key = Key()
    key.ask(0, "h")
    key.do(0, remove=("t",), tombstone_ttl=60_000)
    alone = key.document
    contended = key.ask(0, "w")
    free = key.do(0, remove=("h", "w"))
    for document, held, there in ((alone, "h", "h"), (contended, "h", "hw"), (free, "", "")):
        assert is_uncontended(document, "h") == (document is alone)
        for grant in "hwt":
            assert is_held(document, [grant]) == (grant in held)
            assert is_there(document, ["x", grant]) == (grant in there)
            assert is_free(document, grant) == (document is free and grant != "t")
    assert not is_uncontended(alone, "w")
    waits = {**free, "waiters": contended["waiters"]}
    assert not is_free(waits, "x")
    assert is_free(NOTHING, "g")


def test_what_the_reply_says() -> None:
    """The reply names the holder, the first end of a lease, the number of waiters, and the grants of this command."""
    key = Key()
    key.ask(0, "p", replace(READING, owner="bob"))
    key.ask(1, "q", READING)
    for grant in "wv":
        key.ask(2, grant)
    key.do(2, renew=("w",), behind=(3,), beat=7)

    def reply(grant: str, owner: str | None = None) -> Any:
        return reply_of("k", key.document, grant, at(4), owner)

    assert [reply(grant).place for grant in "pwvx"] == [None, 0, 1, None]
    assert [reply(grant).held for grant in "pqwx"] == [True, True, False, False]
    assert reply("w").waiting == 5
    assert [reply(grant).beat for grant in "pwvx"] == [0, 7, 0, 0]
    assert not any(_is_former(holder, "x", None) for holder in key.document["holders"])
    assert reply("w").first_end == 18
    assert (reply("p").mine["grant"], reply("q").theirs["grant"]) == ("p", "p")
    formers = [reply(*asked).former for asked in (("x", "bob"), ("p", "bob"), ("x", "ann"), ("x", None))]
    assert [former and former.grant for former in formers] == ["p", None, None, None]
    assert reply("x").bells == ()
    key.do(3, remove=("p", "q"), force=True)
    assert [bell.grant for bell in reply("x").bells] == ["w"]
    assert reply("w").bells == ()
    assert not reply_of("k", None, "g", at(4)).found
    key.document["holders"] = []
    assert (reply("x").first_end, reply("x").theirs) == (None, None)
    key = Key()
    key.ask(0, "p", replace(TERMS, owner="bob", min_hold=10))
    key.do(1, remove=("p",))
    assert reply("x", "bob").former is None
