"""Log lines. Each names an event and its facts, as text and as fields of the record."""

from __future__ import annotations

import logging
import re
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Final

from ..exceptions import printable

__all__ = ["DEBUG", "INFO", "WARNING", "is_enabled_for", "log", "log_exception"]

_logger: Final = logging.getLogger("django_mongolock")
#: Whether a level is enabled. A caller need not collect the facts of a line that is not.
is_enabled_for: Final = _logger.isEnabledFor
#: A text that needs no quotes.
_WORD: Final = re.compile(r"[!#-<>-\[\]-~]+")
#: Types that a formatter for JSON takes as they are.
_PLAIN: Final = (str, int, float, type(None))


def log(level: int, event: str, /, **facts: object) -> None:
    """Log an event with its facts.

    ``log(WARNING, "lock lost", key="a")`` writes the line "lock lost key=a", and its record has the field `lock_key`.
    The call costs next to nothing if the level is not enabled.
    """
    if _logger.isEnabledFor(level):
        _write(level, event, facts)


def log_exception(event: str, /, **facts: object) -> None:
    """Log an error with its traceback, in an ``except`` clause."""
    _write(ERROR, event, facts, traceback=True)


def _write(level: int, event: str, facts: dict[str, object], *, traceback: bool = False) -> None:
    plain = {name: fact if isinstance(fact, _PLAIN) else str(fact) for name, fact in facts.items()}
    said = {name: fact for name, fact in plain.items() if fact != ""}
    text = " ".join([event, *(f"{name}=%s" for name in said)])
    fields = {f"lock_{name}": fact for name, fact in plain.items()}
    _logger.log(level, text, *map(_quoted, said.values()), exc_info=traceback, extra=fields, stacklevel=3)


def _quoted(fact: object) -> object:
    """Return a fact in quotes, unless it is a single word. With quotes, no value can pass for another field."""
    if not isinstance(fact, str) or _WORD.fullmatch(fact):
        return fact
    text = fact.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(text)}"'
