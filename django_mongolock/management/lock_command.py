"""What the commands have in common: options that choose locks, output of locks, and reports of errors."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser, OutputWrapper

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_fact
from ..exceptions import LockError, printable
from ..inspection import display
from ..inspection.as_json import as_json
from ..inspection.patterns import KeyMatch, glob, starting
from ..inspection.queries import ping
from ..inspection.snapshot import LockSnapshot, State
from .plain_output import PlainCommand

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = 100 * 365 * 86_400


class LockCommand(PlainCommand):
    """A command on the locks of this project: those whose keys have MONGOLOCK["KEY_PREFIX"]."""

    #: The commands must work while something else in the project is broken.
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django wants it

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--key",
            metavar="PATTERN",
            help="only keys that match as a whole: * is any text, ? one character. You can omit the prefix "
            "MONGOLOCK['KEY_PREFIX']; keys with other prefixes are never touched. The output shows the prefix",
        )
        parser.add_argument("--owner", help="only locks and documents with exactly this owner")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report errors that a person can correct without a traceback, with exit code 1."""
        try:
            yield
        except (LockError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def store(self, options: dict[str, Any]) -> MongoStore:
        """The store of the alias. Raises LockBackendFailed soon if its server does not answer."""
        store = mongo_store(options["database"])
        ping(store, get_settings().COMMAND_TIMEOUT)
        return store

    def keys(self, options: dict[str, Any]) -> KeyMatch:
        """The chosen keys. Raises CommandError for a pattern that no key can match."""
        prefix = get_settings().KEY_PREFIX
        if options["key"] is None:
            return starting(prefix)
        try:
            return glob(options["key"], prefix)
        except ValueError as error:
            raise CommandError(f"--key: {error}", returncode=2) from error

    def owner(self, options: dict[str, Any]) -> str | None:
        """The chosen owner. Raises CommandError for a text that cannot be an owner."""
        try:
            return check_fact("--owner", options["owner"])
        except ValueError as error:
            raise CommandError(str(error), returncode=2) from error


def seconds(text: str) -> float:
    """Read seconds from "90", "90s", "5m", "2h" or "1d"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if found is None or (value := float(found[1]) * _UNITS[found[2]]) > _LONGEST:
        raise ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 5m, 2h or 1d")
    return value


def whole_number(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Return a function that reads a whole number from *least* to *most*."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return read


def add_document_lock(parser: CommandParser) -> None:
    """Add the option that chooses document locks."""
    parser.add_argument(
        "--document-lock",
        action="append",
        default=[],
        metavar="NAME",
        help="only the documents of this DocumentLock (may be repeated)",
    )


def write_json(
    stdout: OutputWrapper, name: str, locks: Iterable[LockSnapshot], rest: Callable[[], dict[str, Any]]
) -> None:
    """Write one object: the list *name*, lock by lock, so that a million locks need no memory; and then *rest*."""
    stdout.write(f'{{"{name}": [', ending="")
    for number, lock in enumerate(locks):
        stdout.write(("," if number else "") + json.dumps(as_json(lock)), ending="")
    stdout.write("]" + "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in rest().items()) + "}")


#: The width of a table that is not wide: longer texts are cut. In a wide one, a longer text moves the rest of its row.
FITS: Final = 100
MAX_WIDTH: Final = 120
TITLES: Final = ("KEY", "STATE", "HOLDER", "HELD FOR", "LEFT", "WAITING", "TOKEN")


def write_locks(stdout: OutputWrapper, locks: Iterable[LockSnapshot], *, wide: bool = True) -> None:
    """Write a table of locks. wide: with all that is known of the holder, and with the token."""
    rows = (_as_row(lock, wide=wide) for lock in locks)
    write_table(stdout, rows, TITLES if wide else TITLES[:-1], wide=wide)


def _as_row(lock: LockSnapshot, *, wide: bool) -> tuple[str, ...]:
    first = next(iter(lock.holders), None)
    more = f" and {lock.holding - 1} more" if lock.holding > 1 else ""
    since = None if lock.state is State.KEPT else lock.since
    where = display.details if wide else partial(display.where, thread=False)
    row = (
        lock.key,
        ", ".join(filter(None, (str(display.STATES[lock.state][1]), display.permits_used(lock)))),
        lock.damage or (f"{display.who(first)}, {where(first)}{more}" if first else "-"),
        display.duration((lock.now - since).total_seconds()) if since else "-",
        display.time_left(lock.expires_at, lock.now) if lock.expires_at else "-",
        lock.waiting,
        *((max(lock.tokens, default=lock.token or "-"),) if wide else ()),
    )
    return tuple(printable(cell) for cell in row)


def write_table(
    stdout: OutputWrapper, rows: Iterable[tuple[str, ...]], titles: tuple[str, ...], *, wide: bool = True
) -> None:
    """Write rows in columns that are as wide as the first thousand rows need: the others are not read before."""
    block: list[tuple[str, ...]] = [titles]
    widths: list[int] = []
    for row in rows:
        block.append(row)
        if len(block) == 1_000:
            widths = widths or _widths(block, wide=wide)
            _write_block(stdout, block, widths, wide=wide)
            block = []
    if block != [titles]:
        _write_block(stdout, block, widths or _widths(block, wide=wide), wide=wide)


def _widths(block: list[tuple[str, ...]], *, wide: bool) -> list[int]:
    widths = [min(MAX_WIDTH, max(map(len, column))) for column in zip(*block, strict=True)]
    while not wide and sum(widths) + 2 * (len(widths) - 1) > FITS:
        widths[widths.index(max(widths))] -= 1
    return widths


def _write_block(stdout: OutputWrapper, block: list[tuple[str, ...]], widths: list[int], *, wide: bool) -> None:
    for row in block:
        cells = (
            (cell if wide or len(cell) <= width else f"{cell[: width - 1]}…").ljust(width)
            for cell, width in zip(row, widths, strict=True)
        )
        stdout.write("  ".join(cells).rstrip())
