"""``manage.py clear_stale_locks``: clears the locks that dead processes left behind."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...engine.rule.options import check_age
from ...engine.text_checks import check_fact
from ...exceptions import printable
from ...inspection.kinds import Choice, LockKind, Row, Swept
from ..lock_command import LockCommand, seconds, write_table

#: The number of locks that the confirmation shows.
SHOWN = 10
FOUND = 3


class Command(LockCommand):
    """A command that clears stale locks in batches."""

    help = """\
Clears stale locks: those whose lease has ended without a release, because their process died or hung.

Stale locks do no harm, since the next process that asks gets them; but they fill the list and hide new failures. The
server decides in the clearing update itself, according to its own clock: a lock that is renewed or acquired in the same
moment stays. The first waiter for a cleared lock gets it. Damaged documents are not changed. After a failover, a lock
is not cleared the first time: its lease gets its whole length again.

Stale document locks are cleared too: a document that was held for longer than its lock allows is set to the failed
state of that work, for a retry job. With --key only named locks are cleared, with --kind only that kind.
"""
    codes = """\
exit codes:
  0  the stale locks were cleared, or there was nothing to clear
  1  error: MongoDB cannot be reached, a setting is wrong, or there is no terminal (see --no-input)
  2  the command line is wrong
  3  --dry-run found stale locks
"""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="only show what would be cleared")
        parser.add_argument(
            "--older-than",
            type=seconds,
            default=0.0,
            metavar="TIME",
            help="only locks whose lease ended at least so long ago: seconds, or 5m, 2h, 1d",
        )
        parser.add_argument("--no-input", "--noinput", action="store_true", help="clear without a confirmation")
        self.add_kind(parser)
        super().add_arguments(parser)

    def handle(self, **options: Any) -> None:
        self.failed, self.options = {}, options
        dry_run = options["dry_run"]
        asks = not (options["no_input"] or dry_run)
        if asks and (options["json"] or not sys.stdin.isatty()):
            raise CommandError("there is no terminal for the confirmation: use --no-input, or --dry-run to look first")
        with self.reporting_errors():
            owner = check_fact("--owner", options["owner"])
            self.choice = Choice("stale", owner, check_age(options["older_than"]), key=self.keys(options))
            kinds = self.kinds(options)
            if asks and not self._is_confirmed(kinds):
                return
            if options["json"]:
                self.write_json("stale", kinds, partial(self._stale, dry_run=dry_run), dry_run=dry_run)
            else:
                found = [self._sweep(kind, dry_run=dry_run) for kind in kinds]
                if not any(found) and not self.failed:
                    self._say_none()
            self.report_failed()

    def _is_confirmed(self, kinds: list[LockKind]) -> bool:
        found = [self._sweep(kind, dry_run=True, asks=True) for kind in kinds]
        if not any(found) and not self.failed:
            self._say_none()
            return False
        self.failed = {}
        if input("\nClear them? [y/N] ").strip().lower() in ("y", "yes"):
            return True
        self.stdout.write("Nothing was cleared.")
        return False

    def _say_none(self) -> None:
        self.write_none("There are no stale locks.", self.options, "key", "owner", "older_than", "kind")

    def _sweep(self, kind: LockKind, *, dry_run: bool, asks: bool = False) -> int:
        """Clear the stale locks of a kind, or only show them. Report the result, and return the number found.

        - asks: whether the question comes next. Only the first locks are shown.
        """
        stale, facts = self._stale(kind, dry_run=dry_run)
        with self.noting_errors(kind):
            if dry_run:
                write_table(self.stdout, islice(stale, SHOWN if asks else None))
            deque(stale, maxlen=0)
        done = facts()
        for row in done["damaged"]:
            self.stdout.write(printable(f"  {row['key']}  not cleared: {row['damage']}"))
        found, title = done["found"], kind.title
        if asks and found:
            self.stdout.write(f"Stale {title}: {found}.")
        elif found:
            text = f"Cleared {done['cleared']} of {found} stale {title}.{_left_over(done)}"
            self.stdout.write(f"Stale {title}: {found}. Nothing was cleared." if dry_run else text)
        if done["dated"]:
            self.stdout.write(f"Of the {title}, {done['dated']} had no time stamp, which they got now.")
        return int(found)

    def _stale(self, kind: LockKind, *, dry_run: bool) -> tuple[Iterator[Row], Callable[[], dict[str, Any]]]:
        """Find stale locks in batches, and clear them unless it is a dry run. Return also a function that returns the
        result.
        """
        done = Swept()

        def rows() -> Iterator[Row]:
            for part in kind.clear(self.choice, dry_run=dry_run):
                done.count_in(part)
                if self.options["dry_run"] and done.found:
                    self.code = FOUND
                yield from part.cleared

        return rows(), lambda: {
            "found": done.found,
            "cleared": done.count,
            "postponed": done.postponed,
            "dated": done.dated,
            "damaged": [row.as_json() for row in done.damaged],
        }


def _left_over(done: dict[str, Any]) -> str:
    """Return the reasons why some locks were not cleared."""
    text = ""
    if done["postponed"]:
        text += f" {done['postponed']} were written before a failover: their leases get their whole length again."
    if done["damaged"]:
        text += f" {len(done['damaged'])} damaged documents were not changed."
    if (taken := done["found"] - done["cleared"] - done["postponed"]) > 0:
        text += f" {taken} had been renewed, acquired or released by then."
    return text
