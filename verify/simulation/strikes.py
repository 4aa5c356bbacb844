"""Strikes of a caller: an exception where it waits, or at any line of the engine, as a signal handler raises it."""

import linecache
import sys
from types import FrameType
from typing import Any

from verify.simulation.kernel import Kernel
from verify.simulation.shell import ENGINE


class Struck(Exception):
    """The exception that strikes a strand."""


class LineStrike:
    """A strike at one line of the engine that the present strand reaches in a block.

    - number: number of the line, counted from 1 over all blocks, 0 for none.
    - has_struck: whether Struck was raised.
    """

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.has_struck = False
        self._kernel = kernel
        self._strand = kernel.current
        self._left = number

    def __enter__(self) -> None:
        self._is_in, before = True, sys.gettrace()
        # All strands are one thread with one trace function. Never go back to the one of another strand.
        self._before = None if isinstance(getattr(before, "__self__", None), LineStrike) else before
        if self._left > 0:
            sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        self._is_in = False
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if (
            not self._is_in
            or self._kernel.current is not self._strand
            or not frame.f_globals.get("__name__", "").startswith(ENGINE)
        ):
            return None
        if event == "line" and self._left > 0 and _can_be_struck(frame):
            self._left -= 1
            if self._left == 0:
                self.has_struck = True
                raise Struck
        return self._trace


def _can_be_struck(frame: FrameType) -> bool:
    """Return whether a line can be struck. The line of a `with` statement comes again at its end and cannot.

    See `tests.engine.test_signal_nets`.
    """
    return not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
