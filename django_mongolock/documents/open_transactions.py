"""A document that is released inside a transaction of another database: the next flow does not see what it wrote."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

_PACKAGE: Final = str(Path(__file__).resolve().parents[1])
#: The lines of code that acquired a document which was released inside a transaction: each is reported once.
_reported: set[str] = set()


def calling_place() -> str:
    """Return the line of the program that called the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_of_open(opened: list[BaseDatabaseWrapper], document: str, place: str) -> None:
    """Warn, once for each *place* that acquires a document, that it was released inside a transaction."""
    file, _, line = place.rpartition(":")
    if place in _reported or not line.isdigit():
        return
    _reported.add(place)
    warnings.warn_explicit(
        f"the document {document} was released inside the transaction that is open on {opened[0].alias!r}: the next "
        "flow does not yet see what was written under the lock. Open the transaction inside the block",
        RuntimeWarning,
        file,
        int(line),
    )
