"""The story of a run that broke a promise, from the records of the participants."""

import re
from collections.abc import Sequence
from typing import Final

from verify.simulation.faults import Event
from verify.simulation.run import Outcome

#: An attempt in the text of a violation.
_ATTEMPT: Final = re.compile(r"\b[a-z]+-\d+-\d+\b")
#: The most lines of a story.
LINES: Final = 24
#: The facts told of each record.
_SAID: Final = {
    "ask": ("keys", "mode", "wait", "server_lease"),
    "got": ("tokens",),
    "refused": ("error",),
    "left": ("was",),
}


def story(outcome: Outcome, events: Sequence[Event]) -> str:
    """Return the first violation, and the last records of the attempts that it names.

    - events: faults of the run.
    """
    if not outcome.violations:
        return "\n".join(["crash:", *outcome.crashes[:3]])
    first = min(outcome.violations, key=lambda violation: violation.at)
    names = set(_ATTEMPT.findall(first.text))
    lines = [(event.at, f"fault    {event.name}") for event in events if event.at <= first.at]
    for record in outcome.records:
        if record.get("id") in names and record["what"] not in ("see", "told"):
            facts = ", ".join(f"{name} {record[name]}" for name in _SAID.get(record["what"], ()) if name in record)
            lines.append((record["t"], f"{record['what']:<8} {record['id']} {facts}"))
        elif record["what"] == "force":
            lines.append((record["t"], f"force    {record['key']} {record['tokens']}"))
    lines += _beliefs(outcome, names)
    shown = sorted(lines)
    left_out = len(shown) - LINES
    if left_out > 0:
        shown = shown[-LINES:]
    head = [f"{first.rule} at {first.at:.3f}: {first.text}"]
    if left_out > 0:
        head.append(f"  ({left_out} earlier lines)")
    return "\n".join([*head, *(f"  {at:9.3f}  {text}" for at, text in shown)])


def _beliefs(outcome: Outcome, names: set[str]) -> list[tuple[float, str]]:
    """Return the first and the last look of each attempt."""
    found: list[tuple[float, str]] = []
    for name in sorted(names):
        looks = [record for record in outcome.records if record["what"] == "see" and record["id"] == name]
        for look in looks[:1] + looks[1:][-1:]:
            belief = f"believes to hold it for {look['left']:.3f} s" if look["held"] else "does not hold it"
            found.append((look["t"], f"look     {name} {belief}"))
    return found
