"""``manage.py release_lock``: take a lock of any kind, or all of an owner, from its holder, or ask for a release."""

from __future__ import annotations

import getpass
import os
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...engine.text_checks import check_fact, tidy_fact
from ...inspection.kinds import Choice, LockKind, Row
from ...inspection.named_locks import NamedLocks
from ...inspection.snapshot import ShownState
from ..lock_command import LockCommand

FREE = 3
#: The number of locks of each kind that the confirmation shows.
SHOWN = 20

Found = list[tuple[LockKind, list[Row]]]


class Command(LockCommand):
    """A command that takes locks from their holder, or asks for the release of one."""

    help = (
        "Takes a lock from its present holders. They learn of the loss at their next renewal; what they do until then "
        "is only stopped where fencing tokens are compared. So ask first: --ask only requests the release. "
        "With --kind it takes a document from its holder, and sets the failed state of its work. With --owner it takes "
        "the locks of every kind from an owner. "
        "Exit codes: 0 released, or asked; 1 error, or you answered no; 2 the command line is wrong; 3 not held."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "lock",
            nargs="?",
            metavar="KEY",
            help="the whole key, with or without MONGOLOCK['KEY_PREFIX']; with --kind: the id of the document",
        )
        parser.add_argument("--ask", action="store_true", help="only ask the holders to release it")
        parser.add_argument(
            "--by", metavar="TEXT", default="", help="who releases it, or asks (default: your login name)"
        )
        parser.add_argument(
            "--reason", metavar="TEXT", default="", help="the reason, for the holder, the log and the history"
        )
        parser.add_argument("--token", type=int, metavar="NUMBER", help="only the holder with this fencing token")
        parser.add_argument("--owner", metavar="OWNER", help="instead of KEY: all that this owner holds")
        self.add_kind(parser)
        parser.add_argument("--no-input", action="store_true", help="do not ask for confirmation")

    def handle(self, **options: Any) -> None:
        self._check(options)
        with self.reporting_errors():
            self.by = check_fact("--by", options["by"] or None) or f"{_login_name()}, with release_lock"
            self.reason = check_fact("--reason", options["reason"] or None) or ""
            found = self._of_owner(options) if options["lock"] is None else self._of_key(options)
            if options["ask"]:
                self._ask(found, NamedLocks(options["database"]))
            else:
                self._take(found, asks=not options["no_input"])

    def _check(self, options: dict[str, Any]) -> None:
        """Raise CommandError for options that do not go together."""
        if (options["lock"] is None) == (options["owner"] is None):
            raise CommandError("name either the KEY of a lock, or --owner", returncode=2)
        if options["lock"] is not None and len(options["kind"]) > 1:
            raise CommandError("one lock is of one --kind", returncode=2)
        if (options["owner"] is not None or options["kind"]) and (options["ask"] or options["token"] is not None):
            raise CommandError("--ask and --token are for the KEY of a lock", returncode=2)

    def _of_key(self, options: dict[str, Any]) -> Found:
        """Return the lock of that key. Raises CommandError if it is not held, or if several locks match."""
        kind = self.kinds({**options, "kind": options["kind"] or [NamedLocks.name]})[0]
        ids = kind.ids(options["lock"])
        states = [state for state in kind.taken if not options["ask"] or state is not ShownState.KEPT]
        found = list(kind.rows(Choice(ids=ids)))
        if damage := next((row.damage for row in found if row.damage), None):
            raise CommandError(f"{ids[0]!r} cannot be released: {damage}")
        rows = [row for row in found if row.state in states]
        if not rows:
            raise CommandError(_not_held(kind, ids, options["lock"], found), returncode=FREE)
        if len(rows) > 1:
            types = ", ".join(type(row.key).__name__ for row in rows)
            text = f"several {kind.title} have the id {options['lock']} ({types}): use force_release()"
            raise CommandError(text)
        if (token := options["token"]) is None:
            return [(kind, rows)]
        if not (again := kind.again([(rows[0].key, [token])])):
            raise CommandError(f"{ids[0]!r} is not held with fencing token {token} now", returncode=FREE)
        return [(kind, list(again))]

    def _of_owner(self, options: dict[str, Any]) -> Found:
        """Return all locks of an owner. Raises CommandError if the owner holds nothing."""
        owner = check_fact("--owner", options["owner"])
        found = [(kind, list(kind.rows(Choice(owner=owner)))) for kind in self.kinds(options)]
        found = [(kind, rows) for kind, rows in found if rows]
        if not found:
            raise CommandError(f"the owner {owner!r} holds nothing now", returncode=FREE)
        return found

    def _ask(self, found: Found, locks: NamedLocks) -> None:
        requested_by = tidy_fact(f"{self.by}: {self.reason}" if self.reason else self.by)
        ((_kind, (row,)),) = found  # see _check()
        count = locks.ask(row, requested_by, by=self.by, reason=self.reason)
        self.stdout.write(f"{row.key!r}: {count} asked. A holder learns of the request at its next renewal.")

    def _take(self, found: Found, *, asks: bool) -> None:
        if asks:
            if not sys.stdin.isatty():
                raise CommandError("there is no terminal for the confirmation: use --no-input to release without it")
            for kind, rows in found:
                self.write_rows(kind, rows[:SHOWN])
                if len(rows) > SHOWN:
                    self.stdout.write(f"… and {len(rows) - SHOWN} more.")
            kept = all(row.state is ShownState.KEPT for _kind, rows in found for row in rows)
            question = "Take these from their holder?"
            if kept:
                question = "Their work is done. Free them, so that the jobs can run again?"
            if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
                raise CommandError("nothing was released")
        taken = 0
        for kind, rows in found:
            done = len(kind.force(rows, by=self.by, reason=self.reason))
            one = f"{str(rows[0].key)!r} was taken from its holder."
            some = f"{done} of {len(rows)} {kind.title} were taken from their holders."
            self.stdout.write(one if done == len(rows) == 1 else some)
            taken += done
        if not taken:
            raise CommandError("they have other holders now, or none", returncode=FREE)


def _not_held(kind: LockKind, ids: list[Any], text: str, found: list[Row]) -> str:
    """Return the reason why there is nothing to release."""
    named = repr(ids[0] if ids else text)
    if found:
        return f"{named} is not held now"
    if isinstance(kind, NamedLocks):
        return f"no lock has the key {named}: see list_locks --all. A lock that is not used for a while is deleted"
    return f"no held lock of the kind {kind.name} has the id {named}: see list_locks --kind {kind.name}"


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in many containers, the user has a number only
        return f"user {os.getuid()}"
