"""``manage.py clear_stale_locks``: clears the locks that dead processes left behind."""

from __future__ import annotations

import json
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...exceptions import printable
from ...inspection.kinds import Choice, LockKind, Row, Swept
from ...inspection.named_locks import NamedLocks
from ..lock_command import LockCommand, seconds, whole_number, write_table

#: How many locks the confirmation shows.
SHOWN = 10
FOUND = 3

HELP = """\
Clears stale locks: those whose lease has ended without a release, because their process died or hung.

Stale locks do no harm, since the next process that asks gets them; but they fill the list and hide new failures. The
server decides in the clearing update itself, according to its own clock: a lock that is renewed or acquired in the same
moment stays. The first waiter for a cleared lock gets it. Damaged documents are not changed. After a failover, a lock
is not cleared the first time: its lease gets its whole length again.

Stale document locks are cleared too: a document that was held for longer than its lock allows is set to the failed
state of that work, for a retry job. With --key only named locks are cleared, with --kind only that kind.
"""

CODES = """\
exit codes:
  0  the stale locks were cleared, or there was nothing to clear
  1  error: MongoDB cannot be reached, a setting is wrong, or there is no terminal (see --no-input)
  2  the command line is wrong
  3  --dry-run found stale locks
"""


class Command(LockCommand):
    """Clears stale locks, in batches."""

    help = HELP
    #: Whether a dry run found stale locks.
    found_some = False
    #: When it last said how far it is.
    reported: float

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=CODES, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="only show what would be cleared")
        parser.add_argument(
            "--older-than",
            type=seconds,
            default=0.0,
            metavar="TIME",
            help="only locks whose lease ended at least so long ago: seconds, or 5m, 2h, 1d",
        )
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="clear without a confirmation"
        )
        parser.add_argument(
            "--batch-size",
            type=whole_number(1, 10_000),
            default=1_000,
            metavar="NUMBER",
            help="locks in one update (default: 1000)",
        )
        self.add_kind(parser)
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with a code for the shell; `call_command` returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        self.failed, self.reported = {}, time.monotonic()
        asks = options["interactive"] and not options["dry_run"]
        if asks and (options["json"] or not sys.stdin.isatty()):
            raise CommandError("there is no terminal for the confirmation: use --no-input, or --dry-run to look first")
        with self.reporting_errors():
            choice = Choice("stale", self.owner(options), options["older_than"], key=self.keys(options))
            kinds = self.kinds(options)
            if asks and not self._is_confirmed(kinds, choice, options):
                return
            if options["json"]:
                self._write_json(kinds, choice, options)
            else:
                for kind in kinds:
                    self._sweep(kind, choice, options, dry_run=options["dry_run"])
            self.report_failed()

    def _is_confirmed(self, kinds: list[LockKind], choice: Choice, options: dict[str, Any]) -> bool:
        found = [self._sweep(kind, choice, options, dry_run=True, asks=True) for kind in kinds]
        if not any(found) and not self.failed:
            self.stdout.write("There are no stale locks.")
            return False
        self.failed = {}
        if input("\nClear them? [y/N] ").strip().lower() in ("y", "yes"):
            return True
        self.stdout.write("Nothing was cleared.")
        return False

    def _sweep(
        self, kind: LockKind, choice: Choice, options: dict[str, Any], *, dry_run: bool, asks: bool = False
    ) -> int:
        """Clear the stale locks of a kind, or only show them; say what was done. Return how many there were.

        asks: the question comes next, and shows the first of them.
        """
        done = Swept()
        with self.noting_errors(kind):
            stale = self._stale(kind, choice, done, options, dry_run=dry_run)
            if dry_run:
                write_table(self.stdout, islice(stale, SHOWN if asks else None))
            deque(stale, maxlen=0)
        self.found_some |= options["dry_run"] and done.found > 0
        for row in done.damaged:
            self.stdout.write(printable(f"  {row.key}  not cleared: {row.damage}"))
        if asks and done.found:
            self.stdout.write(f"Stale {kind.title}: {done.found}.")
        elif done.found or (isinstance(kind, NamedLocks) and not asks):
            nothing = f"Stale {kind.title}: {done.found}. Nothing was cleared."
            text = f"Cleared {done.count} of {done.found} stale {kind.title}.{_left_over(done)}"
            self.stdout.write(nothing if dry_run else text)
        if done.dated:
            self.stdout.write(f"Of the {kind.title}, {done.dated} had no time stamp, which they got now.")
        return done.found

    def _write_json(self, kinds: list[LockKind], choice: Choice, options: dict[str, Any]) -> None:
        dry_run = options["dry_run"]
        self.stdout.write(f'{{"dry_run": {json.dumps(dry_run)}, "kinds": [', ending="")
        for number, kind in enumerate(kinds):
            self.stdout.write("," if number else "", ending="")
            done = Swept()
            stale = self._stale(kind, choice, done, options, dry_run=dry_run)
            self.write_json(kind, "stale", stale, partial(_facts, done))
            self.found_some |= dry_run and done.found > 0
        self.stdout.write("]}")

    def _stale(
        self, kind: LockKind, choice: Choice, done: Swept, options: dict[str, Any], *, dry_run: bool
    ) -> Iterator[Row]:
        """Find stale locks, part by part, and clear them unless it is a dry run. Add up in *done* what was done."""
        for part in kind.clear(choice, dry_run=dry_run, batch=options["batch_size"]):
            done.count_in(part)
            yield from part.cleared
            if options["verbosity"] >= 2 or (self.stderr.isatty() and time.monotonic() - self.reported > 1):
                self.reported = time.monotonic()
                self.stderr.write(f"{done.found} found, {done.count} cleared", str)


def _facts(done: Swept) -> dict[str, Any]:
    return {
        "found": done.found,
        "cleared": done.count,
        "postponed": done.postponed,
        "dated": done.dated,
        "damaged": [row.as_json() for row in done.damaged],
    }


def _left_over(done: Swept) -> str:
    """Why some locks were not cleared."""
    text = ""
    if done.postponed:
        text += f" {done.postponed} were written before a failover: their leases get their whole length again."
    if done.damaged:
        text += f" {len(done.damaged)} damaged documents were not changed."
    if (taken := done.found - done.count - done.postponed) > 0:
        text += f" {taken} had been renewed, acquired or released by then."
    return text
