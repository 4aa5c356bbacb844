"""The common base of the commands: options that choose locks, output of locks, and reports of errors."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from textwrap import fill
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper

from ..conf import get_settings
from ..exceptions import LockError, printable
from ..inspection.kinds import UNREADABLE, KeyMatch, LockKind, Row, find_kind, glob, kinds, starting
from ..inspection.named_locks import NamedLocks
from ..inspection.queries import ping

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = 100 * 365 * 86_400


class PlainOutput(OutputWrapper):
    """A stream that shows control characters, direction marks and characters outside its encoding as codes.

    Only a style may add control characters.
    """

    def write(self, msg: str = "", style_func: Any = None, ending: str | None = None) -> None:  # type: ignore[override]
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        text = printable(msg, keep="\n\t").encode(encoding, "backslashreplace").decode(encoding)
        super().write(text, style_func, ending)


class PlainCommand(BaseCommand):
    """A command whose output and errors go through `PlainOutput`, and that exits with a code for the shell."""

    #: The commands must work while something else in the project is broken. Other commands report such faults.
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django wants it
    #: The meanings of the exit codes, for the help.
    codes = ""
    #: The exit code of the shell. `call_command` returns normally.
    code = 0

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=self.codes, **kwargs)
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")
        if self.codes:
            parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        try:
            super().run_from_argv(argv)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports it again at exit
            self.code = 141  # 128 plus the number of SIGPIPE
        if self.code:
            sys.exit(self.code)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report errors that a person can correct without a traceback. Wrong command lines have exit code 2."""
        try:
            yield
        except (LockError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        except (ValueError, TypeError) as error:
            raise CommandError(str(error), returncode=2) from error

    def __setattr__(self, name: str, value: object) -> None:
        """Replace each stream that Django sets, when the command is made and when it is called."""
        if name in ("stdout", "stderr") and isinstance(value, OutputWrapper):
            value = PlainOutput(value._out, value.ending)  # type: ignore[arg-type]
        super().__setattr__(name, value)


class LockCommand(PlainCommand):
    """A command on the locks with the prefix MONGOLOCK["KEY_PREFIX"]."""

    #: The reasons why kinds could not be read, by their names.
    failed: dict[str, str]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--key",
            metavar="PATTERN",
            help="only keys that match as a whole: * is any text, ? one character. You can omit the prefix "
            "MONGOLOCK['KEY_PREFIX']; keys with other prefixes are never touched. The output shows the prefix",
        )
        parser.add_argument("--owner", help="only locks and documents with exactly this owner")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def add_kind(self, parser: CommandParser) -> None:
        """Add the option that chooses kinds of locks."""
        parser.add_argument(
            "--kind",
            action="append",
            default=[],
            metavar="NAME",
            help='only this kind: "locks", or the name of a DocumentLock (may be repeated)',
        )

    def kinds(self, options: dict[str, Any]) -> list[LockKind]:
        """Return the kinds that the options choose.

        Raises CommandError for an unknown name. Raises LockBackendFailed soon if named locks are among the kinds and
        their server does not answer.
        """
        using = options["database"]
        try:
            found = [find_kind(name, using) for name in options["kind"]] or kinds(using)
        except LookupError as error:
            raise CommandError(f"--kind: {error}", returncode=2) from error
        if options.get("key") is not None and not (found := [kind for kind in found if isinstance(kind, NamedLocks)]):
            raise CommandError("--key is for named locks: it does not go with another --kind", returncode=2)
        for kind in found:
            if isinstance(kind, NamedLocks):
                ping(kind.store, get_settings().COMMAND_TIMEOUT)
        return found

    @contextmanager
    def noting_errors(self, kind: LockKind) -> Iterator[None]:
        """Record that a kind cannot be read. The other kinds are still shown."""
        try:
            yield
        except UNREADABLE as error:
            self.failed[kind.name] = str(error)

    def report_failed(self) -> None:
        """Raise CommandError if some kinds could not be read."""
        if failed := [f"{name}: {error}" for name, error in self.failed.items()]:
            raise CommandError(f"some locks could not be read: {'; '.join(failed)}")

    def write_rows(self, kind: LockKind, rows: Iterable[Row], *, wide: bool = True) -> None:
        """Write a table of rows. Kinds other than named locks get a title."""
        if not isinstance(kind, NamedLocks):
            self.stdout.write(f"\n{kind.title[0].upper()}{kind.title[1:]}:")
        write_table(self.stdout, rows, wide=wide)

    def write_none(self, usual: str, options: Mapping[str, Any], *choices: str) -> None:
        """Say that there is no lock, with the text *usual* unless one of the *choices* was made."""
        self.stdout.write("There are no such locks." if any(options[name] for name in choices) else usual)

    def write_json(
        self,
        name: str,
        kinds: Iterable[LockKind],
        read: Callable[[LockKind], tuple[Iterable[Row], Callable[[], dict[str, Any]]]],
        **facts: Any,
    ) -> None:
        """Write one object with the facts, and for each kind the list *name* and the facts known after it.

        Rows are written one by one, so that a million rows need no memory.

        - read: function that returns the rows and the later facts of a kind.
        """
        write = partial(self.stdout.write, ending="")
        write(json.dumps({**facts, "kinds": []})[:-2])
        for number, kind in enumerate(kinds):
            rows, rest = read(kind)
            write(f'{", " * bool(number)}{{"kind": {json.dumps(kind.name)}, "{name}": [')
            with self.noting_errors(kind):
                for place, row in enumerate(rows):
                    write(", " * bool(place) + json.dumps(row.as_json()))
            write(f"], {json.dumps({**rest(), 'error': self.failed.get(kind.name)})[1:]}")
        self.stdout.write("]}")

    def keys(self, options: dict[str, Any]) -> KeyMatch:
        """Return the chosen keys. Raises CommandError for a pattern that no key can match."""
        prefix = get_settings().KEY_PREFIX
        if options["key"] is None:
            return starting(prefix)
        try:
            return glob(options["key"], prefix)
        except ValueError as error:
            raise CommandError(f"--key: {error}", returncode=2) from error


