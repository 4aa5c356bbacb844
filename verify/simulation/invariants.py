"""What must be true of every write of a lock's document, besides what its users can see."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django_mongolock.engine.rule.document import Step
from verify.faults.checker import Violation
from verify.simulation.expressions import Document
from verify.simulation.server import Parsed, Servers, Write


@contextlib.contextmanager
def watched() -> Iterator[list[Violation]]:
    """A list to which every write that breaks an invariant adds what is wrong."""
    found: list[Violation] = []
    apply = Servers.apply

    def look(
        self: Servers, parsed: Parsed, key: str, step: Step, *others: Any, **how: Any
    ) -> tuple[Document | None, Write | None]:
        before = self.documents.get(key)
        after, write = apply(self, parsed, key, step, *others, **how)
        # What is given back in the short form has no minimum hold, or is one of several of which not all were acquired.
        if before is not None and after is not None and how.get("short") is None:
            now = self.kernel.time
            found.extend(Violation("minimum-hold", now, text) for text in minimum_holds(before, after, step))
            found.extend(Violation("place", now, text) for text in places(before, after, step))
        return after, write

    Servers.apply = look  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Servers.apply = apply  # type: ignore[method-assign]


def minimum_holds(before: Document, after: Document, step: Step) -> Iterator[str]:
    """A release leaves a holder until its minimum hold is over, and nothing moves that end away."""
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
    """Who is granted the key by the command of another has the rest of its place, or a whole one: it may be dead."""
    known = {e["grant"]: e["until"] for e in before["waiters"]}
    for e in after["holders"]:
        if e["grant"] in known and e["grant"] != step.ask:
            most = max(known[e["grant"]], after["written_at"] + timedelta(milliseconds=e["waiter_lease"]))
            if e["until"] > most:
                yield f"{e['grant']} was granted by the command of another until {e['until']}, later than {most}"
