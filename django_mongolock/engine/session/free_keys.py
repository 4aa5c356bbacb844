"""Which keys are probably free: those that this process gave back when nobody else held them or waited for them.

For such a key there is a much shorter form of the command that acquires it (`short_forms.TAKE_FREE`), which does
nothing if the key is not free after all; then the whole command follows. So the guess must be right nearly always.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

#: How many keys are remembered: those that were given back last.
MAX_KEYS: Final = 10_000
#: After a wrong guess, none is made for so many releases: where others use the key as well, it would cost a command.
PENALTY: Final = 8


class FreeKeys:
    """The guesses of one session. May be called from any thread."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, int] = OrderedDict()
        self._mutex = threading.Lock()

    def released(self, key: str) -> None:
        """It was given back, and was free then."""
        with self._mutex:
            self._left[key] = min(1, self._left.pop(key, 0) + 1)
            while len(self._left) > MAX_KEYS:
                self._left.popitem(last=False)

    def guess(self, key: str) -> bool:
        """Is it probably free? A guess is made once for each release."""
        with self._mutex:
            if self._left.get(key, 0) <= 0:
                return False
            self._left[key] = 0
            return True

    def was_wrong(self, key: str) -> None:
        """The guess was made, and the key was not free."""
        with self._mutex:
            self._left[key] = -PENALTY
