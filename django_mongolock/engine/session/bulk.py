"""One command for many grants, and the choice of what to send after a failed command.

The renewals and the removals of a session use this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from ...exceptions import LockBackendFailed
from ..rule.document import Step
from ..store.base import Store

T = TypeVar("T")

#: The most grants in one command.
BATCH: Final = 1_000
#: The number of parts into which a failed batch is split.
PARTS: Final = 10
#: The limit of a part, in seconds. This is enough for documents that are not stuck.
SHORT_LIMIT: Final = 0.3


def batches(items: Sequence[T], size: int = 0) -> Iterator[Sequence[T]]:
    """Return *items* in batches of at most *size*. If *size* is 0, the limit is `BATCH`."""
    size = size or BATCH
    return (items[start : start + size] for start in range(0, len(items), size))


def parts_of(failed: Sequence[T], store: Store, primary: str) -> list[Sequence[T]]:
    """Return the parts of a *failed* batch to send next. Return nothing if the whole batch has to be sent again.

    A batch is split only if one of its documents may be the reason for the failure. The failure says nothing about a
    document if the server answers nothing at all, or if *primary*, the receiver of the command, is no longer the
    primary. An empty command asks the server. Single commands are never sent to find that out.
    """
    if len(failed) == 1 or store.primary() != primary:
        return []
    try:
        store.renew([], Step(), SHORT_LIMIT)
    except LockBackendFailed:
        return []
    return list(batches(failed, -(-len(failed) // PARTS)))
