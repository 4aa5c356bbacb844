"""The tables of docs/evidence/data/benchmarks.md, between comments that name them, and the plots of benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.contenders import BARE, OURS
from bench.measure import goal_text, median, shown, texts

PAGE: Final = Path(__file__).resolve().parent.parent / "docs/evidence/data/benchmarks.md"

Answers = dict[str, Any]


def write(answers: Answers, page: Path = PAGE) -> None:
    """Write the parts for which there are answers into *page*, and the plots into docs/images; the others stay."""
    from bench import plots  # matplotlib is needed for nothing else

    plots.draw(answers["questions"], page.parents[2] / "images")
    parts = {name: "\n".join(question(found)) for name, found in answers["questions"].items()}
    parts["machine"] = "\n".join(machine(answers["machine"]))
    if {"alone", "contended", "killed"} <= set(answers["questions"]):
        parts["better"] = "\n".join(better(answers["questions"]))
    text = page.read_text()
    for name, part in parts.items():
        text = put(text, name, part)
    page.write_text(text)


def put(text: str, name: str, part: str) -> str:
    """*text* with *part* between the comments that bear its name. ValueError if they are not there."""
    pattern = re.compile(f"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no place for {name!r}: <!-- begin {name} --> … <!-- end {name} -->")
    return pattern.sub(lambda found: f"{found[1]}{part}\n{found[2]}", text)


def question(found: dict[str, Any]) -> Iterator[str]:
    """Its tables, goals and notes."""
    for table in found["tables"]:
        yield f"\n**{table['title']}**\n"
        yield from markdown([table["columns"], *map(texts, table["rows"])])
        if table["note"]:
            yield f"\n{table['note']}"
    if found["goals"]:
        yield "\nGoals:\n"
        for goal in found["goals"]:
            met = "met" if goal["met"] else "**missed**"
            yield f"- {met}: {goal_text(goal['what'], goal['measured'], goal['most'])}"
    if found["notes"]:
        yield "\nNotes:\n"
        yield from (f"- {note}" for note in found["notes"])
    yield ""


def markdown(rows: list[list[str]]) -> Iterator[str]:
    """A table: the first column to the left, the others to the right."""
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rest:
        first, *others = row
        name = f"**{first}**" if first.startswith(OURS.name) else first
        yield f"| {' | '.join([name, *others])} |"


def machine(facts: dict[str, Any]) -> Iterator[str]:
    servers = ", ".join(f"{name} {version}" for name, version in facts["servers"].items())
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    yield f"- {facts['date']}, {facts['processor']}, {facts['cores']} cores, {facts['memory']}, {facts['system']}"
    yield f"- Python {facts['python']}; {servers}"
    yield f"- {packages}"
    yield f"- a small write reaches the disk in {facts['one write to the disk, ms']} ms"


def better(questions: dict[str, Any]) -> Iterator[str]:
    """Who is ahead of us, and where: from the figures, so that none is passed over."""
    alone = questions["alone"]["data"].get("one node", {})
    yield from ahead("acquire and release of a free lock", {n: median(v) for n, v in alone.items()}, "ms")
    sizes = questions["contended"]["data"].get("sizes", {})
    for count, found in sizes.items():
        overs = {name: median(runs["hand_over"]) for name, runs in found.items()}
        yield from ahead(f"hand-over between {count} processes", overs, "ms")
    kills = questions["killed"]["data"].get("after the kill", {})
    sooner = {name: median([s for s in runs if s is not None]) for name, runs in kills.items()}
    yield from ahead("taken over after the holder was killed", sooner, "s")


def ahead(what: str, figures: dict[str, float], unit: str) -> Iterator[str]:
    ours = figures.get(OURS.name)
    if ours is None:
        return
    faster = sorted((value, name) for name, value in figures.items() if value < ours and not name.startswith(OURS.name))
    faster = [(value, name) for value, name in faster if name != BARE.name]
    listed = "; ".join(f"{name} {shown(value)} {unit}" for value, name in faster)
    yield f"- {what} ({OURS.name}: {shown(ours)} {unit}): {listed or 'none'}"
