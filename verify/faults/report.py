"""Print the table of docs/evidence/faults.md, out of what runs have found.

`python -m verify.faults.report FILE...`; the files are what `--json` wrote.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verify.faults.injections import FAULTS
from verify.faults.run import NAMES, WORKER_FAULTS

Outcome = dict[str, Any]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the figures as a table."""
    together = [outcome for outcome in outcomes if len(outcome["faults"]) > 1]
    lines = [
        "| fault | description | injected | alone: grants | alone: violations | until work continued, at most |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [_line(name, outcomes) for name in NAMES]
    lines += ["", *_summary(together)]
    return "\n".join(lines)


def _line(name: str, outcomes: Iterable[Outcome]) -> str:
    text = (FAULTS[name].text if name in FAULTS else WORKER_FAULTS[name]).split("\n", maxsplit=1)[0]
    alone = [outcome for outcome in outcomes if outcome["faults"] == [name]]
    injected = sum(outcome["injected"].get(name, 0) for outcome in outcomes)
    grants = sum(outcome["grants"] for outcome in alone)
    violations = sum(len(outcome["violations"]) for outcome in alone) if alone else "not run"
    slowest = max((outcome["slowest"].get(name, 0.0) for outcome in outcomes), default=0.0)
    return f"| {name} | {text} | {injected:,} | {grants:,} | {violations} | {f'{slowest:.1f} s' if slowest else ''} |"


def _summary(together: Sequence[Outcome]) -> list[str]:
    if not together:
        return ["All faults together: not run."]
    violations = sum(len(outcome["violations"]) for outcome in together)
    seeds = ", ".join(str(outcome["seed"]) for outcome in together)
    faults = sum(sum(outcome["injected"].values()) for outcome in together)
    attempts, grants, looks = (sum(o[name] for o in together) for name in ("attempts", "grants", "looks"))
    runs = f"All faults together, {len(together)} runs of {together[0]['seconds']:g} s (seeds {seeds})"
    found = f"{attempts:,} attempts, {grants:,} grants, {looks:,} checks of a held lock, {violations} violations"
    return [f"{runs}: {faults:,} faults, {found}."]


if __name__ == "__main__":
    print(table([outcome for file in sys.argv[1:] for outcome in json.loads(Path(file).read_text())]))
