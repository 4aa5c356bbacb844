"""``manage.py clear_stale_locks``: free what dead processes left behind."""

from __future__ import annotations

import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...conf import get_settings
from ...engine.store import MongoStore
from ...inspect.operations import Which, clear_stale, find_stale
from ...inspect.snapshot import Seen, State, count
from ...signals import send, stale_locks_cleared
from ..document_locks import Report, Sweeper
from ..lock_command import LockCommand, as_row, positive, seconds, write_json, write_table

#: How many locks the question shows.
FIRST = 10
FOUND = 3

HELP = """\
Clears stale locks: those whose lease is over and that nobody released, since their process died or hung.

They do no harm, for the next who asks for one gets it; but they fill the list, and tell of deaths. The server decides
in the clearing update itself, by its own clock: a lock that is renewed or taken in the same moment stays. Whoever waits
for a cleared lock gets it. Damaged documents stay as they are, and so does, once, a lock that was written before
a failover: its lease is given its whole length once more.

Document locks are swept as well: a document that somebody has held for longer than its lock allows is set to the failed
state of that work, for a retry job to take. --key leaves documents alone, --document-lock the named locks.
"""

CODES = """\
exit codes:
  0  the stale locks were cleared, or there was nothing to clear
  1  error: MongoDB cannot be reached, a setting or a pattern is wrong, or nobody can be asked (see --no-input)
  2  the command line cannot be understood
  3  --dry-run found stale locks
"""


@dataclass
class Tally:
    """What was found and done."""

    found: int = 0
    cleared: int = 0
    postponed: int = 0
    damaged: int = 0


class Command(LockCommand):
    """Clears stale locks, in batches."""

    help = HELP
    #: Did a dry run find something?
    found_some = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=CODES, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="only tell what would be cleared")
        parser.add_argument(
            "--older-than",
            type=seconds,
            default=0.0,
            metavar="TIME",
            help="only locks whose lease has been over for so long: seconds, or 5m, 2h, 1d",
        )
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="clear without asking"
        )
        parser.add_argument(
            "--batch-size", type=positive, default=1_000, metavar="NUMBER", help="locks in one update (default: 1000)"
        )
        parser.add_argument(
            "--document-lock",
            action="append",
            default=[],
            metavar="NAME",
            help="only the documents of this DocumentLock (may be repeated)",
        )
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """The exit code is for the shell; `call_command` just returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        asks = options["interactive"] and not options["dry_run"]
        if asks and (options["json"] or not sys.stdin.isatty()):
            raise CommandError("nobody can be asked whether to clear them: use --no-input, or --dry-run to look first")
        with self.telling_errors():
            which = Which(self.keys(options), self.owner(options), options["older_than"])
            sweeper = Sweeper(options)
            store = None if options["document_lock"] else self.store(options)
            if not asks or self._is_confirmed(store, which, sweeper):
                self._run(store, which, sweeper, options)

    def _is_confirmed(self, store: MongoStore | None, which: Which, sweeper: Sweeper) -> bool:
        first = list(find_stale(store, which, limit=FIRST)) if store else []
        reports = [report for report in map(sweeper.look, sweeper.locks) if report.stale or report.error]
        if not first and not reports:
            self.stdout.write("There are no stale locks.")
            return False
        if store and first:
            total = count(store, which.query())
            self.stdout.write(f"Stale locks: {total}.\n")
            write_table(self.stdout, map(as_row, first))
            if total > len(first):
                self.stdout.write("…")
        for report in reports:
            report.write(self.stdout, FIRST)
        if input("\nClear them? [y/N] ").strip().lower() in ("y", "yes"):
            return True
        self.stdout.write("Nothing was cleared.")
        return False

    def _run(self, store: MongoStore | None, which: Which, sweeper: Sweeper, options: dict[str, Any]) -> None:
        tally, reports = Tally(), list[Report]()
        locks = self._work(store, which, options, tally) if store else iter(())

        def rest() -> dict[str, Any]:
            reports.extend(sweeper.work())
            return asdict(tally) | {"dry_run": options["dry_run"], "documents": [r.as_json() for r in reports]}

        if options["json"]:
            write_json(self.stdout, "stale", locks, rest)
        else:
            self._write_locks(locks, tally, dry_run=options["dry_run"], named=store is not None)
            reports.extend(sweeper.work())
            for report in reports:
                report.write(self.stdout)
        self.found_some = options["dry_run"] and (tally.found > 0 or any(report.stale for report in reports))
        if failed := [f"{report.name}: {report.error}" for report in reports if report.error]:
            raise CommandError(f"not all documents were looked at: {'; '.join(failed)}")

    def _write_locks(self, locks: Iterator[Seen], tally: Tally, *, dry_run: bool, named: bool) -> None:
        if not named:
            return
        if dry_run:
            write_table(self.stdout, map(as_row, locks))
            self.stdout.write(f"Stale locks: {tally.found}. Nothing was cleared.")
        else:
            deque(locks, maxlen=0)
            self.stdout.write(f"Cleared {tally.cleared} of {tally.found} stale locks.{_left_over(tally)}")

    def _work(self, store: MongoStore, which: Which, options: dict[str, Any], tally: Tally) -> Iterator[Seen]:
        """Find stale locks, batch by batch, and clear them unless it is a dry run."""
        told = time.monotonic()
        for batch in _batches(find_stale(store, which), options["batch_size"]):
            stale = [seen for seen in batch if seen.state is not State.DAMAGED]
            tally.found += len(stale)
            tally.damaged += len(batch) - len(stale)
            if stale and not options["dry_run"]:
                done = clear_stale(store, [seen.key for seen in stale], which)
                tally.cleared += done.cleared
                tally.postponed += done.postponed
                if done.cleared:
                    using = options["database"] or get_settings().DATABASE
                    send(stale_locks_cleared, count=done.cleared, using=using)
            yield from stale
            if options["verbosity"] >= 2 or (self.stderr.isatty() and time.monotonic() - told > 1):
                told = time.monotonic()
                self.stderr.write(f"{tally.found} found, {tally.cleared} cleared", str)


def _batches(found: Iterator[Seen], size: int) -> Iterator[list[Seen]]:
    while batch := list(islice(found, size)):
        yield batch


def _left_over(tally: Tally) -> str:
    """Why some were left."""
    text = ""
    if tally.postponed:
        text += f" {tally.postponed} were written before a failover and keep their lease once more."
    if tally.damaged:
        text += f" {tally.damaged} damaged documents were left as they are: see list_locks --stale."
    if taken := tally.found - tally.cleared - tally.postponed:
        text += f" {taken} had been renewed, taken or released by then."
    return text
