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
from ..inspect import display


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
        for stuck in self.stale[:most] if self.cleared is None else ():
            state = f"{stuck.state} → {stuck.failed}"
            since = f"for {display.duration(stuck.seconds)}"
            stdout.write(display.plain(f"  {stuck.id}  {state}  held by {stuck.holder} {since}"))
        for stuck in self.damaged:
            stdout.write(display.plain(f"  {stuck.id}  damaged: {stuck.damage}"))
        if self.cleared is None and self.found:
            stdout.write(f"Stale documents of {self.name}: {self.found}. Nothing was cleared.")
        elif self.found:
            stdout.write(f"Cleared {self.cleared} of {self.found} stale documents of {self.name}.")
        if self.dated:
            stdout.write(f"Documents of {self.name} without a time stamp, which they got now: {self.dated}.")


class Sweeper:
    """Clears the document locks that the options of the command choose."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._which = {"owner": options["owner"], "older_than": options["older_than"]}
        self.locks = list(_chosen(options))

    def work(self) -> Iterator[Report]:
        """Look at them, or clear them. A lock that fails does not stop the others."""
        return map(self.look if self._options["dry_run"] else self._clear, self.locks)

    def look(self, lock: DocumentLock[Any]) -> Report:
        """Find the stale documents; change nothing."""
        report = Report(lock.name)
        try:
            found = lock.stale(**self._which)
        except (LockError, ImproperlyConfigured) as error:
            report.error = str(error)
            return report
        report.damaged = [stuck for stuck in found if stuck.damage]
        report.stale = [stuck for stuck in found if not stuck.damage]
        report.found = len(report.stale)
        return report

    def _clear(self, lock: DocumentLock[Any]) -> Report:
        report = Report(lock.name, cleared=0)
        try:
            swept = lock.clear_stale(**self._which, batch=self._options["batch_size"])
        except (LockError, ImproperlyConfigured) as error:
            report.error = str(error)
            return report
        report.stale, report.damaged, report.found = swept.cleared, swept.damaged, swept.found
        report.cleared, report.dated = swept.count, swept.dated
        return report


def _chosen(options: dict[str, Any]) -> Iterator[DocumentLock[Any]]:
    if options["document_lock"]:
        try:
            yield from map(find_lock, options["document_lock"])
        except LookupError as error:
            raise CommandError(f"--document-lock: {error}") from error
    elif options["key"] is None:
        alias = options["database"]
        yield from (lock for lock in declared() if alias is None or lock.alias == alias)
