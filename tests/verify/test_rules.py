"""The rules of a simulation with hand-written records. Each breaks one promise, and a similar one breaks none."""

from typing import Any

import pytest

from tests.verify.test_checker import Story
from verify.simulation.rules import MORE_RULES, VIRTUAL
from verify.simulation.standing import OVER

LEASE: dict[str, Any] = {"renew": True, "lease": 1.5}
#: An operator means the lock with the token 7.
OPERATOR: dict[str, Any] = {"who": "operator", "key": "k", "tokens": [7]}


def held(story: Story | None = None, name: str = "a", key: str = "k", **facts: Any) -> Story:
    """Return a lock that is granted at 1.1, with the token 7."""
    return (story or Story()).ask(1.0, name, key, **LEASE, **facts).got(1.1, name, 7, keys=key)


def believed() -> Story:
    return held().see(1.2, "a", 1.5)


def extended() -> Story:
    return held().tell("extended", 2.1, "a", id="a", since=2.0, lease=4.0)


def asked() -> Story:
    return held().tell("request", 4.0, **OPERATOR)


def over(*what: str) -> Story:
    """At 10 its holder drops it, or closes its session, and says a moment later that it is through."""
    story = held()
    for number, each in enumerate(what):
        story.tell(each, 10.0 + number / 10, "a", id="a")
    return story


def stood(story: Story, until: float) -> Story:
    """Tell that the entry stands in the document from 10 on, although the attempt is over."""
    return story.tell("stood", 10.0, "servers", u=until, why=OVER, key="k", id="a")


def downgraded(mode: str = "exclusive", token: int = 8) -> Story:
    """Return a holder of the token 7 that goes on as a reader with the token 9, while another attempt has a token."""
    story = held().ask(2.0, "a.reader", mode="shared", **LEASE).got(2.1, "a.reader", 9)
    story.tell("downgraded", 2.1, "a", id="a.reader", before="a")
    return story.ask(1.5, "b", mode=mode, **LEASE).got(2.2, "b", token)


def crossing(refusals: dict[str, str], until: float) -> Story:
    """Return two threads that wait for each other's locks, and are refused for these reasons."""
    story = Story()
    for name, mine, its in (("a", "k", "l"), ("b", "l", "k")):
        held(story, name, mine).see(1.2, name, 9.0).ask(1.5, f"{name}.1", its, within=name, **LEASE)
        if name in refusals:
            story.refused(until, f"{name}.1", refusals[name])
        story.leave(until + 0.1, name)
    return story


CASES: dict[str, tuple[Story, str]] = {
    "taken, and lost within a lease": (
        believed().tell("taken", 2.0, **OPERATOR).see(3.0, "a", 0.5).see(3.6, "a", 0.0), ""
    ),
    "taken, and a renewal counted that was not its own": (
        believed().tell("taken", 2.0, **OPERATOR).see(3.0, "a", 1.5), "taken"
    ),
    "another one was taken": (believed().tell("taken", 2.0, **{**OPERATOR, "tokens": [8]}).see(3.0, "a", 1.5), ""),
    "a max_hold is an end": (held(max_hold=1.0).see(1.5, "a", 0.6), ""),
    "beyond its max_hold": (held(max_hold=1.0).see(1.5, "a", 0.7), "max-hold"),
    "extended, and renewed for as long": (extended().see(2.2, "a", 3.7).see(5.0, "a", 3.0), ""),
    "extended, and no longer than before": (extended().see(2.2, "a", 1.5), "extend"),
    "renewed for less than it was extended to": (extended().see(5.0, "a", 0.6), "extend"),
    "unless there was a fault": (extended().fault(4.0, 4.5).see(5.0, "a", 0.6), ""),
    "a reader comes while a holder becomes one": (downgraded("shared"), ""),
    "a writer does": (downgraded(), "downgrade"),
    "a writer comes later": (downgraded(token=10), ""),
    "a request that nobody hears of": (asked().see(6.0, "a", 1.0), "request"),
    "a request that is heard": (asked().tell("requested", 5.0, "a", id="a").see(6.0, "a", 1.0), ""),
    "a request that no renewal has met yet": (asked().see(4.5, "a", 1.0), ""),
    "one of a deadlock gives up": (crossing({"a": "LockDeadlock", "b": "LockNotAcquired"}, 2.6), ""),
    "both give up": (crossing({"a": "LockDeadlock", "b": "LockDeadlock"}, 2.6), "deadlock"),
    "neither does": (crossing({"a": "LockNotAcquired", "b": "LockNotAcquired"}, 5.0), "deadlock"),
    "one gives up, and there was no deadlock": (
        held().ask(1.5, "a.1", "l", within="a", **LEASE).refused(2.6, "a.1", "LockDeadlock"), "deadlock"
    ),
    # An abandoned entry is gone long before its lease ends.
    "an entry that goes soon": (stood(over("dropped"), 10.9), ""),
    "an entry that stays": (stood(over("dropped"), 11.1), "stood"),
    "while a fault is in the way": (stood(over("dropped").fault(10.0, 11.0), 15.0), ""),
    "a session that gives back in time": (stood(over("closed"), 10.9), ""),
    "nothing is held after that": (over("closed", "shut").see(10.0, "a", 1.0).see(10.2, "a", 0.0), ""),
    "what is held all the same": (over("closed", "shut").see(10.2, "a", 1.0), "closed"),
    "a session that says that it is through, and is not": (stood(over("closed", "shut"), 10.6), "stood"),
    "a session that leaves something": (stood(over("closed"), 12.2), "stood"),
}  # fmt: skip


@pytest.mark.parametrize(("story", "found"), CASES.values(), ids=CASES)
def test_what_is_accused(story: Story, found: str) -> None:
    """P1, P7, F45: Only virtual time can judge these. The rules of the fault runs have their own tests."""
    history = story.history(VIRTUAL)
    assert " ".join(violation.rule for rule in MORE_RULES for violation in rule(history)) == found
