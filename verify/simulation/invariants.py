"""What must be true of every write of a lock's document, besides what its users can see: of minimum holds."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django_mongolock.engine.rule.step import Step
from verify.faults.checker import Violation
from verify.simulation.server import Document, Parsed, Servers, Write


@contextlib.contextmanager
def watched() -> Iterator[list[Violation]]:
    """A list to which every write that breaks an invariant adds what is wrong."""
    found: list[Violation] = []
    apply = Servers.apply

    def look(self: Servers, parsed: Parsed, key: str, step: Step, *others: Any) -> tuple[Document | None, Write | None]:
        before = self.documents.get(key)
        after, write = apply(self, parsed, key, step, *others)
        if before is not None and after is not None:
            now, broken = self.kernel.time, minimum_holds(before, after, step)
            found.extend(Violation("minimum-hold", now, text) for text in broken)
        return after, write

    Servers.apply = look  # type: ignore[method-assign, assignment]
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
