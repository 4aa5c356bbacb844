"""``manage.py run_locked``: run any program under a lock."""

from __future__ import annotations

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...decorator.locked_command import BUSY, LOST, holding, terminated_as_exit
from ...engine.lock import MongoLock
from ...engine.text_checks import tidy_fact
from ...locks import mongo_lock
from ..child import Child
from ..lock_command import seconds
from ..plain_output import PlainCommand

HELP = """\
Runs a program under a lock, for cron jobs and scripts: manage.py run_locked nightly --wait 0 -- ./import.sh -v

The lock is renewed while the program runs, and released when it ends. If the lock is lost, because MongoDB did not
answer for a whole lease or the release was forced, the program is stopped: SIGTERM, and SIGKILL after the grace period.
The program finds MONGOLOCK_KEY and MONGOLOCK_FENCING_TOKEN in its environment.
"""

CODES = """\
exit codes:
  the program's own; 128 plus the number of the signal, if a signal ended it
    1  a setting is wrong
    2  the command line is wrong
   69  MongoDB cannot be reached
   75  another process holds the lock (EX_TEMPFAIL: try again later); 0 with --on-contention skip
   76  the lock was lost and the program was stopped
  126  the program cannot be run
  127  the program does not exist
"""


class Command(PlainCommand):
    """Runs a program under a lock."""

    help = HELP
    codes = CODES
    #: For the shell: other commands report what is wrong with the project.
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django wants it
    #: The program's exit code, for `run_from_argv`.
    code = 0

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=self.codes, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        parse = parser.parse_args

        def parse_args(args: Sequence[str], namespace: Namespace | None = None) -> Namespace:
            """Leave the program's arguments alone: argparse would drop each `--` among them."""
            at = list(args).index("--") if "--" in args else None
            if at is None and not {"-h", "--help", "--version"}.intersection(args):
                parser.error(f"put -- between the key and the program: {subcommand} KEY -- PROGRAM …")
            options = parse(args[: at + 2] if at is not None else args, namespace)
            options.program = list(args[at + 1 :]) if at is not None else []
            return options

        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("lock", metavar="KEY", help="the key, without MONGOLOCK['KEY_PREFIX']")
        parser.add_argument("program", nargs="+", metavar="-- PROGRAM", help="what to run, with its arguments")
        parser.add_argument(
            "--lease", type=seconds, metavar="TIME", help="how long the lock stays held if this process dies"
        )
        parser.add_argument(
            "--wait", type=seconds, default=0.0, metavar="TIME", help="how long to wait for the lock (default: 0)"
        )
        parser.add_argument(
            "--on-contention",
            choices=("fail", "skip"),
            default="fail",
            help="if the lock is busy: exit with 75, or with 0",
        )
        parser.add_argument(
            "--max-hold", type=seconds, metavar="TIME", help="stop the program after this time, in case it hangs"
        )
        parser.add_argument("--shared", action="store_true", help="a shared lock, for programs that only read")
        parser.add_argument(
            "--grace",
            type=seconds,
            default=10.0,
            metavar="TIME",
            help="between SIGTERM and SIGKILL, if the lock is lost (default: 10)",
        )
        parser.add_argument(
            "--label", help="a note for people who look at the locks (default: the name of the program)"
        )
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with the code of the program; `call_command` returns it as text."""
        super().run_from_argv(argv)
        if self.code:
            sys.exit(self.code)

    def handle(self, **options: Any) -> None:
        child = Child(options["program"], options["grace"])
        with terminated_as_exit():
            lock = self._lock(options, child)
            try:
                with holding(lock):
                    self.code = child.run(lock)
            except CommandError as error:
                if error.returncode == LOST:
                    self.code = LOST
                if error.returncode != BUSY or options["on_contention"] != "skip":
                    raise
                self.stdout.write(f"Skipped: {error}")

    def _lock(self, options: dict[str, Any], child: Child) -> MongoLock:
        try:
            return mongo_lock(
                options["lock"],
                lease=options["lease"],
                wait=options["wait"],
                mode="shared" if options["shared"] else "exclusive",
                max_hold=options["max_hold"],
                label=options["label"] or tidy_fact(Path(options["program"][0]).name or "program"),
                using=options["database"],
                on_lost=child.stop,
            )
        except (ValueError, TypeError) as error:
            raise CommandError(str(error), returncode=2) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
