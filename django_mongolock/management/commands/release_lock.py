"""``manage.py release_lock``: take one lock from its holder, or ask its holder to release it."""

from __future__ import annotations

import getpass
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...conf import get_settings
from ...engine.text_checks import check_fact, check_key
from ...models import Lock
from ..lock_command import LockCommand, as_row, write_table

FREE = 3


class Command(LockCommand):
    """Takes a lock from its holder, or asks for its release."""

    help = (
        "Takes a lock from its present holders. They learn of the loss at their next renewal; what they do until then "
        "is only stopped where fencing tokens are compared. So ask first: --ask only requests the release. "
        "Exit codes: 0 released, or asked; 1 error; 3 the lock is not held."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("lock", metavar="KEY", help="the whole key, with or without MONGOLOCK['KEY_PREFIX']")
        parser.add_argument("--ask", action="store_true", help="only ask the holders to release it")
        parser.add_argument(
            "--by", metavar="TEXT", default="", help="who releases it, or asks (default: your login name)"
        )
        parser.add_argument(
            "--reason", metavar="TEXT", default="", help="the reason, for the holder, the log and the history"
        )
        parser.add_argument("--token", type=int, metavar="NUMBER", help="only the holder with this fencing token")
        parser.add_argument("--no-input", action="store_true", help="do not ask for confirmation")
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    def handle(self, **options: Any) -> None:
        by = self._text("--by", options["by"]) or f"{getpass.getuser()}, with release_lock"
        reason = self._text("--reason", options["reason"])
        with self.reporting_errors():
            self.store(options)
            lock = self._find(options)
            if options["ask"]:
                self._ask(lock, options["token"], by, reason)
            else:
                self._take(lock, options["token"], by, reason, ask=not options["no_input"])

    def _text(self, option: str, value: str) -> str:
        try:
            return check_fact(option, value or None) or ""
        except ValueError as error:
            raise CommandError(str(error)) from error

    def _find(self, options: dict[str, Any]) -> Lock:
        prefix, name, token = get_settings().KEY_PREFIX, options["lock"], options["token"]
        try:
            key = check_key(name, "" if name.startswith(prefix) else prefix)
        except ValueError as error:
            raise CommandError(str(error)) from error
        locks = Lock.objects.using(options["database"] or get_settings().DATABASE).held()
        lock: Lock | None = locks.filter(pk=key).first()
        if lock is None:
            raise CommandError(f"{key!r} is not held now", returncode=FREE)
        if token is not None and token not in [holder.token for holder in lock.holders]:
            raise CommandError(f"{key!r} is not held with fencing token {token} now", returncode=FREE)
        return lock

    def _ask(self, lock: Lock, token: int | None, by: str, reason: str) -> None:
        try:
            count = lock.ask_to_release(f"{by}: {reason}" if reason else by, token=token)
        except ValueError as error:
            raise CommandError(f"--by and --reason: {error}") from error
        self.stdout.write(f"{lock.key!r}: {count} asked. A holder learns of the request at its next renewal.")

    def _take(self, lock: Lock, token: int | None, by: str, reason: str, *, ask: bool) -> None:
        if ask:
            self._confirm(lock)
        if not lock.force_release(token=token, by=by, reason=reason):
            raise CommandError(f"{lock.key!r} is held by another holder now, or by none", returncode=FREE)
        self.stdout.write(f"{lock.key!r} was taken from its holder.")

    def _confirm(self, lock: Lock) -> None:
        if not sys.stdin.isatty():
            raise CommandError("there is no terminal for the confirmation: use --no-input to release without it")
        locks = Lock.objects.using(lock._state.db).filter(pk=lock.pk)
        write_table(self.stdout, map(as_row, locks.snapshots(limit=1)))
        if input("Take this lock from its holder? [y/N] ").strip().lower() not in ("y", "yes"):
            raise CommandError("nothing was released")
