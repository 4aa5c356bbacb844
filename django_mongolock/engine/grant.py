"""What this process knows of one grant that it asked for: the local side of an entry in a lock document."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from typing import Final, Literal

from . import clock
from .document import Terms
from .protocol import Acquisition, Answer, Granted
from .replies import News
from .session.wakeups import Wakeup

#: Why a grant was lost that is not in its document any more.
TAKEN: Final = "it was taken away, or its lease ended on the server"

CLOSED: Final = "its session was closed"

LineKey = tuple[str, str, int, str | None, int]


#: Gives the call to make, which keeps its lock alive from then on; None where the lock is gone.
Callback = Callable[[], Callable[[], object] | None]


class State(Enum):
    """The life of a grant: asked for, held, then given back or lost. It never goes back."""

    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


class OwnerToken:
    """Lives for as long as the program may still release a grant, or is cleaning it up."""

    __slots__ = ("__weakref__",)


class OwnerRef(weakref.ref[OwnerToken]):
    """Calls back when the owner token of *grant* has died."""

    __slots__ = ("grant",)
    grant: Grant


class Grant:
    """One acquisition of one key. Its id is unique, so nothing done to it can touch an earlier or a later one.

    The deadline is by the session's clock, counted from before the command was sent that granted or renewed it, and it
    ends earlier than the lease does on the server. So whoever sees `held` knows that nobody else was let in.

    While it waits, `wakeup` wakes its waiter, and `news`, `answer` and `cancelled` say what there is to hear.

    worker: the thread or task that asked. nested: did that hold another lock when it asked? users: ids of
    the lock objects that share the grant (reentrant locks). acquired_from: the line of the program. max_hold: seconds
    after which it is renewed no more. failures: how many renewals in a row did not get through. release_requested_by:
    who asks for its release.
    renewing: is a renewal of it under way? counts: does its entry count others who wait behind it? sent: was a command
    sent that adds it?
    outcome_unknown: a command that adds it got no answer, so a copy of it may be on its way still, whatever came of the
    next. uncontended: at the last answer, no other grant held the key or waited for it. queued: the place in the
    document's queue that it got, and when. listens_from: when news of it may come by the change stream.
    template: what its key was made from, for statistics. busy: somebody else has the key; held_by: who, in words.
    contended: that was reported. reported: which part of its life was reported to the session's observer. waiter_lease:
    how long it lives in the queue without renewal, in seconds. back_by: when its caller is to be back at the latest.
    """

    __slots__ = (
        "__weakref__",
        "_deadline",
        "_last",
        "_mutex",
        "_now",
        "_since",
        "_until",
        "acquired_at",
        "acquired_from",
        "acquisition",
        "answer",
        "at_head",
        "auto_renew",
        "back_by",
        "began",
        "busy",
        "cancelled",
        "contended",
        "counts",
        "failures",
        "handover_reserved",
        "held_by",
        "id",
        "key",
        "lease",
        "listens_from",
        "max_hold",
        "nested",
        "news",
        "on_lost",
        "on_release_requested",
        "outcome_unknown",
        "owner_ref",
        "queued",
        "reason",
        "release_requested_by",
        "renew_at",
        "renewing",
        "reported",
        "sent",
        "state",
        "template",
        "terms",
        "token",
        "uncontended",
        "users",
        "waited",
        "waiter_lease",
        "wakeup",
        "worker",
    )

    def __init__(
        self,
        grant_id: str,
        key: str,
        terms: Terms,
        *,
        auto_renew: bool,
        worker: object,
        max_hold: float | None = None,
        nested: bool = False,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self.id = grant_id
        self.key = key
        self.terms = terms
        self.auto_renew = auto_renew
        self.max_hold = max_hold
        self.nested = nested
        self.worker = worker
        self.users: tuple[int, ...] = ()
        self.acquired_from = ""
        self.release_requested_by: str | None = None
        self.failures = 0
        self.renewing = False
        self.counts = False
        self.sent = False
        self.outcome_unknown = False
        self.uncontended = False
        self.template = ""
        self.busy = self.contended = False
        self.held_by: str | None = None
        self.reported: Literal["", "acquired", "end"] = ""
        self.acquisition: Acquisition
        self.token = 0
        self.acquired_at: datetime | None = None
        self.waited = 0.0
        self.reason = ""
        self.state = State.WAITING
        self.lease = terms.lease
        self.waiter_lease = terms.waiter_lease
        self._now = now
        self.began = now()
        self.renew_at = self.began + terms.waiter_lease / 3
        self.back_by = float("inf")
        self.on_lost: Callback | None = None
        self.on_release_requested: Callback | None = None
        self._last = float("inf")
        self._since = self._until = 0.0
        self.wakeup = Wakeup()
        self.news: News | None = None
        self.answer: Answer | None = None
        self.cancelled = False
        self.handover_reserved = False
        self.queued: tuple[int, float] | None = None
        self.listens_from = float("inf")
        self.at_head = False
        self.owner_ref: OwnerRef | None = None
        self._deadline = 0.0
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"<Grant {self.key!r} {self.state.value}, token {self.token}, {self.remaining:.1f} s left>"

    @property
    def line(self) -> LineKey:
        """Which line of this process it stands in: its entries in the document would stand beside one another."""
        # Who holds a lock and waits for another stands alone: a deadlock must be there for everybody to see.
        return self.key, self.terms.mode, self.terms.capacity, self.terms.owner, id(self.worker) if self.nested else 0

    @property
    def held(self) -> bool:
        """Is it held, and not past its deadline? Once this has been False after a grant, it stays so."""
        if self.state is State.HELD and (now := self._now()) >= self._deadline:
            self.lose(
                "its lease ended before it was renewed" if now < self._last else "it was held longer than max_hold"
            )
        return self.state is State.HELD

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; 0 if it is not held."""
        return max(0.0, self._deadline - self._now()) if self.state is State.HELD else 0.0

    @property
    def held_for(self) -> float:
        """Seconds that it has been held, or was; of a lost grant, seconds in which nobody else could have it."""
        if self.token == 0:
            return 0.0
        return max(0.0, min(self._deadline, self._until or self._now()) - self._since)

    @property
    def ends_at(self) -> float:
        """When the heartbeat must look at it at the latest: at its deadline, if held; at once, if it was found lost."""
        return self._deadline if self.state in (State.HELD, State.LOST) else float("inf")

    @property
    def length(self) -> float:
        """How long it lives without renewal, in seconds: as a holder, or as a waiter."""
        return self.waiter_lease if self.state is State.WAITING else self.lease

    @property
    def renewable(self) -> bool:
        """Is it to be renewed? A waiter always is: its place must last as long as it waits."""
        if self.renewing:
            return False
        return self.state is State.WAITING or (
            self.state is State.HELD and self.auto_renew and self._deadline < self._last
        )

    @property
    def queued_until(self) -> float:
        """Until when its entry lives at any rate while it waits, and also if it was granted since; 0 if unknown."""
        return self._deadline

    def used_no_more(self, user: int) -> None:
        """A lock object shares it no more."""
        self.users = tuple(other for other in self.users if other != user)

    def enters(self, now: float) -> None:
        """It is about to be queued. It may have stood in line for long before, which nobody renews."""
        self.renew_at = max(self.renew_at, now + self.waiter_lease / 3)

    def hold(self, granted: Granted, waited: float) -> None:
        """It was granted."""
        with self._mutex:
            self.token, self.acquired_at, self.waited = granted.token, granted.acquired_at, waited
            self.uncontended = granted.uncontended
            # The deadline first: to the heartbeat, who may look now, a grant held without one is a grant lost.
            self._last = float("inf") if self.max_hold is None else granted.now + self.max_hold
            self._since = granted.now
            self._deadline = min(granted.until, self._last)
            self.state = State.HELD
            self.renew_at = self._when_to_renew(granted.now)

    def renewed(self, until: float, now: float, lease: float = 0.0) -> None:
        """It lives *until* then at any rate. A loss that was reported stays reported."""
        with self._mutex:
            self.lease = max(self.lease, lease)
            self.failures = 0
            if self.state in (State.WAITING, State.HELD):
                self._deadline = min(max(self._deadline, until), self._last)
            self.renew_at = self._when_to_renew(now)

    def _when_to_renew(self, now: float) -> float:
        """When a third of its time is over."""
        return self._deadline - self._span(now) * 2 / 3

    def _span(self, now: float) -> float:
        """How long it lives from a renewal on. A grant that was queued for has the time of a waiter at first."""
        return self.waiter_lease if self._deadline - now <= self.waiter_lease else self.lease

    def postpone(self, now: float, at_once: bool = False) -> None:
        """The renewal did not get through: try again soon, and a waiter less and less often.

        at_once: a holder does not wait at all. A waiter that fails is one of many when the server is overloaded, and
        has only its place to lose.
        """
        self.failures += 1
        if at_once and self.state is State.HELD:
            self.renew_at = now
            return
        soon = min(1.0, self.length / 10)
        if self.state is State.WAITING:
            soon = min(self.length / 4, soon * 2 ** min(self.failures - 1, 10))
        self.renew_at = now + soon * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing

    def renew_late(self) -> None:
        """Leave its document alone for a while, as long as that is safe: a transaction is going to write to it."""
        with self._mutex:
            self.renew_at = max(self.renew_at, self._deadline - self._span(self._now()) / 3)

    def renew_in_time(self) -> None:
        """Renew it as usual again."""
        with self._mutex:
            self.renew_at = min(self.renew_at, self._when_to_renew(self._now()))

    def lose(self, reason: str) -> bool:
        """It is not ours any more. Return whether that is news."""
        return self._end(State.LOST, reason)

    def release(self) -> bool:
        """It is about to be given back. Return whether it was held until now."""
        return self.held and self._end(State.RELEASED, "released")

    def missed(self, reason: str) -> None:
        """It was not there any more when it was given back: it had been lost before."""
        with self._mutex:
            self.state, self.reason = State.LOST, reason

    def _end(self, state: State, reason: str) -> bool:
        with self._mutex:
            if self.state not in (State.WAITING, State.HELD):
                return False
            self.state, self.reason, self._until = state, reason, self._now()
            return True
