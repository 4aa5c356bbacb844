"""The errors of locks inside documents. Those of all locks are in `django_mongolock.exceptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..exceptions import LockError, LockLost

__all__ = ["DocumentLockLost", "DocumentNotFound", "DocumentRefused"]


@dataclass(eq=False, repr=False)
class DocumentNotFound(LockError):
    """The document does not exist, or no longer does."""

    collection: str
    id: Any

    def _text(self) -> str:
        return f"there is no document {self.id!r} in {self.collection}"


class DocumentLockLost(LockLost):
    """The document was taken from its holder before the work was finished: it was cleared as stale, or taken over.

    found_holder: the holder now. found_state: the state now. In a forked child, which holds nothing of its parent's,
    both are None and `reason` says so. maybe_written: False: nothing was written. True: the write was sent more than
    once, since MongoDB did not answer, and the first copy may have been done before the document was taken.
    """

    def __init__(  # noqa: PLR0917 - as they pickle
        self,
        collection: str,
        id: Any,  # noqa: A002
        version: int,
        found_holder: str | None = None,
        found_state: str | None = None,
        reason: str = "",
        maybe_written: bool = False,
    ) -> None:
        super().__init__(f"{collection}:{id}", version, reason or "the document was taken from its holder")
        self.args = (collection, id, version, found_holder, found_state, reason, maybe_written)
        self.maybe_written = maybe_written
        self.collection = collection
        self.id = id
        self.version = version
        self.found_holder = found_holder
        self.found_state = found_state

    def _text(self) -> str:
        now = f"held by {self.found_holder!r}" if self.found_holder else "free"
        why = self.args[5] or f"it is {now} now, in the state {self.found_state!r}"
        written = ". The write may have been done before: MongoDB did not answer the first time"
        return (
            f"document {self.id!r} in {self.collection} was lost by the holder of version {self.version}: {why}"
            f"{written if self.maybe_written else ''}"
        )


@dataclass(eq=False, repr=False)
class DocumentRefused(LockError):
    """MongoDB does not write the document like this: its validator or a unique index refuses it, or a path of the
    changes leads through a value that has no fields. Nothing was written.
    """

    collection: str
    id: Any
    problem: str

    def _text(self) -> str:
        return (
            f"document {self.id!r} in {self.collection} was not written: {self.problem}. Correct the changes, or the "
            "document"
        )
