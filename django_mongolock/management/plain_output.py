"""What the commands print: whatever others wrote into a lock, it steers no terminal."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, OutputWrapper

from ..exceptions import printable


class PlainOutput(OutputWrapper):
    """A stream that shows control characters and direction marks by their codes. Only a style may add some."""

    def write(self, msg: str = "", style_func: Any = None, ending: str | None = None) -> None:  # type: ignore[override]
        super().write(printable(msg, keep="\n\t"), style_func, ending)


class PlainCommand(BaseCommand):
    """A command whose output and errors go through `PlainOutput`."""

    def __setattr__(self, name: str, value: object) -> None:
        """Replace each stream that Django sets, when the command is made and when it is called."""
        if name in ("stdout", "stderr") and isinstance(value, OutputWrapper):
            value = PlainOutput(value._out, value.ending)  # type: ignore[arg-type]
        super().__setattr__(name, value)
