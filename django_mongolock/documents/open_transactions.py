"""A document that is released inside a transaction of another database: the next flow does not see what it wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

from ..backends.transactions import warn_once

_PACKAGE: Final = str(Path(__file__).resolve().parents[1])


def calling_place() -> str:
    """Return the line of the program that called the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_of_open(opened: list[BaseDatabaseWrapper], document: str, place: str) -> None:
    """Warn, once for each *place* that acquires a document, that it was released inside a transaction."""
    warn_once(
        place,
        f"the document {document} was released inside the transaction that is open on {opened[0].alias!r}: the next "
        "flow does not yet see what was written under the lock. Open the transaction inside the block",
    )
