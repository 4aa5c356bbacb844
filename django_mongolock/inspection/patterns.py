"""Key patterns that people write: ``*`` for any text, ``?`` for one character, everything else for itself.

A pattern becomes a range of keys, which the index of ``_id`` finds, and a regular expression. Whatever the pattern, the
expression takes time in proportion to the length of a key: it never goes back to a star that it has passed.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Final

from ..engine.text_checks import MAX_KEY_BYTES, check_text


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """Keys from *low* on and below *high* ("": no end) in which *regex* is found ("": any)."""

    low: str = ""
    high: str = ""
    regex: str = ""

    def query(self, field: str = "_id") -> dict[str, Any]:
        """The condition on the field; {} for every key."""
        conditions = {"$gte": self.low, "$lt": self.high, "$regex": self.regex}
        return {field: found} if (found := {name: value for name, value in conditions.items() if value}) else {}


EVERY_KEY: Final = KeyMatch()


def starting(prefix: str) -> KeyMatch:
    """Keys that start with *prefix*."""
    return KeyMatch(prefix, _end(prefix))


def glob(pattern: str, prefix: str = "") -> KeyMatch:
    """Keys that match *pattern* as a whole.

    A pattern that does not start with the *prefix* of the project's keys gets it. Raises ValueError for a pattern that
    no key can match.
    """
    text = _check(pattern)
    text = text if text.startswith(prefix) else prefix + text
    literal = re.split(r"[*?]", text, maxsplit=1)[0]
    first, *middle = (_piece(piece) for piece in re.split(r"\*+", text))
    if not middle:
        return KeyMatch(literal, _end(literal), rf"(?s)^{first}\z")
    *middle, last = middle
    regex = f"(?s)^{first}" + "".join(f"(?>.*?{piece})" for piece in middle)
    return KeyMatch(literal, _end(literal), rf"{regex}.*{last}\z" if last else regex)


def _check(text: str) -> str:
    text = check_text("a key pattern", text)
    if not text or len(text.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"a key pattern has 1 to {MAX_KEY_BYTES} bytes")
    return text


def _piece(piece: str) -> str:
    return "".join("." if character == "?" else re.escape(character) for character in piece)


def _end(prefix: str) -> str:
    """The first text after all those that start with *prefix*, in the order of their bytes."""
    for length in range(len(prefix), 0, -1):
        following = ord(prefix[length - 1]) + 1
        while following <= 0x10FFFF and unicodedata.category(chr(following)) == "Cs":
            following += 1
        if following <= 0x10FFFF:
            return prefix[: length - 1] + chr(following)
    return ""
