"""The limits of keys and facts, and the damage that is found in stored documents."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from bson.int64 import Int64

from django_mongolock.engine.rule.document import (
    DOCUMENT_FIELDS,
    LAST_TOKEN,
    Terms,
    describe,
    entry,
    find_damage,
    is_holder,
    is_waiter,
)
from django_mongolock.engine.rule.replies import (
    Beat,
    Bell,
    Former,
    Found,
    News,
    Reply,
    read_bell,
    read_bells,
    read_found,
    read_reply,
    read_taken,
)
from django_mongolock.engine.text_checks import MAX_FACT_LENGTH, MAX_TEXT_LENGTH, check_fact
from django_mongolock.exceptions import LockDocumentDamaged
from tests.support import lock_documents as made

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def waiter(**changes: Any) -> dict[str, Any]:
    times = {"since": NOW, "until": NOW + timedelta(seconds=10)}
    return made.waiter(1, **{"grant": "g1", "host": "web1", "pid": 7, **times, **changes})


def holder(**changes: Any) -> dict[str, Any]:
    granted = {"token": Int64(5), "acquired_at": NOW - timedelta(seconds=2)}
    return made.entry(1, **{**waiter(), **granted, **changes})


def document(**changes: Any) -> dict[str, Any]:
    return made.document("k", [holder()], [waiter()], {"token": Int64(5), "clock": "c", **changes})


@pytest.mark.parametrize("length", [MAX_FACT_LENGTH + 1, MAX_TEXT_LENGTH + 1])
def test_a_fact_that_is_too_long_is_told_the_limit_of_facts(length: int) -> None:
    with pytest.raises(ValueError, match=f"^owner has .*{MAX_FACT_LENGTH} characters: this one has {length}"):
        check_fact("owner", "x" * length)


def test_a_whole_document_has_no_damage() -> None:
    """F53: Unknown fields are no damage, because a newer release may have written them."""
    assert find_damage(document()) is None
    assert find_damage(document(news=1, holders=[holder(news=1)])) is None
    assert is_holder(holder())
    assert is_waiter(waiter())


@pytest.mark.parametrize("name", list(DOCUMENT_FIELDS))
def test_a_missing_or_wrong_field_is_found_and_named(name: str) -> None:
    """F55: The error names a damaged field."""
    broken = document()
    del broken[name]
    assert name in (find_damage(broken) or "")
    assert "missing" in (find_damage(broken) or "")
    assert name in (find_damage(document(**{name: {"a": 1}})) or "")


@pytest.mark.parametrize("name", [*entry("", "", Terms(), {}), "since", "until", "token", "acquired_at"])
@pytest.mark.parametrize("value", [None, 1.0, True, "later", [], ObjectId()], ids=lambda value: type(value).__name__)
def test_a_damaged_entry_is_found_and_named(name: str, value: object) -> None:
    """F55: One wrong field in any entry damages the document."""
    if isinstance(value, str) and name in ("grant", "session", "worker", "mode"):
        value = None
    damage = find_damage(document(holders=[holder(), holder(**{name: value})]))
    assert damage is not None
    assert damage.startswith(f"holders[1]: its field {name!r}")
    if name not in ("token", "acquired_at"):
        assert (find_damage(document(waiters=[waiter(**{name: value})])) or "").startswith("waiters[0]")


@pytest.mark.parametrize("item", [None, 1, "x", [], [holder()]])
def test_an_entry_that_is_no_document_is_damage(item: object) -> None:
    """F55: An entry of an array that is no document is damage."""
    assert "not a document" in (find_damage(document(holders=[item])) or "")


def test_a_version_or_a_token_that_we_do_not_know_is_damage() -> None:
    """F53, F55: A later version is not guessed at, and a token near the end of int64 is not counted on."""
    assert "version is 0" in (find_damage(document(v=0)) or "")
    assert "too large" in (find_damage(document(token=LAST_TOKEN)) or "")
    assert "token" in (find_damage(document(token=5.0)) or "")
    assert "token" in (find_damage(document(token=5)) or "")


def test_what_a_newer_release_wrote_is_to_be_left_alone() -> None:
    """F142: The error for a newer document says to upgrade, and never to delete it, because the lock may be held. This
    applies to any shape of the document."""
    problem = find_damage({**document(v=2), "holders": {"in": "another shape"}}) or ""
    said = str(LockDocumentDamaged("k", problem))
    assert "version 2" in said
    assert "Upgrade this process" in said
    assert "delete" not in said
    assert "delete" in str(LockDocumentDamaged("k", find_damage(document(v=0)) or ""))


def test_a_reply_tells_how_a_grant_stands() -> None:
    """P4: Times in a reply are for timers and people. No time is longer than a whole lease, whatever the clocks say."""
    mine, theirs, ends = holder(beat=3), holder(grant="g2", host="web2"), NOW + timedelta(seconds=10)
    others = {
        "granted": [{"to": "s2", "grant": "g3", "token": 6, "at": NOW}],
        "former": {"grant": "g0", "process": "p"},
    }
    raw = {"now": NOW, "token": Int64(9), "mine": mine, "place": -1, "waiting": 2, "first_end": ends, "holder": theirs}
    known: dict[str, Any] = {"waiting": 2, "first_end": 10.0, "holder": describe(theirs, NOW), "last_token": 9}
    held: dict[str, Any] = {"held": True, "token": 5, "acquired_at": mine["acquired_at"]}
    reply = read_reply("k", {**raw, **others})
    bells = (Bell("s2", "g3", News(6, NOW)),)
    assert reply == Reply(**held, beat=3, **known, former=Former("g0", "p"), bells=bells)
    assert (reply.now, reply.mine, reply.theirs) == (NOW, mine, theirs)
    queued = {**raw, "mine": None, "queued": waiter(beat=4), "former": {"grant": "g0"}}
    assert read_reply("k", {**queued, "place": 0}) == Reply(beat=4, place=0, **known)
    assert read_reply("k", {**queued, "place": None}) == Reply(beat=4, **known)
    set_back = read_reply("k", {**raw, "first_end": NOW + timedelta(hours=1)})
    assert set_back.first_end == theirs["server_lease"] / 1000
    own = read_reply("k", {**raw, "mine": theirs})
    assert (own.holder, own.beat) == (None, 0)
    assert read_reply("k", {**raw, "mine": None, "holder": None}).first_end == 10.0
    assert read_reply("k", {**raw, "holder": None}).holder is None
    assert read_reply("k", {"now": NOW, "waiting": 0}) == Reply()
    assert read_reply("k", None) == Reply(found=False)
    taken = {"now": NOW, "token": 5, "mine": mine}
    assert read_taken("k", taken) == Reply(**held, beat=3, first_end=10.0, last_token=5)


def test_for_how_long_the_first_holder_has_held() -> None:
    """The time held is for people and for retries. The time is never negative, and infinite if nobody holds the key."""
    theirs = holder()
    for now, seconds in ((NOW, 2.0), (theirs["acquired_at"], 0.0), (NOW - timedelta(hours=1), 0.0), (None, math.inf)):
        assert Reply(now=now, theirs=theirs).held_for == seconds
    assert Reply(now=NOW).held_for == math.inf


@pytest.mark.parametrize(
    ("name", "told"),
    [("mine", "holders is damaged"), ("holder", "holders is damaged"), ("queued", "waiters"), ("first_end", "a date")],
)
def test_a_damaged_entry_in_a_reply_is_an_error(name: str, told: str) -> None:
    """F55: A damaged entry is never read as a grant."""
    raw = {"now": NOW, "place": -1, "waiting": 0, "first_end": None, name: {"grant": "g", "until": NOW}}
    with pytest.raises(LockDocumentDamaged, match=told):
        read_reply("k", raw)


def test_a_bell_is_read_as_it_was_rung() -> None:
    """F55: A bell is read as it was rung. A message in a foreign form is no bell."""
    for bell in (Bell("s", "g", News(5, NOW)), Bell("s", "g")):
        assert read_bell(bell.message) == bell
    heard = {"to": "s", "grant": "g"}
    assert read_bells({"granted": [7, {"to": "s"}, heard]}) == (Bell("s", "g"),)
    assert read_bells({"granted": None}) == read_bells({}) == ()


def test_what_a_renewal_found() -> None:
    """F55: The readable grants are read, whatever else is stored."""
    asked = {"grant": "g", "beat": 3, "token": Int64(5), "release_requested_by": "a\nb"}
    odd = [7, {"grant": 7}, {"grant": "h", "beat": "3", "release_requested_by": 5}, asked]
    assert read_found({"token": 9, "holders": odd}) == Found(9, {"g": Beat(3, "a?b", 5), "h": Beat(0)}, {})
    assert read_found({"token": "9", "holders": 7, "waiters": [asked]}) == Found(0, {}, {"g": Beat(3, "a?b", 5)})


def test_the_server_lets_a_lease_live_longer_than_its_holder_believes() -> None:
    """P1: The server's lease is longer by a tenth, and by the margin at least."""
    terms = Terms(lease=30.0, margin=1.0, clock_margin=0.1)
    assert (terms.server_lease, terms.server_lease_of(5.0)) == (33.0, 6.0)
    assert (terms.holder_lease_of(30.0), terms.holder_lease_of(5.0)) == (27.0, 4.0)
