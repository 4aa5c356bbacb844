"""``manage.py clear_stale_locks``: clears the locks that dead processes left behind."""

from __future__ import annotations

import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...conf import get_settings
from ...engine.store.mongo import MongoStore
from ...inspection.kinds import LockKind
from ...inspection.operations import Cleared, Which, clear_all_stale, find_stale
from ...inspection.queries import count
from ...inspection.snapshot import LockSnapshot
from ...signals import send, stale_locks_cleared
from ..kinds import Report, chosen_kinds, process
from ..lock_command import LockCommand, add_document_lock, seconds, whole_number, write_json, write_locks

Documents = list[LockKind]

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
state of that work, for a retry job. With --key no document is cleared, with --document-lock no named lock.
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
        add_document_lock(parser)
        super().add_arguments(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with a code for the shell; `call_command` returns."""
        super().run_from_argv(argv)
        if self.found_some:
            sys.exit(FOUND)

    def handle(self, **options: Any) -> None:
        asks = options["interactive"] and not options["dry_run"]
        if asks and (options["json"] or not sys.stdin.isatty()):
            raise CommandError("there is no terminal for the confirmation: use --no-input, or --dry-run to look first")
        with self.reporting_errors():
            which = Which(self.keys(options), self.owner(options), options["older_than"])
            documents = list(chosen_kinds(options))
            store = None if options["document_lock"] else self.store(options)
            if not asks or self._is_confirmed(store, which, documents, options):
                self._run(store, which, documents, options)

    def _is_confirmed(
        self, store: MongoStore | None, which: Which, documents: Documents, options: dict[str, Any]
    ) -> bool:
        first = list(find_stale(store, which, limit=SHOWN)) if store else []
        reports = [process(kind, options, dry_run=True) for kind in documents]
        reports = [report for report in reports if report.stale or report.error]
        if not first and not reports:
            self.stdout.write("There are no stale locks.")
            return False
        if store and first:
            total = count(store, which.query())
            self.stdout.write(f"Stale locks: {total}.\n")
            write_locks(self.stdout, first)
            if total > len(first):
                self.stdout.write("…")
        for report in reports:
            report.write(self.stdout, SHOWN)
        if input("\nClear them? [y/N] ").strip().lower() in ("y", "yes"):
            return True
        self.stdout.write("Nothing was cleared.")
        return False

    def _run(self, store: MongoStore | None, which: Which, documents: Documents, options: dict[str, Any]) -> None:
        self.cleared = Cleared()
        dry_run, reports = options["dry_run"], list[Report]()
        locks = self._work(store, which, options) if store else iter(())

        def rest() -> dict[str, Any]:
            reports.extend(process(kind, options, dry_run=dry_run) for kind in documents)
            return asdict(self.cleared) | {"dry_run": dry_run, "documents": [report.as_json() for report in reports]}

        if options["json"]:
            write_json(self.stdout, "stale", locks, rest)
        else:
            if store:
                self._write_locks(locks, dry_run=dry_run)
            for kind in documents:
                reports.append(process(kind, options, dry_run=dry_run))
                reports[-1].write(self.stdout)
        self.found_some = dry_run and (self.cleared.found > 0 or any(report.stale for report in reports))
        if failed := [f"{report.name}: {report.error}" for report in reports if report.error]:
            raise CommandError(f"some documents could not be read: {'; '.join(failed)}")

    def _write_locks(self, locks: Iterator[LockSnapshot], *, dry_run: bool) -> None:
        if dry_run:
            write_locks(self.stdout, locks)
            self.stdout.write(f"Stale locks: {self.cleared.found}. Nothing was cleared.")
        else:
            deque(locks, maxlen=0)
            done = self.cleared
            self.stdout.write(f"Cleared {done.cleared} of {done.found} stale locks.{_left_over(done)}")

    def _work(self, store: MongoStore, which: Which, options: dict[str, Any]) -> Iterator[LockSnapshot]:
        """Find stale locks, batch by batch, and clear them unless it is a dry run."""
        reported = time.monotonic()
        for stale, done in clear_all_stale(store, which, options["batch_size"], dry_run=options["dry_run"]):
            self.cleared += done
            if done.cleared:
                send(stale_locks_cleared, count=done.cleared, using=options["database"] or get_settings().DATABASE)
            yield from stale
            if options["verbosity"] >= 2 or (self.stderr.isatty() and time.monotonic() - reported > 1):
                reported = time.monotonic()
                self.stderr.write(f"{self.cleared.found} found, {self.cleared.cleared} cleared", str)


def _left_over(done: Cleared) -> str:
    """Why some locks were not cleared."""
    text = ""
    if done.postponed:
        text += f" {done.postponed} were written before a failover: their leases get their whole length again."
    if done.damaged:
        text += f" {done.damaged} damaged documents were not changed: see list_locks --stale."
    if taken := done.found - done.cleared - done.postponed:
        text += f" {taken} had been renewed, acquired or released by then."
    return text
