"""What this process knows of one grant that it asked for: the local side of an entry in a lock document."""

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
from .wakeups import Waiting

#: Why a grant was lost that is not in its document any more.
NOT_FOUND: Final = "it was taken away, or its lease ended on the server"

CLOSED: Final = "its session was closed"

LineKey = tuple[str, str, int, int, str | None, int]


class State(Enum):
    """The life of a grant: asked for, held, then released or lost. It never goes back.

    RELEASED: it was held, and is to be released; its command may not have been sent yet. If the command finds that it
    was not there any more, it is LOST after all (`by_release` of `mark_lost`).
    """

    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


class OwnerToken:
    """Lives for as long as there is code that may still release a grant, or clean up after it."""

    __slots__ = ("__weakref__",)


class OwnerRef(weakref.ref[OwnerToken]):
    """Reports, by its callback, that the owner token of *grant* has died.

    Cleaning up is Python code, and a second signal may strike in it. That an object dies and its reference is put into
    a queue is done by the interpreter, and always happens: the callback is no Python, which a signal could strike.
    """

    __slots__ = ("grant",)
    grant: Grant


@dataclass(frozen=True, slots=True, eq=False)
class User:
    """A lock object that has a grant, through one acquisition; it may be collected. calls: by names of options."""

    lock: weakref.ref[object]
    calls: dict[str, Callable[[Any], object]]


