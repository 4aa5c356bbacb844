"""Measuring how long several locks were believed to be held at the same time."""

import threading
from itertools import combinations
from typing import Self

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock

#: Seconds between two looks.
STEP = 0.0005


class Belief:
    """From when until when at least *lock* was `held`: a grant that was not held once never is again."""

    def __init__(self, lock: MongoLock) -> None:
        self.lock = lock
        self.first = float("inf")
        self.last = 0.0

    def look(self) -> None:
        before = clock.now()
        if self.lock.held:
            self.last = before
            self.first = min(self.first, clock.now())


class Watch:
    """Looks at `held` of locks, again and again, in a thread of its own. One acquisition for each lock.

    with Watch(mine, theirs) as watch: ...; assert watch.overlap == 0
    """

    def __init__(self, *locks: MongoLock) -> None:
        self._beliefs = [Belief(lock) for lock in locks]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(STEP):
            for belief in list(self._beliefs):
                belief.look()

    def add(self, lock: MongoLock) -> MongoLock:
        """Look at this one too."""
        self._beliefs.append(Belief(lock))
        return lock

    @property
    def overlap(self) -> float:
        """For how many seconds two of them were held at once, as far as it was seen: never more than was so."""
        return max([0.0, *(_common(one, other) for one, other in combinations(self._beliefs, 2))])


def _common(one: Belief, other: Belief) -> float:
    return min(one.last, other.last) - max(one.first, other.first)
