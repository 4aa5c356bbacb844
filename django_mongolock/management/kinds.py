"""The part of the commands that is about locks of other kinds, such as document locks, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, OutputWrapper

from ..exceptions import LockError, printable
from ..inspection import display
from ..inspection.kinds import Choice, LockKind, Row, Swept, find_kind, kinds
from ..inspection.snapshot import State

TITLES: Final = ("DOCUMENT", "STATE", "WORK", "HOLDER", "HELD FOR", "STALE IN")


def chosen_kinds(options: dict[str, Any]) -> Iterator[LockKind]:
    """The locks that the options of the command choose. Raises CommandError for an unknown name."""
    if options["document_lock"]:
        try:
            yield from map(find_kind, options["document_lock"])
        except LookupError as error:
            raise CommandError(f"--document-lock: {error}", returncode=2) from error
    elif options["key"] is None:
        alias = options["database"]
        yield from (kind for kind in kinds() if alias is None or kind.alias == alias)


@dataclass
class Report:
    """What a command found of one kind, and did. cleared: whether it cleared them. error: why that failed."""

    name: str
    found: Swept = field(default_factory=Swept)
    cleared: bool = False
    error: str = ""

    @property
    def stale(self) -> list[Row]:
        return self.found.cleared

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "lock": self.name,
            "stale": [row.as_json() for row in self.stale],
            "found": self.found.found,
            "cleared": self.found.count,
            "dated": self.found.dated,
            "damaged": [row.as_json() for row in self.found.damaged],
            "error": self.error or None,
        }

    def write(self, stdout: OutputWrapper, most: int | None = None) -> None:
        """The result for people; nothing if there are no stale documents."""
        found = self.found
        for row in () if self.cleared else self.stale[:most]:
            held = f"held by {row.holder} for {display.duration(row.seconds)}"
            stdout.write(printable(f"  {row.id}  {row.state} → {row.failed or row.state}  {held}"))
        for row in found.damaged:
            stdout.write(printable(f"  {row.id}  not cleared: {row.damage}"))
        if not self.cleared and found.found:
            stdout.write(f"Stale documents of {self.name}: {found.found}. Nothing was cleared.")
        elif found.found:
            stdout.write(f"Cleared {found.count} of {found.found} stale documents of {self.name}.")
        if found.dated:
            stdout.write(f"Documents of {self.name} without a time stamp, which they got now: {found.dated}.")


def process(kind: LockKind, options: dict[str, Any], *, dry_run: bool) -> Report:
    """Clear the stale documents of a kind, or only find them."""
    owner, choice = options["owner"], Choice("stale", options["owner"], options["older_than"])
    try:
        if not dry_run:
            return Report(kind.name, kind.clear(choice, batch=options["batch_size"]), cleared=True)
        stale = kind.rows(choice)
        damaged = kind.rows(Choice("damaged")) if owner is None else []
        return Report(kind.name, Swept(stale, found=len(stale), damaged=damaged))
    except (LockError, ImproperlyConfigured) as error:
        return Report(kind.name, error=str(error))


@dataclass
class Listing:
    """The rows of one kind that are to be listed. error: why they could not be read."""

    name: str
    rows: list[Row] = field(default_factory=list)
    more: bool = False
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        rows = [row.as_json() for row in self.rows]
        return {"lock": self.name, "documents": rows, "more": self.more, "error": self.error or None}


def listing(kind: LockKind, options: dict[str, Any]) -> Listing:
    """Read the rows that the options of `list_locks` choose: held ones by default."""
    limit, state = options["limit"], "all" if options["all"] else "stale" if options["stale"] else "held"
    try:
        found = kind.rows(Choice(state, options["owner"]), limit + 1 if limit else 0)
    except (LockError, ImproperlyConfigured) as error:
        return Listing(kind.name, error=str(error))
    most = limit or len(found)
    return Listing(kind.name, found[:most], more=len(found) > most)


def as_row(row: Row) -> tuple[str, ...]:
    """The row of a document, for a terminal."""
    state = display.STATES[row.lock_state][1]
    if row.lock_state is State.DAMAGED:
        return tuple(map(printable, (row.id, state, "-", row.damage, "-", "-")))
    held = display.duration(row.seconds) if row.since else "-"
    left = display.duration(row.left) if row.left is not None and row.left > 0 else "-"
    return tuple(map(printable, (row.id, state, row.state, row.holder, held, left)))


def find_row(kind: LockKind, text: str) -> Row | None:
    """The held row with the id that is shown as *text*. Raises CommandError if several are."""
    found = [row for row in kind.rows(Choice(ids=kind.ids(text))) if row.holder]
    if len(found) > 1:
        types = ", ".join(type(each.id).__name__ for each in found)
        raise CommandError(f"several documents of {kind.name} have the id {text} ({types}): use force_release()")
    return found[0] if found else None
