"""``manage.py list_locks``: which locks and documents are held, by whom and since when, and how many wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...conf import get_settings
from ...engine.rule.deadlock import Cycle
from ...inspection.queries import find_deadlocks
from ...inspection.snapshot import LockSnapshot
from ...models import Lock, LockQuerySet
from ..kinds import TITLES as DOCUMENT_TITLES
from ..kinds import Listing, chosen_kinds, listing
from ..kinds import as_row as as_document_row
from ..lock_command import LockCommand, add_document_lock, whole_number, write_json, write_locks, write_table

FOUND = 3


class Command(LockCommand):
    """Lists locks; changes nothing."""

    help = (
        "Lists locks: by default those that are held. The lease that ends first comes first. Then it lists the "
        "documents that are held under each DocumentLock, the one held for longest first. With --key it lists no "
        "documents, with --document-lock no named locks."
    )
    #: Whether deadlocks were found.
    found_some = False
    #: The document locks that could not be read.
    failed: list[str]

    def add_arguments(self, parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--stale", action="store_true", help="locks whose lease has ended without a release")
        which.add_argument("--kept", action="store_true", help="locks that are released, but kept for a minimum hold")
        which.add_argument("--waiting", action="store_true", help="locks with waiters")
        which.add_argument("--all", action="store_true", help="all locks, also free ones, sorted by key")
        which.add_argument("--deadlocks", action="store_true", help="deadlocks; exit code 3 if there are any")
        parser.add_argument(
            "--limit",
            type=whole_number(0),
            default=100,
            metavar="NUMBER",
            help="how many, 0 for no limit (default: 100)",
        )
        parser.add_argument("--wide", action="store_true", help="cut no text to fit a line of 100, and add the tokens")
        add_document_lock(parser)
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with a code for the shell; `call_command` returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        self.failed = []
        with self.reporting_errors():
            if options["deadlocks"]:
                self._show_deadlocks(find_deadlocks(self.store(options), self.keys(options)), as_json=options["json"])
                return
            documents = [] if options["waiting"] or options["kept"] else list(chosen_kinds(options))
            limit = options["limit"]
            found = iter(()) if options["document_lock"] else self._snapshots(options, limit + 1 if limit else 0)
            shown = islice(found, limit or None)
            lists = (listing(kind, options) for kind in documents)
            if options["json"]:
                self._write_json(shown, found, lists)
            else:
                if not options["document_lock"]:
                    self._write_table(shown, found, options)
                for each in lists:
                    self._write_documents(each, wide=options["wide"])
            if self.failed:
                raise CommandError(f"some documents could not be read: {'; '.join(self.failed)}")

    def _write_json(
        self, shown: Iterator[LockSnapshot], found: Iterator[LockSnapshot], lists: Iterator[Listing]
    ) -> None:
        def rest() -> dict[str, Any]:
            more = next(found, None) is not None
            return {"more": more, "documents": [self._noted(each).as_json() for each in lists]}

        write_json(self.stdout, "locks", shown, rest)

    def _noted(self, found: Listing) -> Listing:
        if found.error:
            self.failed.append(f"{found.name}: {found.error}")
        return found

    def _write_documents(self, found: Listing, *, wide: bool) -> None:
        """The documents of one lock; nothing if there are none."""
        if found.rows:
            self.stdout.write(f"\nDocuments of {found.name}:")
            write_table(self.stdout, map(as_document_row, found.rows), DOCUMENT_TITLES, wide=wide)
        if found.more:
            self.stdout.write("… and more: see --limit.")
        self._noted(found)

    def _show_deadlocks(self, found: list[Cycle], *, as_json: bool) -> None:
        self.found_some = bool(found)
        if as_json:
            self.stdout.write(json.dumps({"deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found]}))
        else:
            self.stdout.write("\n".join(map(str, found)) or "There are no deadlocks.")

    def _snapshots(self, options: dict[str, Any], limit: int) -> Iterator[LockSnapshot]:
        self.store(options)
        queryset = Lock.objects.using(options["database"] or get_settings().DATABASE).matching(self.keys(options))
        if (owner := self.owner(options)) is not None:
            queryset = queryset.leased().filter(holders__owner=owner)
        return _chosen(queryset, options).snapshots(limit=limit, holders=10 if options["json"] else 1)

    def _write_table(
        self, shown: Iterator[LockSnapshot], found: Iterator[LockSnapshot], options: dict[str, Any]
    ) -> None:
        first = next(shown, None)
        if first is None:
            chosen = any(options[name] for name in ("all", "stale", "kept", "waiting", "key", "owner"))
            self.stdout.write("There are no such locks." if chosen else "No lock is held.")
            return
        write_locks(self.stdout, chain([first], shown), wide=options["wide"])
        if next(found, None) is not None:
            self.stdout.write("… and more: see --limit.")


def _chosen(queryset: LockQuerySet, options: dict[str, Any]) -> LockQuerySet:
    if options["all"]:
        return queryset.order_by("key")
    if options["stale"]:
        return queryset.stale().order_by("expires_at")
    chosen = queryset.waited_for if options["waiting"] else queryset.kept if options["kept"] else queryset.held
    return chosen().order_by("expires_at")
