"""Watching locks from outside: were two of them held at once that exclude each other, for sure?

Nobody can look at two locks in one moment. But `held` never becomes true again, so a lock that was held at two looks
was held all the time between them. Two locks overlap where these times do. What nobody looked at counts for nothing,
so a machine under load sees less, and never what was not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from django_mongolock.engine import clock
from django_mongolock.engine.document import Mode
from django_mongolock.engine.lock import MongoLock

NEVER = float("inf")
#: Documents hold whole milliseconds: a time that comes from one may be off by so many seconds.
ROUNDING = 0.003


@dataclass(frozen=True, slots=True)
class Kind:
    """What was asked for. permits: of a semaphore."""

    mode: Mode
    permits: int = 0

    def excludes(self, other: Kind) -> bool:
        """May two of these never be held at once, whatever their number?"""
        return self.mode == "exclusive" or self != other

    def __str__(self) -> str:
        return f"{self.mode} {self.permits}" if self.permits else self.mode


@dataclass(eq=False, slots=True)
class Grant:
    """What was seen of one grant, by whatever lock objects share it. Times are in seconds of the local clock.

    asked: before it was asked for. had: after it was acquired. since, until: it was held between these for sure.
    good: until then it is held, unless somebody ends it. last: after that it is not held. cut: from then on it may be
    held and somebody else as well: it was taken by force, or its process counts as gone. kept: until then nobody else
    gets the key, for it has a minimum hold. shared: several lock objects have it.
    """

    key: str
    token: int
    kind: Kind
    who: str
    asked: float
    had: float
    good: float = -NEVER
    last: float = NEVER
    since: float = NEVER
    until: float = -NEVER
    cut: float = NEVER
    kept: float = -NEVER
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.who}: {self.kind} {self.key!r}, token {self.token}"

    @property
    def seen(self) -> bool:
        """Was it held for any time, for sure?"""
        return self.since <= self.until

    def overlap(self, other: Grant) -> float:
        """For how many seconds both were held for sure; negative if they were not."""
        return min(self.until, other.until) - max(self.since, other.since)


@dataclass(eq=False, slots=True)
class Watched:
    """A lock object that has acquired something. leaving: somebody has begun to release it. over: it was seen not to
    be held."""

    lock: MongoLock | None
    grant: Grant
    owner: Any
    leaving: float = NEVER
    over: float = NEVER


@dataclass(eq=False)
class Watch:
    """Looks at locks, from any thread, and says what was wrong. seeming: how often two would have seemed to be held at
    once to who looks at one after the other."""

    now: Callable[[], float] = clock.now
    watched: list[Watched] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    looks: int = 0
    seeming: int = 0
    _grants: dict[str, dict[int, Grant]] = field(default_factory=dict)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def got(self, lock: MongoLock, grant: Grant, owner: Any, *, shares: bool = False) -> Watched:
        """*lock* was acquired, by *owner*. shares: it may be a grant that *owner* has already."""
        watched = Watched(lock, grant, owner)
        with self._mutex:
            grants = self._grants.setdefault(grant.key, {})
            if (known := grants.get(grant.token)) is None:
                for other in grants.values():
                    self._check_order(*((other, grant) if other.asked < grant.asked else (grant, other)))
                grants[grant.token] = grant
            elif shares and any(w.grant is known and w.owner is owner for w in self.watched):
                watched.grant = known
                known.shared = True
            else:
                self._complain(f"one token for two: {known}; {grant}")
            self.watched.append(watched)
        self.look(watched)
        self.look(watched)
        return watched

    def look(self, watched: Watched) -> bool:
        """Look whether it is held, and what that means beside all that was seen before."""
        lock, grant = watched.lock, watched.grant
        if lock is None:
            return False
        before = self.now()
        held = lock.held
        after = self.now()
        with self._mutex:
            self.looks += 1
            if not held:
                watched.over = min(watched.over, after)
                if after < min(watched.leaving, grant.cut, grant.good - ROUNDING):
                    self._complain(f"lost {grant.good - after:.3f} s before its time: {grant}")
                return False
            if before > watched.over:
                self._complain(f"held again after it was not: {grant}")
            if before > grant.last:
                self._complain(f"held {before - grant.last:.3f} s longer than max_hold: {grant}")
            grant.since = min(grant.since, after)
            grant.until = max(grant.until, min(before, grant.cut))
            self._compare(grant)
        return True

    def look_at_all(self) -> None:
        """Look at all of them, one after the other."""
        held = {w.grant for w in list(self.watched) if self.look(w) and w.grant.cut == NEVER}
        self.seeming += any(one.key == two.key and one.kind.excludes(two.kind) for one, two in combinations(held, 2))

    def releases(self, watched: Watched) -> None:
        """Somebody is going to release it."""
        self.look(watched)
        watched.leaving = min(watched.leaving, self.now())

    def released(self, watched: Watched, *, keeps: float = 0.0) -> None:
        """Its release has returned. keeps: how long from its grant on the key stays locked."""
        grant = watched.grant
        with self._mutex:
            watched.over = min(watched.over, self.now())
            if keeps and grant.cut == NEVER and not grant.shared:
                grant.kept = grant.asked + keeps
        self.look(watched)

    def drop(self, watched: Watched) -> None:
        """Forget the lock object, which nobody has from then on."""
        watched.leaving = min(watched.leaving, self.now())
        watched.lock = None

    def cut(self, grant: Grant) -> None:
        """From now on somebody else may have it as well."""
        with self._mutex:
            grant.cut = min(grant.cut, self.now())
            grant.until = min(grant.until, grant.cut)

    def open(self) -> list[Watched]:
        """Those that somebody may still release."""
        return [w for w in list(self.watched) if w.lock is not None and w.leaving == NEVER]

    def clear(self) -> None:
        """Forget everything."""
        with self._mutex:
            self.watched.clear()
            self._grants.clear()

    def _compare(self, grant: Grant) -> None:
        others = [other for other in self._grants[grant.key].values() if other is not grant and other.seen]
        if not grant.seen:
            return
        for other in others:
            if grant.kind.excludes(other.kind):
                self._check_pair(*((grant, other) if grant.since <= other.since else (other, grant)))
        if grant.kind.permits:
            self._check_permits(grant, [other for other in others if other.kind == grant.kind])

    def _check_pair(self, first: Grant, second: Grant) -> None:
        if first.overlap(second) >= 0:
            self._complain(f"both held for {first.overlap(second):.4f} s: {first}; {second}")
        if first.token > second.token:
            self._complain(f"held first, with the larger token: {first}; {second}")
        if second.since < min(first.kept, first.cut) - ROUNDING:
            self._complain(f"held {first.kept - second.since:.3f} s before the minimum hold ended: {first}; {second}")

    def _check_permits(self, grant: Grant, others: list[Grant]) -> None:
        beside = [other for other in others if grant.overlap(other) >= 0]
        for moment in (max(grant.since, other.since) for other in beside):
            held = [grant, *(other for other in beside if other.since <= moment <= other.until)]
            if len(held) > grant.kind.permits:
                self._complain(f"{len(held)} hold {grant.kind} at once: {'; '.join(map(str, held))}")

    def _check_order(self, first: Grant, second: Grant) -> None:
        if first.had < second.asked and first.token > second.token:
            self._complain(f"acquired later, with a smaller token: {first}; {second}")

    def _complain(self, what: str) -> None:
        self.violations.append(what)
