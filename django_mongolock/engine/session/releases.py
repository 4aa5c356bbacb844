"""Releases that only the primary has confirmed, until the majority is known to have them too.

A release does not wait for the majority, which would double what it costs. So a failover may undo it: on the next
primary the lock is held by somebody who has given it back and renews it no more, for a whole lease. Who gave it back
therefore remembers that for a while, and gives it back again to the next primary.

Where a primary has no name (`store.primary`: behind mongos or a load balancer, on a standalone server) nothing is
remembered.

That the majority has a release needs no command of its own: an oplog has one order, so any later write that the
majority confirms at the same primary shows it. (Raft's log matching, in the words of MongoDB's replication protocol:
https://www.usenix.org/conference/nsdi21/presentation/zhou.)
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from ..protocol import Release

#: How long after a release to look whether there has been a failover, and then again, in seconds.
LOOK: Final = 2.0
#: How long a release is remembered at most while the primary stays the same, in seconds: usually, a primary that the
#: majority has left behind knows it sooner.
LONGEST: Final = 60.0
#: How many are remembered at most.
MAX_RELEASES: Final = 10_000


@dataclass(frozen=True, slots=True)
class UnconfirmedRelease:
    """What was sent to give a lock back, which *primary* confirmed it, and when, by the session's clock."""

    again: Release
    primary: str
    at: float


class Releases:
    """Remembers the releases of a session. May be called from any thread."""

    def __init__(self) -> None:
        self._made: deque[UnconfirmedRelease] = deque(maxlen=MAX_RELEASES)
        self._mutex = threading.Lock()
        self._look_at = float("inf")

    @property
    def look_at(self) -> float:
        """When to look for a failover; infinity if there is no reason to."""
        return self._look_at

    def made(self, release: UnconfirmedRelease) -> None:
        """The primary has confirmed it."""
        with self._mutex:
            self._made.append(release)
            self._look_at = min(self._look_at, release.at + LOOK)

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
                made for made in self._made if primary == "" or (primary == made.primary and now < made.at + LONGEST)
            ]
            self._made.clear()
            self._made.extend(left)
            self._look_at = now + LOOK if left else float("inf")
        return before
