"""The shortest schedule that still breaks a promise, and its story."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from verify.faults.checker import Violation
from verify.simulation.faults import Event
from verify.simulation.run import KINDS, Outcome, simulate
from verify.simulation.schedule import schedule

T = TypeVar("T")

#: An attempt in the text of a violation.
_ATTEMPT: Final = re.compile(r"\b[a-z]+-\d+-\d+\b")
#: How many lines a story has at most.
LINES: Final = 24
#: The shortest run, in seconds. (Its processes go on for some more.)
SHORTEST: Final = 1.0
#: For how many real seconds a smaller case is looked for.
PATIENCE: Final = 45.0


@dataclass(frozen=True)
class Case:
    """What a run is made from."""

    seed: int
    seconds: float
    events: tuple[Event, ...]
    kinds: tuple[str, ...] = KINDS

    def run(self) -> Outcome:
        """Run it."""
        return simulate(self.seed, self.seconds, self.events, self.kinds)


def shrunk(seed: int, seconds: float, rule: str, patience: float = PATIENCE) -> Case:
    """The smallest case that could be found in so much time in which the same rule of the checker finds something."""
    case = Case(seed, seconds, tuple(schedule(seed, seconds)))
    end = time.monotonic() + patience

    def fails(case: Case) -> bool:
        return time.monotonic() < end and rule in broken_rules(case.run())

    case = _sooner(case, fails)
    for _ in range(2):
        events = _fewer(case.events, lambda kept, case=case: fails(replace(case, events=kept)))  # type: ignore[misc]
        case = replace(case, events=events)
        kinds = _fewer(case.kinds, lambda kept, case=case: fails(replace(case, kinds=kept)))  # type: ignore[misc]
        case = replace(case, kinds=kinds)
    return _sooner(case, fails)


def broken_rules(outcome: Outcome) -> set[str]:
    """The rules that found something; "crash" if something was raised that nothing catches."""
    return {violation.rule for violation in outcome.violations} | ({"crash"} if outcome.crashes else set())


def _sooner(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case without what comes after the violation."""
    for part in (0.25, 0.5, 0.75):
        seconds = case.seconds * part
        if seconds < SHORTEST:
            continue
        shorter = replace(case, seconds=seconds, events=tuple(e for e in case.events if e.at < seconds))
        if fails(shorter):
            return _sooner(shorter, fails)
    return case


def _fewer(items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """As few of the items as can be found with which it still fails: delta debugging, by halves.

    After Zeller and Hildebrandt: https://doi.org/10.1109/32.988498
    """
    size = max(1, len(items) // 2)
    while size >= 1 and items:
        place = 0
        while place < len(items):
            kept = items[:place] + items[place + size :]
            if fails(kept):
                items = kept
            else:
                place += size
        size //= 2
    return items


def story(case: Case, outcome: Outcome) -> str:
    """What happened, in the words of those who took part in the first violation."""
    if not outcome.violations:
        return "\n".join(["crash:", *outcome.crashes[:3]])
    first = min(outcome.violations, key=lambda violation: violation.at)
    names = set(_ATTEMPT.findall(first.text))
    lines = [(event.at, f"fault    {event.name}") for event in case.events]
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
    head = [f"seed {case.seed}, {case.seconds:g} s, processes: {', '.join(case.kinds)}", _line(first)]
    if left_out > 0:
        head.append(f"  ({left_out} earlier lines)")
    return "\n".join([*head, *(f"  {at:9.3f}  {text}" for at, text in shown)])


#: What is told of each record.
_SAID: Final = {
    "ask": ("keys", "mode", "wait", "server_lease"),
    "got": ("tokens",),
    "refused": ("error",),
    "left": ("was",),
}


def _beliefs(outcome: Outcome, names: set[str]) -> list[tuple[float, str]]:
    """The first and the last look of each attempt."""
    found: list[tuple[float, str]] = []
    for name in sorted(names):
        looks = [record for record in outcome.records if record["what"] == "see" and record["id"] == name]
        for look in looks[:1] + looks[1:][-1:]:
            belief = f"believes to hold it for {look['left']:.3f} s" if look["held"] else "does not hold it"
            found.append((look["t"], f"look     {name} {belief}"))
    return found


def _line(violation: Violation) -> str:
    return f"{violation.rule} at {violation.at:.3f}: {violation.text}"
