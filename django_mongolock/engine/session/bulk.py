"""One command for many grants, and what to send after a command that has failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from ...exceptions import LockBackendFailed
from ..rule.document import Step
from ..store.base import Store
from .grant import Grant

T = TypeVar("T")

#: The most grants in one command.
BATCH: Final = 1_000
#: The number of parts into which a failed batch is split.
PARTS: Final = 10
#: The limit of a part, in seconds. This is enough for documents that are not stuck.
SHORT_LIMIT: Final = 0.3


def batches(items: Sequence[T], size: int = 0) -> Iterator[Sequence[T]]:
    """Return *items* in batches of at most *size*, `BATCH` if that is 0."""
    size = size or BATCH
    return (items[start : start + size] for start in range(0, len(items), size))


def parts_of(failed: Sequence[Grant], store: Store, primary: str) -> list[Sequence[Grant]]:
    """Return the parts of a *failed* batch that are to be sent next, or nothing if the batch is to be sent as it is.

    A batch is split only if one of its documents may be the reason. If the server answers nothing at all, or if
    *primary*, to which the command was sent, is the primary no more, the failure says nothing about a document. Single
    commands are never sent to find that out: an empty command asks the server.
    """
    if len(failed) == 1 or store.primary() != primary:
        return []
    try:
        store.renew([], Step(), SHORT_LIMIT)
    except LockBackendFailed:
        return []
    return list(batches(failed, -(-len(failed) // PARTS)))
