"""The part of the commands that is about documents: every declared `DocumentLock`, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bson import ObjectId
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.management.base import CommandError, OutputWrapper

from ..documents import DocumentLock, DocumentSnapshot, declared
from ..documents.document_lock import find_lock
from ..documents.snapshot import as_rows
from ..exceptions import LockError, printable
from ..inspection import display
from ..inspection.snapshot import State

TITLES: Final = ("DOCUMENT", "STATE", "WORK", "HOLDER", "HELD FOR", "STALE IN")


@dataclass
class Report:
    """The result for the documents of one lock. cleared: None in a dry run. error: why they were not processed."""

    name: str
    stale: list[DocumentSnapshot] = field(default_factory=list)
    damaged: list[DocumentSnapshot] = field(default_factory=list)
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
            stdout.write(printable(f"  {document.id}  {state}  {held if document.holder else 'without a holder'}"))
        for document in self.damaged:
            stdout.write(printable(f"  {document.id}  not cleared: {document.damage}"))
        if self.cleared is None and self.found:
            stdout.write(f"Stale documents of {self.name}: {self.found}. Nothing was cleared.")
        elif self.found:
            stdout.write(f"Cleared {self.cleared} of {self.found} stale documents of {self.name}.")
        if self.dated:
            stdout.write(f"Documents of {self.name} without a time stamp, which they got now: {self.dated}.")


def process(lock: DocumentLock[Any], options: dict[str, Any], *, dry_run: bool) -> Report:
    """Clear the stale documents of *lock*, or only find them."""
    owner, which = options["owner"], {"older_than": options["older_than"], "unheld": options["unheld"]}
    try:
        if dry_run:
            found = lock.stale(**which)
            stale = list(found if owner is None else found.owned_by(owner))
            return Report(lock.name, stale, list(lock.damaged()) if owner is None else [], len(stale))
        swept = lock.clear_stale(owner=owner, **which, batch=options["batch_size"])
    except (LockError, ImproperlyConfigured) as error:
        return Report(lock.name, error=str(error))
    return Report(lock.name, swept.cleared, swept.damaged, swept.found, swept.count, swept.dated)


def chosen_locks(options: dict[str, Any]) -> Iterator[DocumentLock[Any]]:
    """The document locks that the options of the command choose. Raises CommandError for an unknown name."""
    if options["document_lock"]:
        try:
            yield from map(find_lock, options["document_lock"])
        except LookupError as error:
            raise CommandError(f"--document-lock: {error}", returncode=2) from error
    elif options["key"] is None:
        alias = options["database"]
        yield from (lock for lock in declared() if alias is None or lock.alias == alias)


@dataclass
class Listing:
    """The documents of one lock that are to be listed. error: why they could not be read."""

    name: str
    documents: list[DocumentSnapshot] = field(default_factory=list)
    more: bool = False
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "lock": self.name,
            "documents": list(as_rows(self.documents)),
            "more": self.more,
            "error": self.error or None,
        }


def listing(lock: DocumentLock[Any], options: dict[str, Any]) -> Listing:
    """Read the documents that the options of `list_locks` choose: held ones by default."""
    limit, which = options["limit"], lock.at_work() if options["all"] else lock.held()
    which = lock.stale() if options["stale"] else which
    which = which if options["owner"] is None else which.owned_by(options["owner"])
    try:
        found = list(which[: limit + 1] if limit else which)
        if options["all"] and options["owner"] is None:
            found += list(lock.damaged()[: limit + 1 - len(found)] if limit else lock.damaged())
    except (LockError, ImproperlyConfigured) as error:
        return Listing(lock.name, error=str(error))
    most = limit or len(found)
    return Listing(lock.name, found[:most], more=len(found) > most)


def as_row(document: DocumentSnapshot) -> tuple[str, ...]:
    """The row of a document, for a terminal."""
    state = display.STATES[document.lock_state][1]
    if document.lock_state is State.DAMAGED:
        return tuple(map(printable, (document.id, state, "-", document.damage, "-", "-")))
    left = document.left
    row = (
        document.id,
        state,
        document.state,
        document.holder,
        display.duration(document.seconds) if document.since else "-",
        "-" if left is None or left <= 0 else display.duration(left),
    )
    return tuple(map(printable, row))


def find_document(lock: DocumentLock[Any], text: str) -> DocumentSnapshot | None:
    """The document at work with the id that is shown as *text*. Raises CommandError if several are."""
    found = list(lock.at_work().with_ids(_ids(lock, text)))
    if len(found) > 1:
        types = ", ".join(type(each.id).__name__ for each in found)
        raise CommandError(f"several documents of {lock.name} have the id {text} ({types}): use DocumentLock.at_work()")
    return found[0] if found else None


def _ids(lock: DocumentLock[Any], text: str) -> list[Any]:
    """What an id may be that is shown as *text*."""
    if lock.model is not None:
        try:
            return [lock.model._meta.pk.to_python(text)]
        except ValidationError:
            return []
    ids: list[Any] = [text]
    if ObjectId.is_valid(text):
        ids.append(ObjectId(text))
    if text.removeprefix("-").isdecimal() and text.isascii():
        ids.append(int(text))
    return ids
