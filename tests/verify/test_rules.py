"""The rules of a simulation: hand-written records, each of which breaks one promise, and the like that breaks none."""

from typing import Any

import pytest

from verify.faults.history import History
from verify.faults.records import Record
from verify.simulation.rules import MORE_RULES, VIRTUAL
from verify.simulation.standing import OVER

#: When all is over.
LATER = 100.0
START: list[Record] = [{"what": "start", "t": 0.0, "pid": pid, "group": pid, "kind": "threads"} for pid in (1, 2)]
OVER_AT: Record = {"what": "over", "t": LATER, "pid": 0}


def ask(name: str, t: float = 1.0, key: str = "k", **facts: Any) -> Record:
    """An attempt of the process that its name begins with."""
    terms = {"mode": "exclusive", "capacity": 1, "wait": 5.0, "owner": None, "renew": True, "inner": None}
    return one(name, "ask", t, keys=(key,), **{**terms, "server_lease": 2.0, "lease": 1.5, **facts})


def one(name: str, what: str, t: float, **facts: Any) -> Record:
    """What happens to an attempt."""
    return {"what": what, "t": t, "pid": int(name[0]), "id": name, **facts}


def got(name: str, t: float = 1.1, key: str = "k") -> Record:
    """It is granted, with the token 7."""
    return one(name, "got", t, tokens={key: 7})


def see(name: str, t: float, left: float) -> Record:
    """A look: held for so many seconds more, or not at all."""
    return one(name, "see", t, u=t, held=left > 0, left=left)


def broken(*records: Record) -> list[str]:
    """The rules that find something, by name; those of the fault runs are left to their own tests."""
    history = History(sorted([*START, *records, OVER_AT], key=lambda record: float(record["t"])), VIRTUAL)
    return [violation.rule for rule in MORE_RULES for violation in rule(history)]


def test_what_was_taken_is_lost_within_a_lease() -> None:
    """P7: a holder that still believes later has counted a renewal that was not its own."""
    taken = {"what": "taken", "t": 2.0, "pid": 0, "key": "k", "tokens": [7]}
    begin = [ask("1.a"), got("1.a"), see("1.a", 1.2, 1.5), taken]
    assert broken(*begin, see("1.a", 3.0, 0.5), see("1.a", 3.6, 0.0)) == []
    assert broken(*begin, see("1.a", 3.0, 1.5)) == ["taken"]
    other = {**taken, "tokens": [8]}
    assert broken(*begin[:-1], other, see("1.a", 3.0, 1.5)) == []


def test_a_max_hold_is_an_end() -> None:
    begin = [ask("1.a", max_hold=1.0), got("1.a", 1.1)]
    assert broken(*begin, see("1.a", 1.5, 0.6)) == []
    assert broken(*begin, see("1.a", 1.5, 0.7)) == ["max-hold"]


def test_an_extension_has_its_whole_length() -> None:
    """It is there at once, and its renewals are as long."""
    begin = [ask("1.a"), got("1.a"), one("1.a", "extended", 2.1, since=2.0, lease=4.0)]
    assert broken(*begin, see("1.a", 2.2, 3.7), see("1.a", 5.0, 3.0)) == []
    assert broken(*begin, see("1.a", 2.2, 1.5)) == ["extend"]
    assert broken(*begin, see("1.a", 5.0, 0.9)) == ["extend"]
    fault = {"what": "fault", "t": 4.0, "u": 4.5, "pid": 0, "name": "cut", "order": True}
    assert broken(*begin, fault, see("1.a", 5.0, 0.9)) == []


def test_a_downgrade_lets_nobody_in() -> None:
    """A token between that of the exclusive holder and that of the reader it became is another's reader's at most."""
    begin = [ask("1.a"), got("1.a"), ask("1.reader", 2.0, mode="shared")]
    begin += [one("1.reader", "got", 2.1, tokens={"k": 9}), one("1.reader", "downgraded", 2.1, before="1.a")]
    between = [ask("2.a", 1.5, mode="shared"), one("2.a", "got", 2.2, tokens={"k": 8})]
    assert broken(*begin, *between) == []
    between[0]["mode"] = "exclusive"
    assert broken(*begin, *between) == ["downgrade"]
    between[1]["tokens"] = {"k": 10}
    assert broken(*begin, *between) == []


def test_a_request_arrives_with_a_renewal() -> None:
    asked = {"what": "request", "t": 4.0, "pid": 0, "key": "k", "tokens": [7]}
    begin = [ask("1.a"), got("1.a"), asked]
    assert broken(*begin, see("1.a", 6.0, 1.0)) == ["request"]
    assert broken(*begin, one("1.a", "requested", 5.0), see("1.a", 6.0, 1.0)) == []
    assert broken(*begin, see("1.a", 4.5, 1.0)) == []


def crossing(refusals: dict[str, str], until: float) -> list[Record]:
    """Two threads, each of which waits for what the other holds, and is refused then, for these reasons."""
    records = []
    for name, mine, its in (("1.a", "k", "l"), ("2.a", "l", "k")):
        inner = f"{name[0]}.b"
        records += [ask(name, key=mine), got(name, key=mine), see(name, 1.2, 9.0)]
        records += [ask(inner, 1.5, its, within=name)]
        records += [one(inner, "refused", until, error=refusals[inner])] if inner in refusals else []
        records += [one(name, "leave", until + 0.1), one(name, "left", until + 0.1, was="released")]
    return records


@pytest.mark.parametrize(
    ("refusals", "until", "found"),
    [
        ({"1.b": "LockDeadlock", "2.b": "LockNotAcquired"}, 2.6, []),
        ({"1.b": "LockDeadlock", "2.b": "LockDeadlock"}, 2.6, ["deadlock"]),
        ({"1.b": "LockNotAcquired", "2.b": "LockNotAcquired"}, 5.0, ["deadlock"]),
    ],
)
def test_one_of_a_deadlock_gives_up(refusals: dict[str, str], until: float, found: list[str]) -> None:
    assert broken(*crossing(refusals, until)) == found


def test_a_deadlock_is_one() -> None:
    alone = [
        ask("1.a"),
        got("1.a"),
        ask("1.b", 1.5, "l", within="1.a"),
        one("1.b", "refused", 2.6, error="LockDeadlock"),
    ]
    assert broken(*alone) == ["deadlock"]


def stood(name: str, since: float, until: float) -> Record:
    """An entry of an attempt that is over."""
    return {"what": "stood", "t": since, "u": until, "pid": 0, "why": OVER, "key": "k", "id": name}


def test_what_is_over_does_not_stand() -> None:
    """An abandoned grant is gone long before its lease ends, unless a fault is in the way."""
    begin = [ask("1.a"), got("1.a"), one("1.a", "dropped", 10.0)]
    assert broken(*begin, stood("1.a", 10.0, 10.9)) == []
    assert broken(*begin, stood("1.a", 10.0, 11.1)) == ["stood"]
    fault = {"what": "fault", "t": 10.0, "u": 11.0, "pid": 0, "name": "cut", "order": True}
    assert broken(*begin, fault, stood("1.a", 10.0, 15.0)) == []


def test_a_closed_session_leaves_nothing() -> None:
    """Nobody removes it later: it must be gone by then, if the servers answered."""
    closed = {"what": "closed", "t": 10.0, "pid": 1}
    begin = [ask("1.a"), got("1.a"), closed]
    assert broken(*begin, stood("1.a", 10.0, 10.9)) == []
    assert broken(*begin, stood("1.a", 10.0, 12.0)) == ["stood"]
