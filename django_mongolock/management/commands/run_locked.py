"""``manage.py run_locked``: run any program under a lock."""

from __future__ import annotations

import threading
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...decorator.locked_command import BUSY, holding, sigterm_as_exit
from ...locks import mongo_lock
from ..lock_command import seconds
from ..program_command import Child, ProgramCommand


class Command(ProgramCommand):
    """A command that runs a program under a lock."""

    help = """\
Runs a program under a lock, for cron jobs and scripts: manage.py run_locked nightly --wait 0 -- ./import.sh -v

The lock is renewed while the program runs, and released when it ends. If the lock is lost, because MongoDB did not
answer for a whole lease or the release was forced, the program is stopped: SIGTERM, and SIGKILL after the grace period.
The program finds MONGOLOCK_KEY and MONGOLOCK_FENCING_TOKEN in its environment.
"""
    codes = """\
exit codes:
  the program's own; 128 plus the number of the signal, if a signal ended it
    1  a setting is wrong
    2  the command line is wrong
   69  MongoDB cannot be reached, or the document of the lock is damaged
   75  another process holds the lock (EX_TEMPFAIL: try again later); 0 with --on-contention skip
   76  the lock was lost and the program was stopped
  126  the program cannot be run
  127  the program does not exist
"""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
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

    def handle(self, **options: Any) -> None:
        over = threading.Event()
        child = Child(options["program"], lambda: options["grace"])
        with sigterm_as_exit():
            with self.reporting_errors():
                lock = mongo_lock(
                    options["lock"],
                    lease=options["lease"],
                    wait=options["wait"],
                    mode="shared" if options["shared"] else "exclusive",
                    max_hold=options["max_hold"],
                    label=self.label(options),
                    using=options["database"],
                    on_lost=lambda _: over.set(),
                )
            try:
                with holding(lock):
                    self.code = child.run(lock, over)
            except CommandError as error:
                if error.returncode != BUSY or options["on_contention"] != "skip":
                    raise
                self.stdout.write(f"Skipped: {error}")
            finally:
                over.set()
