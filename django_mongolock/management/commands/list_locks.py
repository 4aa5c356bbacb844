"""``manage.py list_locks``: list the held locks of every kind with their holders and the number of waiters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from django.core.management.base import CommandParser

from ...backends import mongo_store
from ...conf import get_settings
from ...engine.rule.deadlock import Cycle
from ...engine.text_checks import check_fact
from ...inspection.kinds import Choice, LockKind, Row
from ...inspection.queries import find_deadlocks, ping
from ..lock_command import LockCommand, whole_number

FOUND = 3


class Command(LockCommand):
    """A read-only command that lists locks."""

    help = (
        "Lists locks of every kind: by default those that are held. First the named locks, the lease that ends first "
        "at the top; then the documents under each DocumentLock, the one held for longest at the top. With --key it "
        "lists only named locks, with --kind only that kind."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--stale", action="store_true", help="locks whose lease has ended without a release")
        which.add_argument("--kept", action="store_true", help="locks that are released, but kept for a minimum hold")
        which.add_argument("--waiting", action="store_true", help="locks with waiters")
        which.add_argument("--all", action="store_true", help="all locks, also free ones, sorted by key")
        which.add_argument("--deadlocks", action="store_true", help="deadlocks; exit code 3 if there are any")
        parser.add_argument(
            "--limit",
            type=whole_number,
            default=100,
            metavar="NUMBER",
            help="how many, 0 for no limit (default: 100)",
        )
        parser.add_argument("--wide", action="store_true", help="cut no holder to fit a line, and add the tokens")
        self.add_kind(parser)
        super().add_arguments(parser)

    def handle(self, **options: Any) -> None:
        self.failed = {}
        with self.reporting_errors():
            if options["deadlocks"]:
                store = mongo_store(options["database"])
                ping(store, get_settings().COMMAND_TIMEOUT)
                self._show_deadlocks(find_deadlocks(store, self.keys(options)), as_json=options["json"])
                return
            self.choice = Choice(_state(options), check_fact("--owner", options["owner"]), key=self.keys(options))
            self.limit = options["limit"]
            kinds = self.kinds(options)
            if options["json"]:
                self.write_json("locks", kinds, self._read)
            else:
                self._write_tables(kinds, options)
            self.report_failed()

    def _read(self, kind: LockKind) -> tuple[Iterator[Row], Callable[[], dict[str, Any]]]:
        """Return the rows of a kind, and a function that returns whether there are more."""

        def rows() -> Iterator[Row]:
            yield from kind.rows(self.choice, self.limit and self.limit + 1)

        found = rows()
        return islice(found, self.limit or None), lambda: {"more": next(found, None) is not None}

    def _write_tables(self, kinds: list[LockKind], options: dict[str, Any]) -> None:
        """Write the rows of each kind. A kind without rows is left out."""
        nothing = True
        for kind in kinds:
            shown, more = self._read(kind)
            with self.noting_errors(kind):
                if (first := next(shown, None)) is None:
                    continue
                self.write_rows(kind, chain([first], shown), wide=options["wide"])
                nothing = False
                if more()["more"]:
                    self.stdout.write("… and more: see --limit.")
        if nothing and not self.failed:
            self.write_none("No lock is held.", options, "all", "stale", "kept", "waiting", "key", "owner", "kind")
        if self.choice.state == "held" and any(self._has_stale(kind) for kind in kinds):
            self.stdout.write("There are stale ones: see --stale.")

    def _has_stale(self, kind: LockKind) -> bool:
        rows: list[Row] = []
        with self.noting_errors(kind):
            rows += kind.rows(replace(self.choice, state="stale"), 1)
        return bool(rows)

    def _show_deadlocks(self, found: list[Cycle], *, as_json: bool) -> None:
        self.code = FOUND if found else 0
        if as_json:
            self.stdout.write(json.dumps({"deadlocks": [{"keys": cycle.keys, "cycle": str(cycle)} for cycle in found]}))
        else:
            self.stdout.write("\n".join(map(str, found)) or "There are no deadlocks.")


def _state(options: dict[str, Any]) -> str:
    states = {"all": "all", "stale": "stale", "kept": "kept", "waiting": "waited"}
    return next((state for name, state in states.items() if options[name]), "held")
