"""What this process has released: which releases an election may undo, and which keys are probably free.

A release without a waiter (`ReleaseUncontended`) does not wait for the majority, which would double what it costs. So a
failover may undo it: on the next primary the lock is held by a grant that is renewed no more, for a whole lease. So the
process that released it remembers that for a while, and releases it again at the next primary.

Where a primary has no name (`store.primary`: behind mongos or a load balancer, on a standalone server) nothing is
remembered.

That the majority has a release needs no command of its own: an oplog has one order, so any later write that the
majority confirms at the same primary shows it. (Raft's log matching, in the words of MongoDB's replication protocol:
https://www.usenix.org/conference/nsdi21/presentation/zhou.)

For a key that is probably free, or new, there is a much shorter form of the command that acquires it
(`short_forms.TAKE_FREE`), which does nothing if the key is not free after all; then the whole command follows. So the
guess must be right nearly always.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from ..protocol.actions import Apply

#: How long after a release to look whether there has been a failover, and then again, in seconds.
FAILOVER_LOOK_EVERY: Final = 2.0
#: How long a release is remembered at most while the primary stays the same, in seconds: usually, a primary that the
#: majority has left behind knows it sooner.
REMEMBERED_FOR: Final = 60.0
#: How many releases are remembered at most, and how many keys: the last ones.
MAX_RELEASES: Final = 10_000
MAX_KEYS: Final = 10_000
#: After a wrong guess, none is made for so many releases: where other processes use the key, it would cost a command.
NO_GUESS_FOR: Final = 8


@dataclass(frozen=True, slots=True)
class UnconfirmedRelease:
    """What was sent to release a lock, which *primary* confirmed it, and when, by the session's clock."""

    again: Apply
    primary: str
    at: float


class Releases:
    """Remembers the releases of a session. May be called from any thread."""

    def __init__(self) -> None:
        self._made: deque[UnconfirmedRelease] = deque(maxlen=MAX_RELEASES)
        self._mutex = threading.Lock()
        #: When to look for a failover; infinity if there is no reason to.
        self.look_at = float("inf")
        self._closed = False

    def __len__(self) -> int:
        return len(self._made)

    def made(self, release: UnconfirmedRelease) -> bool:
        """Its primary has confirmed it. Return whether `look_at` is sooner for it."""
        if not release.primary or self._closed:
            return False
        with self._mutex:
            self._made.append(release)
            before, self.look_at = self.look_at, min(self.look_at, release.at + FAILOVER_LOOK_EVERY)
            return self.look_at < before

    def close(self) -> None:
        """Remember no more: there will be no time to repeat them."""
        self._closed = True

    def confirmed(self, primary: str, sent: float) -> None:
        """The majority has confirmed a write that was *sent* to *primary* then: it has what was made there before."""
        with self._mutex:
            while self._made and self._made[0].primary == primary and self._made[0].at < sent:
                self._made.popleft()

    def undone(self, primary: str, now: float) -> list[UnconfirmedRelease]:
        """Take out those that were made at another primary than *primary*; forget those of this one that are old.

        primary: the one of today; empty if there is none, and then nothing can be said yet.
        """
        with self._mutex:
            before = [made for made in self._made if primary not in ("", made.primary)]
            left = [
                made
                for made in self._made
                if primary == "" or (primary == made.primary and now < made.at + REMEMBERED_FOR)
            ]
            self._made.clear()
            self._made.extend(left)
            self.look_at = now + FAILOVER_LOOK_EVERY if left else float("inf")
        return before


class FreeKeys:
    """Guesses which keys are free: those that this process released while no other grant held them or waited for them;
    and those that it does not know, if the last one that it did not know was free.

    May be called from any thread.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[str, int] = OrderedDict()
        self._unknown_are_free = False
        self._mutex = threading.Lock()

    def released(self, key: str) -> None:
        """It was released, and was free then."""
        with self._mutex:
            self._unknown_are_free |= key not in self._left
            self._keep(key, self._left.get(key, 0) + 1)

    def guess(self, key: str) -> bool:
        """Whether it is probably free. A guess is made once for each release, and once for a key that is not known."""
        with self._mutex:
            if self._left.get(key, self._unknown_are_free) <= 0:
                return False
            self._keep(key, 0)
            return True

    def was_wrong(self, key: str) -> None:
        """The guess was made, and the key was not free."""
        with self._mutex:
            self._left[key], self._unknown_are_free = -NO_GUESS_FOR, False

    def _keep(self, key: str, left: int) -> None:
        self._left.pop(key, None)
        self._left[key] = left
        while len(self._left) > MAX_KEYS:
            self._left.popitem(last=False)
