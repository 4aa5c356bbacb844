"""``manage.py release_lock``: take a lock, a document or all of an owner from its holder, or ask for a release."""

from __future__ import annotations

import getpass
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError
from django.db.models.functions import Now

from ...conf import get_settings
from ...engine.text_checks import check_fact, check_key
from ...inspection.kinds import Choice, LockKind, Row
from ...inspection.operations import find_held
from ...inspection.patterns import starting
from ...models import Lock, LockQuerySet
from ..kinds import TITLES as DOCUMENT_TITLES
from ..kinds import as_row as as_document_row
from ..kinds import chosen_kinds, find_row
from ..lock_command import LockCommand, add_document_lock, write_locks, write_table

FREE = 3
#: How many locks, and how many documents of each lock, the confirmation shows.
SHOWN = 20

Documents = list[tuple[LockKind, list[Row]]]


class Command(LockCommand):
    """Takes locks or documents from their holder, or asks for the release of a lock."""

    help = (
        "Takes a lock from its present holders. They learn of the loss at their next renewal; what they do until then "
        "is only stopped where fencing tokens are compared. So ask first: --ask only requests the release. "
        "With --document-lock it takes a document from its holder, and sets the failed state of its work. With --owner "
        "it takes all locks and documents of an owner. "
        "Exit codes: 0 released, or asked; 1 error, or you answered no; 2 the command line is wrong; 3 not held."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "lock",
            nargs="?",
            metavar="KEY",
            help="the whole key, with or without MONGOLOCK['KEY_PREFIX']; with --document-lock: the id of the document",
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
        add_document_lock(parser)
        parser.add_argument("--no-input", action="store_true", help="do not ask for confirmation")
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    def handle(self, **options: Any) -> None:
        self._check(options)
        self.by = self._text("--by", options["by"]) or f"{getpass.getuser()}, with release_lock"
        self.reason = self._text("--reason", options["reason"])
        ask = not options["no_input"]
        with self.reporting_errors():
            if (owner := self.owner(options)) is not None:
                self._take_owner(owner, options, ask=ask)
            elif options["document_lock"]:
                self._take_document(options, ask=ask)
            else:
                with self.store(options).bounded(get_settings().COMMAND_TIMEOUT):
                    lock = self._find(options)
                if options["ask"]:
                    self._ask(lock, options["token"])
                else:
                    self._take(lock, options["token"], ask=ask)

    def _check(self, options: dict[str, Any]) -> None:
        """Raise CommandError for options that do not go together."""
        if (options["lock"] is None) == (options["owner"] is None):
            raise CommandError("name either the KEY of a lock, or --owner", returncode=2)
        if options["lock"] is not None and len(options["document_lock"]) > 1:
            raise CommandError("one document is of one --document-lock", returncode=2)
        if (options["owner"] is not None or options["document_lock"]) and (options["ask"] or options["token"]):
            raise CommandError("--ask and --token are for the KEY of a lock", returncode=2)

    def _text(self, option: str, value: str) -> str:
        try:
            return check_fact(option, value or None) or ""
        except ValueError as error:
            raise CommandError(str(error), returncode=2) from error

    # One lock

    def _find(self, options: dict[str, Any]) -> Lock:
        prefix, name, token = get_settings().KEY_PREFIX, options["lock"], options["token"]
        try:
            key = check_key(name, "" if name.startswith(prefix) else prefix)
        except ValueError as error:
            raise CommandError(str(error), returncode=2) from error
        try:
            lock: Lock | None = self._locks(options).leased().filter(pk=key, expires_at__gt=Now()).first()
        except DatabaseError as error:  # it has no text; the driver's error is translated
            raise (error.__cause__ or error) from None
        if lock is None:
            raise CommandError(f"{key!r} is not held now", returncode=FREE)
        if lock.is_kept and options["ask"]:
            raise CommandError(f"{key!r} is only kept for its minimum hold: there is no holder to ask", returncode=FREE)
        if token is not None and token not in [holder.token for holder in lock.holders]:
            raise CommandError(f"{key!r} is not held with fencing token {token} now", returncode=FREE)
        return lock

    def _locks(self, options: dict[str, Any]) -> LockQuerySet:
        locks: LockQuerySet = Lock.objects.using(options["database"] or get_settings().DATABASE)
        return locks

    def _ask(self, lock: Lock, token: int | None) -> None:
        try:
            count = lock.ask_to_release(f"{self.by}: {self.reason}" if self.reason else self.by, token=token)
        except ValueError as error:
            raise CommandError(f"--by and --reason: {error}", returncode=2) from error
        self.stdout.write(f"{lock.key!r}: {count} asked. A holder learns of the request at its next renewal.")

    def _take(self, lock: Lock, token: int | None, *, ask: bool) -> None:
        if ask:
            self._check_terminal()
            locks = Lock.objects.using(lock._state.db).filter(pk=lock.pk)
            write_locks(self.stdout, locks.snapshots(limit=1))
            self._confirm(
                "Its work is done. Free this lock, so that the job can run again?"
                if lock.is_kept
                else "Take this lock from its holder?"
            )
        if not lock.force_release(token=token, by=self.by, reason=self.reason):
            raise CommandError(f"{lock.key!r} is held by another holder now, or by none", returncode=FREE)
        self.stdout.write(f"{lock.key!r} {'is free' if lock.is_kept else 'was taken from its holder'}.")

    # Documents, and all of an owner

    def _take_document(self, options: dict[str, Any], *, ask: bool) -> None:
        (lock,) = chosen_kinds({**options, "key": None})
        document = find_row(lock, options["lock"])
        if document is None:
            raise CommandError(f"no document {options['lock']!r} of {lock.name} is held now", returncode=FREE)
        self._take_documents([(lock, [document])], ask=ask)

    def _take_owner(self, owner: str, options: dict[str, Any], *, ask: bool) -> None:
        locks: list[Lock] = []
        if not options["document_lock"]:
            prefix, queryset = starting(get_settings().KEY_PREFIX), self._locks(options)
            held = find_held(self.store(options), "owner", owner, prefix.query(), get_settings().COMMAND_TIMEOUT)
            locks = [Lock.of_holders(key, holders, queryset.db) for key, holders in held.items()]
            if locks and ask:
                self._check_terminal()
                write_locks(self.stdout, queryset.matching(prefix).owned_by(owner).snapshots(limit=SHOWN))
                self._say_rest(len(locks))
        documents = [(lock, lock.rows(Choice(owner=owner))) for lock in chosen_kinds({**options, "key": None})]
        documents = [(lock, found) for lock, found in documents if found]
        if not locks and not documents:
            raise CommandError(f"the owner {owner!r} holds nothing now", returncode=FREE)
        self._take_documents(documents, ask=ask, more=bool(locks))
        if locks:
            taken = sum(lock.force_release(owner, by=self.by, reason=self.reason) for lock in locks)
            self.stdout.write(f"{taken} of {len(locks)} locks were taken from their holder.")

    def _take_documents(self, documents: Documents, *, ask: bool, more: bool = False) -> None:
        if ask:
            self._check_terminal()
            for lock, found in documents:
                self.stdout.write(f"\nDocuments of {lock.name}:")
                write_table(self.stdout, map(as_document_row, found[:SHOWN]), DOCUMENT_TITLES)
                self._say_rest(len(found))
            self._confirm("Take these from their holder?")
        for lock, found in documents:
            taken = lock.force(found, by=self.by, reason=self.reason)
            self.stdout.write(f"{len(taken)} of {len(found)} documents of {lock.name} were taken from their holder.")
            if not taken and not more:
                raise CommandError("they have other holders now, or none", returncode=FREE)

    def _say_rest(self, count: int) -> None:
        if count > SHOWN:
            self.stdout.write(f"… and {count - SHOWN} more.")

    def _check_terminal(self) -> None:
        if not sys.stdin.isatty():
            raise CommandError("there is no terminal for the confirmation: use --no-input to release without it")

    def _confirm(self, question: str) -> None:
        if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            raise CommandError("nothing was released")
