"""``manage.py list_locks``: which locks are held, by whom and since when, and how many wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from django.core.management.base import CommandParser

from ...conf import get_settings
from ...engine.deadlock import Cycle
from ...inspection.queries import find_deadlocks
from ...inspection.snapshot import LockSnapshot
from ...models import Lock, LockQuerySet
from ..lock_command import LockCommand, as_row, whole_number, write_json, write_table

FOUND = 3


class Command(LockCommand):
    """Lists locks; changes nothing."""

    help = "Lists locks: by default those that are held. The lease that ends first comes first."
    #: Whether deadlocks were found.
    found_some = False

    def add_arguments(self, parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--stale", action="store_true", help="locks whose lease has ended without a release")
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
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with a code for the shell; `call_command` returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        with self.reporting_errors():
            store = self.store(options)
            if options["deadlocks"]:
                self._show_deadlocks(find_deadlocks(store, self.keys(options)), as_json=options["json"])
                return
            limit = options["limit"]
            found = self._snapshots(options, limit + 1 if limit else 0)
            shown = islice(found, limit or None)
            if options["json"]:
                write_json(self.stdout, "locks", shown, lambda: {"more": next(found, None) is not None})
            else:
                self._write_table(shown, found, options)

    def _show_deadlocks(self, found: list[Cycle], *, as_json: bool) -> None:
        self.found_some = bool(found)
        if as_json:
            self.stdout.write(json.dumps({"deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found]}))
        else:
            self.stdout.write("\n".join(map(str, found)) or "There are no deadlocks.")

    def _snapshots(self, options: dict[str, Any], limit: int) -> Iterator[LockSnapshot]:
        queryset = Lock.objects.using(options["database"] or get_settings().DATABASE).matching(self.keys(options))
        if (owner := self.owner(options)) is not None:
            queryset = queryset.leased().filter(holders__owner=owner)
        return _chosen(queryset, options).snapshots(limit=limit, holders=10 if options["json"] else 1)

    def _write_table(
        self, shown: Iterator[LockSnapshot], found: Iterator[LockSnapshot], options: dict[str, Any]
    ) -> None:
        first = next(shown, None)
        if first is None:
            chosen = any(options[name] for name in ("all", "stale", "waiting", "key", "owner"))
            self.stdout.write("There are no such locks." if chosen else "No lock is held.")
            return
        write_table(self.stdout, map(as_row, chain([first], shown)))
        if next(found, None) is not None:
            self.stdout.write("… and more: see --limit.")


def _chosen(queryset: LockQuerySet, options: dict[str, Any]) -> LockQuerySet:
    if options["all"]:
        return queryset.order_by("key")
    if options["stale"]:
        return queryset.stale().order_by("expires_at")
    return (queryset.waited_for() if options["waiting"] else queryset.held()).order_by("expires_at")
