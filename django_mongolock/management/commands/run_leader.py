"""``manage.py run_leader``: run a program on the one process that leads."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...decorator.locked_command import UNAVAILABLE, terminated_as_exit
from ...exceptions import LockBackendFailed
from ...leaders import Term, leader
from ..child import Child, tied
from ..lock_command import seconds
from . import run_locked

HELP = """\
Runs a program on one of many servers: manage.py run_leader scheduler -- celery -A shop beat

It waits to be elected, and runs the program for as long as it leads. If the lock is in danger, because it was not
renewed for two thirds of a lease, or if a release is requested, the program is stopped before another process can lead,
and this one stands for election again. When the program ends by itself, so does this command, with its exit code, and
another process leads. On Linux the program is killed when this command is. It finds MONGOLOCK_KEY and
MONGOLOCK_FENCING_TOKEN in its environment. On stderr it says when it waits, leads, and leads no more (not with
--verbosity 0).
"""


class Command(run_locked.Command):
    """Runs a program on the one process that leads."""

    help = HELP
    codes = """\
exit codes:
  the program's own; 128 plus the number of the signal, if a signal ended it
    1  a setting is wrong
    2  the command line is wrong
   69  MongoDB refuses the commands
  126  the program cannot be run
  127  the program does not exist
"""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("lock", metavar="KEY", help="the key, without MONGOLOCK['KEY_PREFIX']")
        parser.add_argument("program", nargs="+", metavar="-- PROGRAM", help="what to run, with its arguments")
        parser.add_argument(
            "--lease", type=seconds, metavar="TIME", help="how long this process leads after it has died"
        )
        parser.add_argument(
            "--grace",
            type=seconds,
            default=10.0,
            metavar="TIME",
            help="between SIGTERM and SIGKILL (default: 10); less where the lease leaves less",
        )
        parser.add_argument("--label", default="leader", help="a note for people who look at the locks")
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    def handle(self, **options: Any) -> None:
        child = Child([], 0)

        def say(text: str) -> None:
            if options["verbosity"]:
                self.stderr.write(f"run_leader {options['lock']}: {text}", str)

        def work(term: Term) -> int:
            nonlocal child
            say(f"leads, with fencing token {term.fencing_token}")
            child = Child(tied(options["program"]), options["grace"])
            code = child.run(term)
            if not term.held:
                if child.was_asked_to_end:
                    raise SystemExit(code)
                say("waits to be elected again")
            return code

        def stop(term: Term) -> None:
            say("leads no more")
            child.grace = min(child.grace, term.lock.remaining * 0.8)
            child.stop(term)

        with terminated_as_exit():
            try:
                candidate = leader(
                    options["lock"],
                    on_stop=stop,
                    lease=options["lease"],
                    label=options["label"],
                    using=options["database"],
                )
                say("waits to be elected")
                self.code = candidate.run(work)
            except (ValueError, TypeError) as error:
                raise CommandError(str(error), returncode=2) from error
            except ImproperlyConfigured as error:
                raise CommandError(str(error)) from error
            except LockBackendFailed as error:
                raise CommandError(str(error), returncode=UNAVAILABLE) from error
