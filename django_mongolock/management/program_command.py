"""What the commands have in common that run a program: `run_locked` and `run_leader`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from .lock_command import seconds
from .plain_output import PlainCommand


class ProgramCommand(PlainCommand):
    """A command that runs a program, and exits with its code."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
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
            "--grace",
            type=seconds,
            default=10.0,
            metavar="TIME",
            help="between SIGTERM and SIGKILL, if the lock is lost or in danger (default: 10)",
        )
        parser.add_argument(
            "--label", help="a note for people who look at the locks (default: the name of the program, or leader)"
        )
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    @contextmanager
    def reporting_mistakes(self) -> Iterator[None]:
        """Report what is wrong with the command line or the settings without a traceback."""
        try:
            yield
        except (ValueError, TypeError) as error:
            raise CommandError(str(error), returncode=2) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
