"""The invariants of every write to a lock's document, and of the commands of a process, besides the promises that
users can see.
"""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.session.grant import Grant, State
from verify.faults.checker import Violation
from verify.simulation.expressions import Document


def broken_by(before: Document, after: Document, step: Step, now: float) -> Iterator[Violation]:
    """Yield the violations of a write.

    A write in the short form cannot violate any of these. It releases a lock without a minimum hold, or one of several
    of which not all were acquired.
    """
    yield from (Violation("minimum-hold", now, text) for text in minimum_holds(before, after, step))
    yield from (Violation("place", now, text) for text in places(before, after, step))
    yield from (Violation("tombstone", now, text) for text in tombstones(before, after))
    yield from (Violation("election", now, text) for text in elections(before, after, step))


def minimum_holds(before: Document, after: Document, step: Step) -> Iterator[str]:
    """Check that a released holder stays until its minimum hold is over, and that nothing extends that end."""
    now = {e["grant"]: e for e in after["holders"]}
    for e in before["holders"]:
        still: dict[str, Any] = now.get(e["grant"], {})
        if "released" in e and still and still["until"] > e["until"]:
            yield f"the end of {e['grant']}, released, was moved from {e['until']} to {still['until']}"
        end = min(e["acquired_at"], after["written_at"]) + timedelta(milliseconds=e["min_hold"])
        is_gone = e["grant"] in step.remove and not step.force and not still
        if is_gone and e["min_hold"] and after["written_at"] < min(end, e["until"]):
            yield f"{e['grant']} is gone at {after['written_at']}, before the end of its minimum hold, {end}"


def places(before: Document, after: Document, step: Step) -> Iterator[str]:
    """Check that a holder granted by another's command has the rest of its place, or a whole one. The holder may be
    dead.
    """
    known = {e["grant"]: e["until"] for e in before["waiters"]}
    for e in after["holders"]:
        if e["grant"] in known and e["grant"] != step.ask:
            most = max(known[e["grant"]], after["written_at"] + timedelta(milliseconds=e["waiter_lease"]))
            if e["until"] > most:
                yield f"{e['grant']} was granted by the command of another until {e['until']}, later than {most}"


def tombstones(before: Document, after: Document) -> Iterator[str]:
    """Check that a finally removed id does not come back."""
    there = {e["grant"] for e in (*before["holders"], *before["waiters"])}
    gone = {e["grant"] for e in before["tombstones"]} - there
    for e in (*after["holders"], *after["waiters"]):
        if e["grant"] in gone:
            yield f"{e['grant']} was removed for good, and is back"


def elections(before: Document, after: Document, step: Step) -> Iterator[str]:
    """Check that the first write by another primary's clock ends no place, except that of its own last trial.

    The clock may be ahead.
    """
    stay = {e["grant"] for e in (*after["holders"], *after["waiters"])} | {*step.remove}
    if before["clock"] != after["clock"]:
        for e in before["waiters"]:
            if e["grant"] not in stay and not (step.trial and e["grant"] == step.ask):
                yield f"{e['grant']} lost its place by an election"


def useless_renewals(step: Step, grants: Mapping[str, Grant], now: float) -> Iterator[Violation]:
    """Check that no renewal is sent for a grant that its session knows to be lost, or for a place known to be gone."""
    for name in step.renew:
        grant = grants.get(name)
        if grant is None or grant.state is State.LOST or (grant.state is State.WAITING and grant.waiting.place_gone):
            yield Violation("useless", now, f"a renewal was sent for {name}, whose end is known: {grant!r}")


def amplified_end(grants: int, single: int, sent: int, now: float) -> Iterator[Violation]:
    """Check that a process that ends sends at most a command for ten grants.

    - single: number of grants whose removal needs a command of its own.
    """
    if sent > 5 + single + grants / 10:
        yield Violation("amplified", now, f"the end of a process with {grants} grants sent {sent} commands")