def seconds(text: str) -> float:
    """Read seconds from "90", "90s", "5m", "2h" or "1d"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if found is None or (value := float(found[1]) * _UNITS[found[2]]) > _LONGEST:
        raise ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 5m, 2h or 1d")
    return value


def whole_number(text: str) -> int:
    """Read a whole number."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0 to 999999999")
    return int(text)


#: The width of a table that is not wide. Only holders are cut to fit, to no less than `LEAST`. A longer key moves the
#: rest of its row.
FITS: Final = 100
LEAST: Final = 12
MAX_WIDTH: Final = 120
#: The number of locks with a note below the table. A key is not broken at the end of a line.
NOTES: Final = 20
FILLED: Final[dict[str, Any]] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}


def write_table(stdout: OutputWrapper, rows: Iterable[Row], *, wide: bool = True) -> None:
    """Write rows of one kind in columns, followed by notes on the first rows that need a look.

    The first thousand rows set the column widths, because later rows are not read before.

    - wide: whether to show the token and not to cut holders.
    """
    rows = iter(rows)
    titles: list[str] = []
    widths: list[int] = []
    room = 0
    notes: list[str] = []
    while some := list(islice(rows, 1_000)):
        lines = [row.cells() for row in some]
        notes += [row.note for row in some if row.note]
        if not titles:
            titles = [title for title in lines[0] if wide or title != "TOKEN"]
            widths = [max(map(len, [title, *(_text(line[title]) for line in lines)])) for title in titles]
            widths = [min(width, MAX_WIDTH) for width in widths]
            place = titles.index("HOLDER")
            room = widths[place] if wide else max(LEAST, FITS - sum(widths) + widths[place] - 2 * (len(widths) - 1))
            widths[place] = min(widths[place], room)
            _write_line(stdout, titles, widths)
        for line in lines:
            rooms = [None if wide or title != "HOLDER" else room for title in titles]
            _write_line(stdout, [_text(line[title], most) for title, most in zip(titles, rooms, strict=True)], widths)
    for note in map(printable, notes[:NOTES]):
        stdout.write(note if wide else fill(note, FITS, **FILLED))


def _write_line(stdout: OutputWrapper, texts: list[str], widths: list[int]) -> None:
    stdout.write("  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip())


def _text(cell: object, room: int | None = None) -> str:
    """Return a cell as text. Without enough *room*, the label is cut in the middle, and of its place the host and the
    process are left.
    """
    parts = list(map(printable, cell if isinstance(cell, list) else [cell]))
    text = ", ".join(parts) or "-"
    if room is None or len(text) <= room:
        return text
    words = " · ".join(parts[1:]).split(" · ")
    place = f", {' · '.join([*words[:2], *(['…'] if words[2:] else [])])}" if parts[1:] else ""
    return _middle_cut(parts[0], max(LEAST, room - len(place))) + place


def _middle_cut(text: str, room: int) -> str:
    end = (room - 1) // 2
    return text if len(text) <= room else f"{text[: room - 1 - end]}…{text[len(text) - end :]}"