@dataclass(slots=True, eq=False)
class Lease:
    """How long a grant lives without renewal, and when it is renewed. Times are by the session's clock, in seconds.

    length: of the holder's lease; waiter_length: of the waiter's. until: the deadline; while it waits, the time until
    which its entry lives, even if it was granted since; 0 if unknown. since: when it was granted. last: when it has
    been held for *max_hold*, after which it is renewed no more. failures: how many renewals in a row failed. stuck: a
    renewal failed for this grant alone while others succeeded, so it is renewed alone. renewing: one is under way.
    once_more: there was news since that began, so it is renewed again. deferred: it is renewed as late as is safe, and
    not before that along with others. uncontended: as that of `Granted`, and when last heard of, none waited.
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
        """How long it lives from a renewal on. A grant that was queued for has the time of a waiter at first."""
        return self.waiter_length if self.until - now <= self.waiter_length else self.length

    def next_renewal(self, now: float) -> float:
        """When a third of its time is over, or two thirds if it is deferred."""
        return self.until - self.span(now) * (1 if self.deferred else 2) / 3

    def put_off(self, seconds: float) -> None:
        """It was renewed all the time, for so long."""
        self.until += seconds
        self.renew_at += seconds


@dataclass(slots=True, eq=False)
class Reporting:
    """What is reported of a grant: to logs, to the session's observer, and to its caller.

    template: what its key was made from, for statistics. busy: another grant has the key; held_by: whose, in words.
    contended: that was reported. reported: which part of its life was reported last. waited: seconds until it was
    acquired, or given up. held_for: seconds that it was held. release_requested_by: who asks for its release.
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
    """One acquisition of one key. Its id is unique, so nothing done to it can touch an earlier or a later one.

    Its deadline is counted from before the command was sent that granted or renewed it, and it ends earlier than the
    lease does on the server. So code that sees `held` knows that no other grant was let in.

    line: which line of this process it stands in. The grants of a line compete on the same terms, and only the
    first of them stands in the queue of the document. worker: the thread or task that asked. releaser: the one that
    releases it now. users: the lock objects that share it (reentrant locks); the last one stays noted, to be told of a
    loss. acquired_from: the line of the program. owner_ref: refers to what is alive while there is code that may
    release it; None when all is done. outcome_unknown: a command that adds it got no answer, so a copy of it may still
    arrive, whatever came of the next.
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
        # A holder that waits for another lock stands in a line of its own: the document must show every deadlock.
        own = id(self.worker) if acquisition.nested else 0
        self.line = self.key, terms.mode, terms.capacity, terms.weight, terms.owner, own
        renew_at = began + terms.waiter_lease / 3
        self.lease = Lease(terms.lease, terms.waiter_lease, renew_at, auto_renew, max_hold)
        self.waiting = Waiting(began)

    def __repr__(self) -> str:
        return f"<Grant {self.key!r} {self.state.value}, token {self.token}, {self.remaining:.1f} s left>"

    @property
    def held(self) -> bool:
        """Whether it is held; who asks first after its deadline finds it lost. After a grant, False is for ever."""
        if self.state is State.HELD and (now := self.now()) >= self.lease.until:
            early = now < self.lease.last
            self.mark_lost("its lease ended before it was renewed" if early else "it was held longer than max_hold")
        return self.state is State.HELD

    @property
    def lost(self) -> bool:
        """Whether it is not held any more, and was not released."""
        return not self.held and self.state is State.LOST

    @property
    def in_doubt(self) -> bool:
        """Whether a command that adds it may still arrive: one without an answer, or of another grant's hand-over."""
        # In this order: `finish_handover` writes the second before the first.
        return self.waiting.handover_reserved or self.outcome_unknown

    def needs_tombstone(self) -> bool:
        """Return whether the command that takes it out of its document is to leave a tombstone; ask before it is sent.

        The answer is kept, as `outcome_unknown`: a hand-over that ends meanwhile does not change it, and also if the
        grant is found lost, a copy may be left.
        """
        if self.in_doubt:
            self.outcome_unknown = True
        return self.outcome_unknown

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; 0 if it is not held."""
        return max(0.0, self.lease.until - self.now()) if self.state is State.HELD else 0.0

    @property
    def held_for(self) -> float:
        """Seconds that it has been held until now; of a lost grant, seconds in which it excluded all others."""
        return 0.0 if self.token == 0 else max(0.0, min(self.lease.until, self.now()) - self.lease.since)

    @property
    def ends_at(self) -> float:
        """When the heartbeat must look at it: at its deadline, which is over for one that `held` has found lost."""
        return self.lease.until if self.state in (State.HELD, State.LOST) else FOREVER

    @property
    def length(self) -> float:
        """How long it lives without renewal, in seconds: as a holder, or as a waiter."""
        return self.lease.waiter_length if self.state is State.WAITING else self.lease.length

    @property
    def renewable(self) -> bool:
        """Whether it is to be renewed. A waiter always is: its place must last as long as it waits."""
        lease = self.lease
        if lease.renewing:
            return False
        return self.state is State.WAITING or (
            self.state is State.HELD and lease.auto_renew and lease.until < lease.last
        )

    def new_owner_token(self, report: Callable[[OwnerRef], object]) -> OwnerToken:
        """Return its owner token. If that dies before all is done, *report* has the heartbeat clean up."""
        token = OwnerToken()
        self.owner_ref = OwnerRef(token, report)
        self.owner_ref.grant = self
        return token

    def add_user(self, user: User) -> bool:
        """Let *user* have it, too. Return whether it is still held."""
        with self._mutex:
            if self.state is State.HELD:
                self.users = (*self._users_but(user.lock), user)
            return self.state is State.HELD

    def _users_but(self, lock: weakref.ref[object] | None) -> tuple[User, ...]:
        return tuple(user for user in self.users if user.lock is not lock and user.lock() is not None)

    def end_is_news(self) -> bool:
        """Return, once, that it was reported to be acquired, and that its end is to be."""
        with self._mutex:
            if is_news := self.reporting.reported == "acquired":
                self.reporting.reported = "end"
            return is_news

    def mark_held(self, granted: Granted) -> bool:
        """Note that it was granted. Return False where it has ended before, as its session was closed meanwhile."""
        lease = self.lease
        with self._mutex:
            if self.state is not State.WAITING:
                return False
            self.token, self.acquired_at = granted.token, granted.acquired_at
            self.reporting.waited = granted.now - self.waiting.began
            lease.uncontended = granted.uncontended
            # The deadline first: to the heartbeat, which may look now, a grant held without one is a grant lost.
            lease.last = min(lease.last, FOREVER if lease.max_hold is None else granted.now + lease.max_hold)
            lease.since = granted.now
            lease.until = min(granted.until, lease.last)
            self.state = State.HELD
            lease.renew_at = lease.next_renewal(granted.now)
            return True

    def renewed(self, until: float, now: float, length: float = 0.0) -> None:
        """Believe in the last command: it lives until then. A loss that was reported already stays reported.

        What a command has given that was sent later, and answered before, stands: no end comes nearer.
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
        """Note that a renewal, *sent* then, has not found this waiter. Return False if its place may be newer."""
        with self._mutex:
            if self.state is not State.WAITING or sent < self.lease.until - self.lease.waiter_length:
                return False
            self.lease.until, self.lease.renew_at, self.waiting.place_gone = 0.0, FOREVER, True
            return True

    def postpone(self, now: float, at_once: bool = False) -> None:
        """The renewal did not get through: try again soon, and a waiter less and less often.

        at_once: a holder does not wait at all. A waiter that fails is one of many when the server is overloaded, and
        has only its place to lose.
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
        """Leave its document alone for a while, as long as that is safe: a transaction is going to write to it."""
        with self._mutex:
            self.lease.deferred = True
            self.lease.renew_at = max(self.lease.renew_at, self.lease.next_renewal(self.now()))

    def resume_renewals(self) -> None:
        """Renew it as usual again."""
        with self._mutex:
            self.lease.deferred = False
            self.lease.renew_at = min(self.lease.renew_at, self.lease.next_renewal(self.now()))

    def mark_lost(self, reason: str, *, by_release: bool = False) -> bool:
        """Note that it is not ours any more. Return whether that is news.

        by_release: it was about to be released, and was not there, though no other part of its session released it.
        """
        return bool(self._end(State.LOST, reason, by_release=by_release))

    def owner_token(self) -> OwnerToken | None:
        """Its owner token, while it is held; None if the heartbeat is about to release it, since no code can."""
        return self.owner_ref() if self.held and self.owner_ref is not None else None

    def mark_released(self) -> bool:
        """Note that it is about to be released. Return whether it was held until now."""
        return self.held and bool(self._end(State.RELEASED, "released"))

    def drop_user(self, lock: weakref.ref[object]) -> bool | None:
        """See mark_released(). While other lock objects than *lock* have it, it stays held, and None is returned."""
        return self.held and self._end(State.RELEASED, "released", leaving=lock)

    def _end(self, state: State, reason: str, *, by_release: bool = False, leaving: Any = None) -> bool | None:
        with self._mutex:
            only = len(self.users) == 1 and self.users[0].lock is leaving  # makes nothing, under the mutex
            if leaving is not None and not only and (others := self._users_but(leaving)):
                self.users = others
                return None
            if self.state not in (State.WAITING, State.HELD):
                if not (by_release and self.state is State.RELEASED and self.reason != CLOSED):
                    return False
            else:  # of a released one, how long it was held was noted before
                self.reporting.held_for = self.held_for
            self.state, self.reason = state, reason
            return True
