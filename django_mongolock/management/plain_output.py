"""What the commands print: whatever others wrote into a lock, it steers no terminal."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import BaseCommand, CommandParser, OutputWrapper

from ..exceptions import printable


class PlainOutput(OutputWrapper):
    """A stream that shows control characters and direction marks by their codes. Only a style may add some."""

    def write(self, msg: str = "", style_func: Any = None, ending: str | None = None) -> None:  # type: ignore[override]
        super().write(printable(msg, keep="\n\t"), style_func, ending)


class PlainCommand(BaseCommand):
    """A command whose output and errors go through `PlainOutput`, and that exits with a code for the shell."""

    #: The commands must work while something else in the project is broken; other commands report that.
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django wants it
    #: What the exit codes mean, for the help.
    codes = ""
    #: The exit code of the shell; `call_command` returns.
    code = 0

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=self.codes, **kwargs)
        if self.codes:
            parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        super().run_from_argv(argv)
        if self.code:
            sys.exit(self.code)

    def __setattr__(self, name: str, value: object) -> None:
        """Replace each stream that Django sets, when the command is made and when it is called."""
        if name in ("stdout", "stderr") and isinstance(value, OutputWrapper):
            value = PlainOutput(value._out, value.ending)  # type: ignore[arg-type]
        super().__setattr__(name, value)
