"""What the commands share: which locks are meant, how they are shown, how errors are told."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.document import check_fact
from ..engine.store import MongoStore
from ..exceptions import LockError
from ..inspect import display
from ..inspect.as_json import as_json
from ..inspect.patterns import KeyMatch, glob, starting
from ..inspect.snapshot import Seen, ping

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = 100 * 365 * 86_400


class LockCommand(BaseCommand):
    """A command on the locks of this project: those whose keys have MONGOLOCK["KEY_PREFIX"]."""

    #: It is for the night when something else is broken.
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django wants it

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--key",
            metavar="PATTERN",
            help="only these keys: * is any text, ? one character, and the pattern describes the whole key. The prefix "
            "MONGOLOCK['KEY_PREFIX'] may be left out; keys of other prefixes are never touched. Keys are shown as they "
            "are stored, with the prefix",
        )
        parser.add_argument("--owner", help="only locks with this owner=, in full")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        parser.add_argument("--database", metavar="ALIAS", help="a DATABASES alias, if not MONGOLOCK['DATABASE']")

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Errors that a person can do something about come without a traceback, and with exit code 1."""
        try:
            yield
        except (LockError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def store(self, options: dict[str, Any]) -> MongoStore:
        """The store of the alias. Raises LockBackendFailed, and soon, if its server does not answer."""
        store = mongo_store(options["database"])
        ping(store, get_settings().COMMAND_TIMEOUT)
        return store

    def keys(self, options: dict[str, Any]) -> KeyMatch:
        """The keys that are meant. Raises CommandError for a pattern that no key can match."""
        prefix = get_settings().KEY_PREFIX
        if options["key"] is None:
            return starting(prefix)
        try:
            return glob(options["key"], prefix)
        except ValueError as error:
            raise CommandError(f"--key: {error}") from error

    def owner(self, options: dict[str, Any]) -> str | None:
        """The owner that is meant. Raises CommandError for a text that no owner can be."""
        try:
            return check_fact("--owner", options["owner"])
        except ValueError as error:
            raise CommandError(str(error)) from error


def seconds(text: str) -> float:
    """Seconds out of "90", "90s", "5m", "2h" or "1d"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if found is None or (value := float(found[1]) * _UNITS[found[2]]) > _LONGEST:
        raise ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 5m, 2h or 1d")
    return value


def positive(text: str) -> int:
    """A whole number from 1 to 10000."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 10_000:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10000")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number from 0."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def write_json(stdout: OutputWrapper, name: str, locks: Iterable[Seen], rest: Callable[[], dict[str, Any]]) -> None:
    """Write one object, its list *name* as it comes: a million locks need no memory. *rest* is asked at the end."""
    stdout.write(f'{{"{name}": [', ending="")
    for number, seen in enumerate(locks):
        stdout.write(("," if number else "") + json.dumps(as_json(seen)), ending="")
    stdout.write("]" + "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in rest().items()) + "}")


#: How wide a column may get; a text that needs more pushes the rest of its row aside.
WIDEST: Final = 120
TITLES: Final = ("KEY", "STATE", "HOLDER", "SINCE", "LEFT", "WAITING", "TOKEN")


def as_row(seen: Seen) -> tuple[str, ...]:
    """A lock for people, for a terminal."""
    first = next(iter(seen.holders), None)
    who = "" if first is None else f"{display.who(first)}, {display.where(first)}"
    more = seen.holding - 1
    row = (
        seen.key,
        display.STATES[seen.state],
        seen.damage or (f"{who} and {more} more" if more > 0 else who) or "-",
        display.ago(first.acquired_at, seen.now) if first and first.acquired_at else "-",
        display.left(seen.expires_at, seen.now) if seen.expires_at else "-",
        seen.waiting,
        max(seen.tokens, default=seen.token or "-"),
    )
    return tuple(display.plain(cell) for cell in row)


def write_table(stdout: OutputWrapper, rows: Iterable[tuple[str, ...]]) -> None:
    """Write rows in columns as wide as the first rows need: the others need not be known before."""
    block: list[tuple[str, ...]] = [TITLES]
    widths: list[int] | None = None
    for row in rows:
        block.append(row)
        if len(block) == 1_000:
            widths = _write_block(stdout, block, widths)
            block = []
    _write_block(stdout, block, widths)


def _write_block(stdout: OutputWrapper, block: list[tuple[str, ...]], widths: list[int] | None) -> list[int]:
    widths = widths or [min(WIDEST, max(map(len, column))) for column in zip(*block, strict=True)]
    for row in block:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        stdout.write("  ".join(cells).rstrip())
    return widths
