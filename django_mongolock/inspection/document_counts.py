"""How many documents of each document lock are held, stale or damaged: for the dashboard and its JSON.

The rooms above this one declare such locks; `sources` is where they say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DocumentCounts:
    """The documents of the document lock *lock*. longest: seconds for which one of them has been held.

    more: there are more than were counted. error: why they could not be read; empty otherwise.
    """

    lock: str
    held: int = 0
    stale: int = 0
    damaged: int = 0
    longest: float = 0.0
    more: bool = False
    error: str = ""


#: Each returns the counts of all document locks that it knows.
sources: Final[list[Callable[[], Iterable[DocumentCounts]]]] = []


def document_counts() -> tuple[DocumentCounts, ...]:
    """Count the documents of all declared document locks, by name."""
    return tuple(counts for source in sources for counts in source())
