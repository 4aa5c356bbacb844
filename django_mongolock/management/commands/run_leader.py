"""``manage.py run_leader``: run a program on the one process that leads."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from ...decorator.locked_command import UNAVAILABLE, sigterm_as_exit
from ...exceptions import LockBackendFailed, LockDocumentDamaged
from ...leaders import Term, leader
from ..program_command import Child, ProgramCommand


class Command(ProgramCommand):
    """A command that runs a program on the one process that leads."""

    help = """\
Runs a program on one of many servers: manage.py run_leader scheduler -- celery -A shop beat

It waits to be elected, and runs the program for as long as it leads. If the lock is in danger, because it was not
renewed for two thirds of a lease, or if a release is requested, the program is stopped before another process can lead,
and this one stands for election again. When the program ends by itself, so does this command, with its exit code, and
another process leads. On Linux the program is killed when this command is. It finds MONGOLOCK_KEY and
MONGOLOCK_FENCING_TOKEN in its environment. On stderr it says when it waits, leads, and leads no more (not with
--verbosity 0).
"""
    codes = """\
exit codes:
  the program's own; 128 plus the number of the signal, if a signal ended it
    1  a setting is wrong
    2  the command line is wrong
   69  MongoDB refuses the commands, or the document of the lock is damaged
  126  the program cannot be run
  127  the program does not exist
"""

    def handle(self, **options: Any) -> None:
        def say(text: str) -> None:
            if options["verbosity"]:
                self.stderr.write(f"run_leader {options['lock']}: {text}", str)

        def work(term: Term) -> int:
            say(f"leads, with fencing token {term.fencing_token}")
            child = Child(options["program"], lambda: min(options["grace"], term.lock.remaining * 0.8), tied=True)
            code = child.run(term, term.ended)
            say("leads no more")
            if child.was_asked_to_end:
                raise SystemExit(code)
            if not term.held:
                say("waits to be elected again")
            return code

        with sigterm_as_exit(), self.reporting_errors():
            candidate = leader(
                options["lock"],
                lease=options["lease"],
                label=self.label(options),
                using=options["database"],
            )
            say("waits to be elected")
            try:
                self.code = candidate.run(work)
            except (LockBackendFailed, LockDocumentDamaged) as error:
                raise CommandError(str(error), returncode=UNAVAILABLE) from error
