"""``manage.py check_locks``: everything that locks need, line by line, each in order or with its cure."""

from __future__ import annotations

import json
import sys
from argparse import RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import CommandParser

from ...checks.diagnosis import Line, diagnose
from ...exceptions import printable
from ..plain_output import PlainCommand

HELP = """\
Looks at everything that locks need: settings, router, server, rights, indexes, clock, versions. Changes nothing.

Each line is in order, or says what to do. The rules are those of `manage.py check --database`, and silenced in the same
way, by SILENCED_SYSTEM_CHECKS.
"""

CODES = """\
exit codes:
  0  everything is in order
  1  an error: locks do not work
  3  a warning: locks work, but something should be done
"""

NOT_ASKED = "not asked: first correct what is reported as wrong"
#: A line's exit code and how it begins, by what is wrong.
STATES = {"ok": (0, "ok"), "not asked": (0, "?"), "warning": (3, "WARNING"), "error": (1, "ERROR")}


class Command(PlainCommand):
    """Looks at everything that locks need."""

    help = HELP
    #: It shows what is wrong with the locks by itself; nothing else may keep it from that.
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django wants it
    #: The exit code, for `run_from_argv`.
    code = 0

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=CODES, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with a code for the shell; `call_command` returns."""
        super().run_from_argv(argv)
        if self.code:
            sys.exit(self.code)

    def handle(self, **options: Any) -> None:
        lines = list(diagnose())
        states = {line.state for line in lines}
        self.code = 1 if "error" in states else max(STATES[state][0] for state in states)
        if options["json"]:
            self.stdout.write(json.dumps({"ok": not self.code, "lines": [line.as_json() for line in lines]}))
            return
        for line in lines:
            self._write(line)

    def _write(self, line: Line) -> None:
        first, *others = [text for problem in line.problems for text in problem.as_lines()] or [line.fact or NOT_ASKED]
        self.stdout.write(printable(f"{STATES[line.state][1]:<8} {line.name:<15} {first}"))
        for text in others:
            self.stdout.write(printable(f"{'':<24} {text}"))
