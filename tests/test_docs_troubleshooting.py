"""docs/howto/troubleshooting.md: the messages that it explains are those of the library."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/howto/troubleshooting.md").read_text()
#: Of SQLite and of Django's test runner.
OTHERS = ["no such table: mongolock_locks", "Database queries to 'locks' are not allowed in this test"]


def joined(text: str) -> str:
    """Source code with each string in one piece, and "…" for what is filled in."""
    return re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", text))


def test_messages() -> None:
    """Each text in the first column is one that the library has."""
    source = joined("".join(path.read_text() for path in (ROOT / "django_mongolock").rglob("*.py")))
    table = PAGE.partition("## By message")[2].partition("## By symptom")[0]
    messages = [
        text for line in table.splitlines() for text in re.findall(r"`([^`]+)`", line.split(" | ", maxsplit=1)[0])
    ]
    assert len(messages) > 15
    # What a message quotes is filled in, too.
    filled = {text: re.sub(r"'[^']*'|\"django_mongolock\.router[^\"]*\"|\d+", "…", text) for text in messages}
    missing = {
        (text, piece)
        for text, plain in filled.items()
        for piece in (piece.strip(" :;,.?") for piece in plain.split("…"))
        if piece not in source and text not in OTHERS
    }
    assert missing == set()
