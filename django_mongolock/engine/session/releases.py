"""The releases of this process: those that an election may undo, and guesses at the keys.

A release without a waiter (`ReleaseUncontended`) does not wait for the majority, because that would double its cost. A
failover may therefore undo the release. On the next primary, a grant without renewals then holds the lock for a whole
lease. The releasing process remembers the release for a while, and repeats it at the next primary.

Nothing is remembered if the primary has no name (`store.primary`: behind mongos or a load balancer, on a standalone
server).

No command of its own asks whether the majority has a release. An oplog has one order, so any later write that the
majority confirms at the same primary shows it. (Raft's log matching, in the words of MongoDB's replication protocol:
https://www.usenix.org/conference/nsdi21/presentation/zhou.)

A key that is probably free, or new, is acquired with a much shorter command (`short_forms.TAKE_FREE`). The short
command does nothing if the key is not free after all, and the whole command follows. The guess must therefore be right
nearly always.

A key that probably has waiters is not released with the command for a lock without a waiter. That command would do
nothing, and cost a round trip before the hand-over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

#: Seconds between a release and the first look for a failover, and between two looks.
FAILOVER_LOOK_EVERY: Final = 2.0
#: The most seconds for which a release is remembered while the primary stays the same. A primary that the majority has
#: left behind usually knows it sooner.
REMEMBERED_FOR: Final = 60.0
#: The most releases and keys that are remembered. The oldest are dropped.
MAX_RELEASES: Final = 10_000
MAX_KEYS: Final = 10_000
#: The number of releases without a guess after a wrong guess. If other processes use the key, a guess would cost a
#: command.
NO_GUESS_FOR: Final = 8


@dataclass(frozen=True, slots=True)
class UnconfirmedRelease:
    """A released grant, the *primary* that confirmed the release, and the time by the session's clock."""

    key: str
    grant: str
    primary: str
    at: float


class Releases:
    """The remembered releases of a session. May be called from any thread."""

    def __init__(self) -> None:
        self._made: deque[UnconfirmedRelease] = deque(maxlen=MAX_RELEASES)
        self._mutex = threading.Lock()
        #: The time of the next look for a failover, infinity if there is no reason to look.
        self.look_at = float("inf")
        self._closed = False

    def __len__(self) -> int:
        return len(self._made)

    def made(self, release: UnconfirmedRelease) -> bool:
        """Remember a release that its primary has confirmed. Return whether `look_at` is now sooner."""
        if not release.primary or self._closed:
            return False
        with self._mutex:
            self._made.append(release)
            before, self.look_at = self.look_at, min(self.look_at, release.at + FAILOVER_LOOK_EVERY)
            return self.look_at < before

    def close(self) -> None:
        """Remember no more releases, because there will be no time to repeat them."""
        self._closed = True

    def confirmed(self, primary: str, sent: float) -> None:
        """Forget the releases made at *primary* before *sent*.

        The majority has confirmed a write that was sent to it then.
        """
        with self._mutex:
            while self._made and self._made[0].primary == primary and self._made[0].at < sent:
                self._made.popleft()

    def undone(self, primary: str, now: float) -> list[UnconfirmedRelease]:
        """Take out the releases made at another primary than *primary*. Forget old releases of this primary.

        - primary: present primary. If it is empty, there is none, and nothing is decided yet.
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


class KeyGuesses:
    """Guesses at the keys that are free, and at the held keys with waiters. May be called from any thread.

    A key is guessed to be free if this process released it while no other grant held it or waited for it. An unknown
    key is guessed to be free if the last unknown key was. A held key is guessed to have waiters if its last release by
    this process handed it over.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[str, int] = OrderedDict()
        self._with_waiters: OrderedDict[str, None] = OrderedDict()
        self._unknown_are_free = False
        self._mutex = threading.Lock()

    def released(self, key: str) -> None:
        """Record that *key* was released, and was free then."""
        with self._mutex:
            self._with_waiters.pop(key, None)
            self._unknown_are_free |= key not in self._left
            self._keep(self._left, key, self._left.get(key, 0) + 1)

    def handed_over(self, key: str) -> None:
        """Record that *key* was released, and a waiter got it."""
        with self._mutex:
            self._keep(self._left, key, min(0, self._left.get(key, 0)))
            self._keep(self._with_waiters, key, None)

    def has_waiters(self, key: str) -> bool:
        """Return whether the held *key* probably has waiters."""
        return key in self._with_waiters

    def is_free(self, key: str) -> bool:
        """Return whether *key* is probably free. Each release allows one guess, and an unknown key allows one."""
        with self._mutex:
            if self._left.get(key, self._unknown_are_free) <= 0:
                return False
            self._keep(self._left, key, 0)
            return True

    def was_wrong(self, key: str) -> None:
        """Record that *key* was guessed to be free, and was not."""
        with self._mutex:
            self._left[key], self._unknown_are_free = -NO_GUESS_FOR, False

    @staticmethod
    def _keep(known: OrderedDict[str, T], key: str, value: T) -> None:
        """Remember *key* as the latest one, and forget the oldest."""
        known[key] = value
        known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)
