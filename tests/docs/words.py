"""The number of words of the documentation, part by part: `python3 dev.py docs --words`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT

#: How many words each part may have.
LIMITS: Final = {"named locks": 9_200, "beyond": 3_900, "reference": 4_400, "evidence": 15_000}
#: The parts of the pages in docs/index.md whose folder does not say it.
PARTS: Final = {
    **dict.fromkeys(("document-locks", "versions", "edit-locks", "owners", "history"), "beyond"),
    **dict.fromkeys(("running", "security", "monitoring"), "reference"),
    **dict.fromkeys(("decorator", "settings"), "named locks"),
}


def part_of(page: str) -> str | None:
    """Return the part of a page, by its path below the root.

    Return None if the page is about the project itself, or if a program writes its tables.
    """
    folder = page.removeprefix("docs/").rpartition("/")[0].partition("/")[0]
    if folder == "project" or page.startswith("docs/evidence/data/"):
        return None
    return PARTS.get(Path(page).stem, folder if folder in LIMITS else "named locks")


def words(text: str) -> int:
    """Return the words that a reader sees, with examples and tables, without comments and the targets of links."""
    shown = re.sub(r"\]\([^)]*\)", "]", re.sub(r"(?s)<!--.*?-->", "", text))
    return sum(bool(re.search(r"\w", word)) for word in shown.split())


def counted() -> Iterator[tuple[str, str, int]]:
    """Yield the part, the path, and the words of each page that counts."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.relative_to(ROOT).as_posix()
        if part := part_of(page):
            yield part, page, words(path.read_text())


def totals() -> dict[str, int]:
    """The words of each part."""
    found = dict.fromkeys(LIMITS, 0)
    for part, _, number in counted():
        found[part] += number
    return found


def report() -> str:
    """The parts with their limits, each followed by its pages."""
    lines = []
    for part, total in totals().items():
        lines.append(f"{total:>7,} of {LIMITS[part]:>6,}  {part}")
        lines += [f"{number:>7,}            {page}" for where, page, number in counted() if where == part]
    users = sum(total for part, total in totals().items() if part != "evidence")
    return "\n".join([*lines, f"{users:>7,} of 20,000  in all for users"])
