"""The local state of one grant that this process has asked for. Its counterpart is an entry in a lock document."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Final, Literal

from .. import clock
from ..protocol.actions import FOREVER, Acquisition, Granted
from ..rule.document import Terms
from ..rule.replies import Found
from .wakeups import Waiting

#: The reason for the loss of a grant that is missing from its document.
NOT_FOUND: Final = "it was taken away, or its lease ended on the server"

CLOSED: Final = "its session was closed"

LineKey = tuple[str, str, int, int, str | None, int]


class State(Enum):
    """The life of a grant: asked for, held, then released or lost. No state comes back.

    RELEASED means that the grant was held and is to be released, even before its command is sent. If the command finds
    no grant, the grant is LOST after all (`by_release` of `mark_lost`).
    """

    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


class OwnerToken:
    """An object that lives as long as there is code that may still release a grant, or clean up after it."""

    __slots__ = ("__weakref__",)


class OwnerRef(weakref.ref[OwnerToken]):
    """A reference whose callback reports that the owner token of *grant* has died.

    Cleaning up is Python code, and a second signal may interrupt it. The death of an object and the callback of its
    reference are operations of the interpreter. They always happen, because the callback is no Python code that a
    signal could interrupt.
    """

    __slots__ = ("grant",)
    grant: Grant


@dataclass(frozen=True, slots=True, eq=False)
class User:
    """A lock object that has a grant through one acquisition. The object may be garbage-collected.

    - calls: callbacks, by names of options.
    """

    lock: weakref.ref[object]
    calls: dict[str, Callable[[Any], object]]


@dataclass(slots=True, eq=False)
class Lease:
    """The deadline and the renewals of a grant. Times are by the session's clock, in seconds.

    - length: length of the holder's lease.
    - waiter_length: length of the waiter's lease.
    - until: deadline. For a waiter, the time until which its entry lives, even if it was granted meanwhile. 0 if
      unknown.
    - since: time of the grant.
    - last: time at which the grant has been held for *max_hold*. No renewal follows.
    - failures: number of renewals in a row that failed.
    - stuck: whether a renewal failed for this grant alone while others succeeded. Such a grant is renewed alone.
    - renewing: whether a renewal is under way.
    - once_more: whether news came since that renewal began. Another renewal follows.
    - deferred: whether the grant is renewed as late as is safe, and not earlier along with others.
    - uncontended: as in `Granted`, and no grant waited at the last answer.
    """

    length: float
    waiter_length: float
    renew_at: float
    auto_renew: bool
    max_hold: float | None
    until: float = 0.0
    since: float = 0.0
    last: float = FOREVER
    failures: int = 0
    stuck: bool = False
    renewing: bool = False
    once_more: bool = False
    deferred: bool = False
    uncontended: bool = False

    def span(self, now: float) -> float:
        """Return the seconds that the grant lives from a renewal on.

        A grant that waited in the queue has the time of a waiter at first.
        """
        return self.waiter_length if self.until - now <= self.waiter_length else self.length

    def next_renewal(self, now: float) -> float:
        """Return the time when a third of the lease is over, or two thirds if it is deferred."""
        return self.until - self.span(now) * (1 if self.deferred else 2) / 3

    def put_off(self, seconds: float) -> None:
        """Move the deadline by *seconds* in which the grant was renewed all the time."""
        self.until += seconds
        self.renew_at += seconds


@dataclass(slots=True, eq=False)
class Reporting:
    """The facts of a grant that logs, the session's observer and the caller get.

    - template: template of its key, for statistics.
    - busy: whether another grant has the key.
    - held_by: holder of that grant, in words.
    - contended: whether the contention was reported.
    - reported: part of its life that was reported last.
    - waited: seconds until the grant was acquired or given up.
    - held_for: seconds for which the grant was held.
    - release_requested_by: requester of its release.
    """

    template: str = ""
    busy: bool = False
    held_by: str | None = None
    contended: bool = False
    reported: Literal["", "acquired", "end"] = ""
    waited: float = 0.0
    held_for: float = 0.0
    release_requested_by: str | None = None


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Grant:
    """One acquisition of one key. The id is unique, so no command for this grant can touch an earlier or a later one.

    The deadline is counted from before the command was sent that granted or renewed it. It ends earlier than the lease
    on the server. Code that sees `held` therefore knows that no other grant was let in.

    - line: key of its line in this process. The grants of a line compete on the same terms. Only the first of them
      stands in the queue of the document.
    - worker: thread or task that asked.
    - releaser: thread or task that is releasing it now.
    - users: lock objects that share it (reentrant locks). The last one stays here, because it is told of a loss.
    - acquired_from: line of the program.
    - owner_ref: reference to an object that lives while there is code that may release it. None when all is done.
    - outcome_unknown: whether a command that adds it got no answer. A copy of that command may still arrive,
      whatever the outcome of the next command was.
    """

    acquisition: Acquisition
    _: KW_ONLY
    worker: object
    auto_renew: InitVar[bool]
    max_hold: InitVar[float | None] = None
    now: Callable[[], float] = clock.now
    id: str = field(init=False)
    key: str = field(init=False)
    terms: Terms = field(init=False)
    line: LineKey = field(init=False)
    users: tuple[User, ...] = ()
    releaser: object = None
    acquired_from: str = ""
    acquired_at: datetime | None = None
    owner_ref: OwnerRef | None = None
    outcome_unknown: bool = False
    token: int = 0
    state: State = State.WAITING
    reason: str = ""
    lease: Lease = field(init=False)
    reporting: Reporting = field(default_factory=Reporting)
    waiting: Waiting = field(init=False)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, auto_renew: bool, max_hold: float | None) -> None:
        began, acquisition, terms = self.now(), self.acquisition, self.acquisition.terms
        self.id, self.key, self.terms = acquisition.grant, acquisition.key, terms
        # A holder that waits for another lock has a line of its own, because the document must show every deadlock.
        own = id(self.worker) if acquisition.nested else 0
        self.line = self.key, terms.mode, terms.capacity, terms.weight, terms.owner, own
        renew_at = began + terms.waiter_lease / 3
        self.lease = Lease(terms.lease, terms.waiter_lease, renew_at, auto_renew, max_hold)
        self.waiting = Waiting(began)

    def __repr__(self) -> str:
        return f"<Grant {self.key!r} {self.state.value}, token {self.token}, {self.remaining:.1f} s left>"

    @property
    def held(self) -> bool:
        """Whether the grant is held.

        The first reader after the deadline marks it lost. After a grant, False is final.
        """
        if self.state is State.HELD and (now := self.now()) >= self.lease.until:
            early = now < self.lease.last
            self.mark_lost("its lease ended before it was renewed" if early else "it was held longer than max_hold")
        return self.state is State.HELD

    @property
    def lost(self) -> bool:
        """Whether the grant is no longer held, and was not released."""
        return not self.held and self.state is State.LOST

    @property
    def in_doubt(self) -> bool:
        """Whether a command that adds the grant may still arrive: one without an answer, or a hand-over of another
        grant.
        """
        # Read `handover_reserved` first. `finish_handover` writes the two in the opposite order.
        return self.waiting.handover_reserved or self.outcome_unknown

    def needs_tombstone(self) -> bool:
        """Return whether the removing command has to leave a tombstone. Ask before that command is sent.

        The answer is kept as `outcome_unknown`. A hand-over that ends meanwhile does not change it. If the grant is
        found lost, a copy of the command may still remain.
        """
        if self.in_doubt:
            self.outcome_unknown = True
        return self.outcome_unknown

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0 if the grant is not held."""
        return max(0.0, self.lease.until - self.now()) if self.state is State.HELD else 0.0

    @property
    def held_for(self) -> float:
        """Seconds for which the grant has been held. For a lost grant, the seconds in which it excluded all others."""
        return 0.0 if self.token == 0 else max(0.0, min(self.lease.until, self.now()) - self.lease.since)

    @property
    def ends_at(self) -> float:
        """The time at which the heartbeat must look at the grant.

        If `held` has found the grant lost, that deadline is over.
        """
        return self.lease.until if self.state in (State.HELD, State.LOST) else FOREVER

    @property
    def length(self) -> float:
        """Seconds that the grant lives without renewal, as a holder or as a waiter."""
        return self.lease.waiter_length if self.state is State.WAITING else self.lease.length

    @property
    def renewable(self) -> bool:
        """Whether the grant has to be renewed.

        A waiter always has to, because its place must last as long as its wait.
        """
        lease = self.lease
        if lease.renewing:
            return False
        return self.state is State.WAITING or (
            self.state is State.HELD and lease.auto_renew and lease.until < lease.last
        )

    def new_owner_token(self, report: Callable[[OwnerRef], object]) -> OwnerToken:
        """Return its owner token. If the token dies before all is done, *report* has the heartbeat clean up."""
        token = OwnerToken()
        self.owner_ref = OwnerRef(token, report)
        self.owner_ref.grant = self
        return token

    def add_user(self, user: User) -> bool:
        """Add *user*. Return whether the grant is still held."""
        with self._mutex:
            if self.state is State.HELD:
                self.users = (*self._users_but(user.lock), user)
            return self.state is State.HELD

    def _users_but(self, lock: weakref.ref[object] | None) -> tuple[User, ...]:
        return tuple(user for user in self.users if user.lock is not lock and user.lock() is not None)

    def end_is_news(self) -> bool:
        """Return whether the acquisition was reported and the end was not. Only the first call returns True."""
        with self._mutex:
            if is_news := self.reporting.reported == "acquired":
                self.reporting.reported = "end"
            return is_news

    def mark_held(self, granted: Granted) -> bool:
        """Record the grant as held. Return False if it has ended already because its session was closed."""
        lease = self.lease
        with self._mutex:
            if self.state is not State.WAITING:
                return False
            self.token, self.acquired_at = granted.token, granted.acquired_at
            self.reporting.waited = granted.now - self.waiting.began
            lease.uncontended = granted.uncontended
            # Set the deadline first. The heartbeat may look now, and would take a held grant without a deadline for
            # lost.
            lease.last = min(lease.last, FOREVER if lease.max_hold is None else granted.now + lease.max_hold)
            lease.since = granted.now
            lease.until = min(granted.until, lease.last)
            self.state = State.HELD
            lease.renew_at = lease.next_renewal(granted.now)
            return True

    def renewed(self, until: float, now: float, length: float = 0.0) -> None:
        """Move the deadline to *until*, as the last command allows. A loss that was reported stays reported.

        If a later command has been answered earlier, the deadline from that command stands. No deadline moves
        backwards.
        """
        lease = self.lease
        with self._mutex:
            if until < lease.until:
                return
            lease.length = max(lease.length, length)
            lease.failures, lease.stuck = 0, False
            if self.state in (State.WAITING, State.HELD):
                lease.until = min(until, lease.last)
            lease.renew_at = lease.next_renewal(now)

    def place_is_gone(self, sent: float) -> bool:
        """Record that a renewal *sent* at that time did not find this waiter.

        Return False if its place may be newer. Only a renewal that was sent after the last answer is certainly carried
        out after the command of that answer.
        """
        with self._mutex:
            if self.state is not State.WAITING or sent < self.waiting.seen_at:
                return False
            self.lease.until, self.lease.renew_at, self.waiting.place_gone = 0.0, FOREVER, True
            return True

    def look_at_queue(self, found: Found) -> bool:
        """Wake this waiter if it is not in the queue any more, or has moved up to its head. Return whether it has."""
        waiting = self.waiting
        if self.id in found.waiters:
            # The first waiter must know when the holder's lease ends.
            if next(iter(found.waiters)) != self.id or waiting.at_head >= found.token:
                return False
            waiting.at_head = found.token
        waiting.wake()  # otherwise granted without its bell being heard, or gone from the queue
        return True

    def postpone(self, now: float, at_once: bool = False) -> None:
        """Schedule the next try after a failed renewal. A waiter backs off exponentially.

        A failing waiter is one of many when the server is overloaded, and can lose only its place.

        - at_once: whether a holder tries again without a pause. A waiter always pauses.
        """
        lease = self.lease
        lease.failures += 1
        if at_once and self.state is State.HELD:
            lease.renew_at = now
            return
        soon = min(1.0, self.length / 10)
        if self.state is State.WAITING:
            soon = min(self.length / 4, soon * 2 ** min(lease.failures - 1, 10))
        lease.renew_at = now + soon * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing

    def defer_renewals(self) -> None:
        """Leave the document alone as long as that is safe, because a transaction is going to write to it."""
        with self._mutex:
            self.lease.deferred = True
            self.lease.renew_at = max(self.lease.renew_at, self.lease.next_renewal(self.now()))

    def resume_renewals(self) -> None:
        """Renew the grant as usual again."""
        with self._mutex:
            self.lease.deferred = False
            self.lease.renew_at = min(self.lease.renew_at, self.lease.next_renewal(self.now()))

    def mark_lost(self, reason: str, *, by_release: bool = False) -> bool:
        """Record that the grant is lost. Return whether that is news.

        - by_release: whether the release did not find the grant, although no other part of its session released it.
        """
        return bool(self._end(State.LOST, reason, by_release=by_release))

    def owner_token(self) -> OwnerToken | None:
        """Return its owner token while the grant is held.

        Return None if the heartbeat is about to release it, because no code can.
        """
        return self.owner_ref() if self.held and self.owner_ref is not None else None

    def mark_released(self) -> bool:
        """Record that the grant is about to be released. Return whether it was held until now."""
        return self.held and bool(self._end(State.RELEASED, "released"))

    def drop_user(self, lock: weakref.ref[object]) -> bool | None:
        """See mark_released(). If other lock objects than *lock* have the grant, keep it held and return None."""
        return self.held and self._end(State.RELEASED, "released", leaving=lock)

    def _end(self, state: State, reason: str, *, by_release: bool = False, leaving: Any = None) -> bool | None:
        with self._mutex:
            only = len(self.users) == 1 and self.users[0].lock is leaving  # allocates nothing under the mutex
            if leaving is not None and not only and (others := self._users_but(leaving)):
                self.users = others
                return None
            if self.state not in (State.WAITING, State.HELD):
                if not (by_release and self.state is State.RELEASED and self.reason != CLOSED):
                    return False
            else:  # the hold of a released grant was recorded before
                self.reporting.held_for = self.held_for
            self.state, self.reason = state, reason
            return True
