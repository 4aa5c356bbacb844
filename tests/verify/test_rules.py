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


def by_operator(what: str, t: float, token: int = 7) -> Record:
    """An operator takes the lock with that token, or asks for it."""
    return {"what": what, "t": t, "pid": 0, "key": "k", "tokens": [token]}


def fault(since: float, until: float) -> Record:
    return {"what": "fault", "t": since, "u": until, "pid": 0, "name": "cut", "order": True}


def downgraded(mode: str = "exclusive", token: int = 8) -> list[Record]:
    """The holder of the token 7 goes on as a reader with the token 9; meanwhile somebody has another token."""
    reader = [ask("1.reader", 2.0, mode="shared"), one("1.reader", "got", 2.1, tokens={"k": 9})]
    reader += [one("1.reader", "downgraded", 2.1, before="1.a")]
    return [*HELD, *reader, ask("2.a", 1.5, mode=mode), one("2.a", "got", 2.2, tokens={"k": token})]


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


def stood(name: str, since: float, until: float) -> Record:
    """An entry of an attempt that is over."""
    return {"what": "stood", "t": since, "u": until, "pid": 0, "why": OVER, "key": "k", "id": name}


HELD = [ask("1.a"), got("1.a")]
BELIEVED = [*HELD, see("1.a", 1.2, 1.5)]
LIMITED = [ask("1.a", max_hold=1.0), got("1.a", 1.1)]
EXTENDED = [*HELD, one("1.a", "extended", 2.1, since=2.0, lease=4.0)]
ASKED = [*HELD, by_operator("request", 4.0)]
DROPPED = [*HELD, one("1.a", "dropped", 10.0)]
CLOSED = [*HELD, {"what": "closed", "t": 10.0, "pid": 1}]
GIVES_UP = one("1.b", "refused", 2.6, error="LockDeadlock")

CASES: dict[str, tuple[list[Record], str]] = {
    "taken, and lost within a lease": (
        [*BELIEVED, by_operator("taken", 2.0), see("1.a", 3.0, 0.5), see("1.a", 3.6, 0.0)], ""
    ),
    "taken, and a renewal counted that was not its own": (
        [*BELIEVED, by_operator("taken", 2.0), see("1.a", 3.0, 1.5)], "taken"
    ),
    "another one was taken": ([*BELIEVED, by_operator("taken", 2.0, 8), see("1.a", 3.0, 1.5)], ""),
    "a max_hold is an end": ([*LIMITED, see("1.a", 1.5, 0.6)], ""),
    "beyond its max_hold": ([*LIMITED, see("1.a", 1.5, 0.7)], "max-hold"),
    "extended, and renewed for as long": ([*EXTENDED, see("1.a", 2.2, 3.7), see("1.a", 5.0, 3.0)], ""),
    "extended, and no longer than before": ([*EXTENDED, see("1.a", 2.2, 1.5)], "extend"),
    "renewed for less than it was extended to": ([*EXTENDED, see("1.a", 5.0, 0.6)], "extend"),
    "unless there was a fault": ([*EXTENDED, fault(4.0, 4.5), see("1.a", 5.0, 0.6)], ""),
    "a reader comes while a holder becomes one": (downgraded("shared"), ""),
    "a writer does": (downgraded(), "downgrade"),
    "a writer comes later": (downgraded(token=10), ""),
    "a request that nobody hears of": ([*ASKED, see("1.a", 6.0, 1.0)], "request"),
    "a request that is heard": ([*ASKED, one("1.a", "requested", 5.0), see("1.a", 6.0, 1.0)], ""),
    "a request that no renewal has met yet": ([*ASKED, see("1.a", 4.5, 1.0)], ""),
    "one of a deadlock gives up": (crossing({"1.b": "LockDeadlock", "2.b": "LockNotAcquired"}, 2.6), ""),
    "both give up": (crossing({"1.b": "LockDeadlock", "2.b": "LockDeadlock"}, 2.6), "deadlock"),
    "neither does": (crossing({"1.b": "LockNotAcquired", "2.b": "LockNotAcquired"}, 5.0), "deadlock"),
    "one gives up, and there was no deadlock": ([*HELD, ask("1.b", 1.5, "l", within="1.a"), GIVES_UP], "deadlock"),
    # What is abandoned is gone long before its lease ends.
    "an entry that goes soon": ([*DROPPED, stood("1.a", 10.0, 10.9)], ""),
    "an entry that stays": ([*DROPPED, stood("1.a", 10.0, 11.1)], "stood"),
    "while a fault is in the way": ([*DROPPED, fault(10.0, 11.0), stood("1.a", 10.0, 15.0)], ""),
    "a session that gives back in time": ([*CLOSED, stood("1.a", 10.0, 10.9)], ""),
    "nothing is held after that": (
        [*CLOSED, {"what": "shut", "t": 10.1, "pid": 1}, see("1.a", 10.0, 1.0), see("1.a", 10.2, 0.0)], ""
    ),
    "what is held all the same": ([*CLOSED, {"what": "shut", "t": 10.1, "pid": 1}, see("1.a", 10.2, 1.0)], "closed"),
    "a session that says that it is through, and is not": (
        [*CLOSED, {"what": "shut", "t": 10.1, "pid": 1}, stood("1.a", 10.0, 10.6)], "stood"
    ),
    "a session that leaves something": ([*CLOSED, stood("1.a", 10.0, 12.2)], "stood"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_accused(name: str) -> None:
    """P1, P7, F45: what only virtual time can judge."""
    records, found = CASES[name]
    assert " ".join(broken(*records)) == found
