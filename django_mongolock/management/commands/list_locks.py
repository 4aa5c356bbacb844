"""``manage.py list_locks``: which locks of every kind are held, by whom and since when, and how many wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from django.core.management.base import CommandParser

from ...backends.base import mongo_store
from ...conf import get_settings
from ...engine.rule.deadlock import Cycle
from ...inspection.kinds import Choice, LockKind, Row
from ...inspection.named_locks import NamedLocks
from ...inspection.queries import find_deadlocks, ping
from ..lock_command import LockCommand, whole_number, write_table

FOUND = 3


class Command(LockCommand):
    """Lists locks; changes nothing."""

    help = (
        "Lists locks of every kind: by default those that are held. First the named locks, the lease that ends first "
        "at the top; then the documents under each DocumentLock, the one held for longest at the top. With --key it "
        "lists only named locks, with --kind only that kind."
    )
    #: Whether deadlocks were found.
    found_some = False

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
        self.add_kind(parser)
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with a code for the shell; `call_command` returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        self.failed = {}
        with self.reporting_errors():
            if options["deadlocks"]:
                store = mongo_store(options["database"])
                ping(store, get_settings().COMMAND_TIMEOUT)
                self._show_deadlocks(find_deadlocks(store, self.keys(options)), as_json=options["json"])
                return
            choice = Choice(_state(options), self.owner(options), key=self.keys(options))
            kinds = self.kinds(options)
            if options["json"]:
                self._write_json(kinds, choice, options["limit"])
            else:
                self._write_tables(kinds, choice, options)
            self.report_failed()

    def _write_json(self, kinds: list[LockKind], choice: Choice, limit: int) -> None:
        self.stdout.write('{"kinds": [', ending="")
        for number, kind in enumerate(kinds):
            self.stdout.write("," if number else "", ending="")
            found = self._rows(kind, choice, limit)
            self.write_json(kind, "locks", islice(found, limit or None), partial(_more, found))
        self.stdout.write("]}")

    def _write_tables(self, kinds: list[LockKind], choice: Choice, options: dict[str, Any]) -> None:
        """The rows of each kind; nothing of a kind that has none."""
        nothing, limit = True, options["limit"]
        for kind in kinds:
            with self.noting_errors(kind):
                found = self._rows(kind, choice, limit)
                if (first := next(found, None)) is None:
                    continue
                if not isinstance(kind, NamedLocks):
                    self.stdout.write(f"\n{kind.title[0].upper()}{kind.title[1:]}:")
                shown = chain([first], islice(found, limit - 1 if limit else None))
                write_table(self.stdout, shown, wide=options["wide"])
                nothing = False
                if next(found, None) is not None:
                    self.stdout.write("… and more: see --limit.")
        if nothing and not self.failed:
            chosen = any(options[name] for name in ("all", "stale", "kept", "waiting", "key", "owner", "kind"))
            self.stdout.write("There are no such locks." if chosen else "No lock is held.")

    def _rows(self, kind: LockKind, choice: Choice, limit: int) -> Iterator[Row]:
        """Read so many rows, and one more."""
        yield from kind.rows(choice, limit + 1 if limit else 0)

    def _show_deadlocks(self, found: list[Cycle], *, as_json: bool) -> None:
        self.found_some = bool(found)
        if as_json:
            self.stdout.write(json.dumps({"deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found]}))
        else:
            self.stdout.write("\n".join(map(str, found)) or "There are no deadlocks.")


def _more(found: Iterator[Row]) -> dict[str, Any]:
    return {"more": next(found, None) is not None}


def _state(options: dict[str, Any]) -> str:
    states = {"all": "all", "stale": "stale", "kept": "kept", "waiting": "waited"}
    return next((state for name, state in states.items() if options[name]), "held")
