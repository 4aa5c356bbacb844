"""The part of `clear_stale_locks` that is about documents: every declared `DocumentLock`, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, OutputWrapper

from ..documents import DocumentLock, StaleDocument, declared
from ..documents.document_lock import find_lock
from ..documents.sweep import as_rows
from ..exceptions import LockError
from ..inspection import display


@dataclass
class Report:
    """The result for the documents of one lock. cleared: None in a dry run. error: why they were not processed."""

    name: str
    stale: list[StaleDocument] = field(default_factory=list)
    damaged: list[StaleDocument] = field(default_factory=list)
    found: int = 0
    cleared: int | None = None
    dated: int = 0
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "lock": self.name,
            "stale": list(as_rows(self.stale)),
            "found": self.found,
            "cleared": self.cleared or 0,
            "dated": self.dated,
            "damaged": list(as_rows(self.damaged)),
            "error": self.error or None,
        }

    def write(self, stdout: OutputWrapper, most: int | None = None) -> None:
        """The result for people; nothing if there are no stale documents."""
        for document in self.stale[:most] if self.cleared is None else ():
            state = f"{document.state} → {document.failed}"
            held = f"held by {document.holder} for {display.duration(document.seconds)}"
            stdout.write(display.plain(f"  {document.id}  {state}  {held if document.holder else 'without a holder'}"))
        for document in self.damaged:
            stdout.write(display.plain(f"  {document.id}  not cleared: {document.damage}"))
        if self.cleared is None and self.found:
            stdout.write(f"Stale documents of {self.name}: {self.found}. Nothing was cleared.")
        elif self.found:
            stdout.write(f"Cleared {self.cleared} of {self.found} stale documents of {self.name}.")
        if self.dated:
            stdout.write(f"Documents of {self.name} without a time stamp, which they got now: {self.dated}.")


def process(lock: DocumentLock[Any], options: dict[str, Any], *, dry_run: bool) -> Report:
    """Clear the stale documents of *lock*, or only find them."""
    which = {"owner": options["owner"], "older_than": options["older_than"], "unheld": options["unheld"]}
    try:
        if dry_run:
            found = lock.stale(**which)
            stale = [document for document in found if not document.damage]
            return Report(lock.name, stale, [document for document in found if document.damage], len(stale))
        swept = lock.clear_stale(**which, batch=options["batch_size"])
    except (LockError, ImproperlyConfigured) as error:
        return Report(lock.name, error=str(error))
    return Report(lock.name, swept.cleared, swept.damaged, swept.found, swept.count, swept.dated)


def chosen_locks(options: dict[str, Any]) -> Iterator[DocumentLock[Any]]:
    """The document locks that the options of the command choose. Raises CommandError for an unknown name."""
    if options["document_lock"]:
        try:
            yield from map(find_lock, options["document_lock"])
        except LookupError as error:
            raise CommandError(f"--document-lock: {error}") from error
    elif options["key"] is None:
        alias = options["database"]
        yield from (lock for lock in declared() if alias is None or lock.alias == alias)
