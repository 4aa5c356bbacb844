"""``manage.py list_locks``: who has what, since when, and who waits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from django.core.management.base import CommandParser

from ...conf import get_settings
from ...engine.deadlock import Cycle
from ...inspect.snapshot import Seen, find_deadlocks
from ...models import Lock, LockQuerySet
from ..lock_command import LockCommand, as_row, not_negative, write_json, write_table

FOUND = 3


class Command(LockCommand):
    """Lists locks; changes nothing."""

    help = "Lists locks: those that are held, unless told otherwise. What ends first comes first."
    #: Were deadlocks found?
    found_some = False

    def add_arguments(self, parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--stale", action="store_true", help="locks whose lease is over and that nobody released")
        which.add_argument("--waiting", action="store_true", help="locks that somebody waits for")
        which.add_argument("--all", action="store_true", help="all, also those that nobody holds, by their keys")
        which.add_argument("--deadlocks", action="store_true", help="who waits for each other; exit code 3 if any do")
        parser.add_argument(
            "--limit", type=not_negative, default=100, metavar="NUMBER", help="how many, 0 for no limit (default: 100)"
        )
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """The exit code is for the shell; `call_command` just returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        with self.telling_errors():
            store = self.store(options)
            if options["deadlocks"]:
                self._show_deadlocks(find_deadlocks(store, self.keys(options)), as_json=options["json"])
                return
            limit = options["limit"]
            found = self._survey(options, limit + 1 if limit else 0)
            shown = islice(found, limit or None)
            if options["json"]:
                write_json(self.stdout, "locks", shown, lambda: {"more": next(found, None) is not None})
            else:
                self._write_table(shown, found)

    def _show_deadlocks(self, found: list[Cycle], *, as_json: bool) -> None:
        self.found_some = bool(found)
        if as_json:
            self.stdout.write(json.dumps({"deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found]}))
        else:
            self.stdout.write("\n".join(map(str, found)) or "Nobody waits for each other.")

    def _survey(self, options: dict[str, Any], limit: int) -> Iterator[Seen]:
        queryset = Lock.objects.using(options["database"] or get_settings().DATABASE).matching(self.keys(options))
        if (owner := self.owner(options)) is not None:
            queryset = queryset.leased().filter(holders__owner=owner)
        for lock in _chosen(queryset, options).survey(limit=limit, holders=1 + 9 * options["json"]):
            yield lock.seen

    def _write_table(self, shown: Iterator[Seen], found: Iterator[Seen]) -> None:
        first = next(shown, None)
        if first is None:
            self.stdout.write("There is no such lock.")
            return
        write_table(self.stdout, (as_row(seen) for part in ((first,), shown) for seen in part))
        if next(found, None) is not None:
            self.stdout.write("… and more: see --limit.")


def _chosen(queryset: LockQuerySet, options: dict[str, Any]) -> LockQuerySet:
    if options["all"]:
        return queryset.order_by("key")
    if options["stale"]:
        return queryset.stale().order_by("expires_at")
    return (queryset.waited_for() if options["waiting"] else queryset.held()).order_by("expires_at")
