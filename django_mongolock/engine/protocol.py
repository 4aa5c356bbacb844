"""What to send when: the protocol of one grant, as generators.

They decide; they never wait, read a clock, or do I/O. They yield actions (`Apply`, `GiveBack`, `Look`, `Pause`) and
are sent the outcome, or thrown the error, by one of the two drivers. So the same lines serve threads and coroutines,
and their tests need no server. (psycopg's ``generators.py`` and ``transaction.py`` are the model.)
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ..exceptions import LockBackendError, LockNotAcquired, LockQueueFull
from .document import Reply, Terms, milliseconds
from .step import Step

#: How long an id that was given up stays under a tombstone, in milliseconds: longer than any network holds up a
#: command that may still arrive.
BURIAL = 600_000


@dataclass(frozen=True, slots=True)
class Apply:
    """Send a step. Outcome: an `Answer`."""

    key: str
    step: Step


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Remove grants, without waiting for the majority. Outcome: was one of them there?"""

    key: str
    step: Step


@dataclass(frozen=True, slots=True)
class Look:
    """Read how a grant stands, by what the majority has. Outcome: an `Answer`."""

    key: str
    grant: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds, or less if there is news of the grant. Outcome: the time after it."""

    seconds: float
    grant: str


Action = Apply | GiveBack | Look | Pause
T = TypeVar("T")
Protocol = Generator[Action, Any, T]


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, and when the command was sent and answered, in seconds of the local clock."""

    reply: Reply
    sent: float
    now: float


@dataclass(frozen=True, slots=True)
class Request:
    """One acquisition: its key, its id, the entry to queue, its terms, and a number for its own renewal."""

    key: str
    grant: str
    entry: dict[str, Any]
    terms: Terms
    beat: int

    def enter(self, trial: bool) -> Apply:
        return Apply(self.key, Step(ask=self.grant, add=self.entry, trial=trial))

    def confirm(self) -> Apply:
        return Apply(self.key, Step(ask=self.grant, renew=(self.grant,), beat=self.beat))

    def look(self) -> Look:
        return Look(self.key, self.grant)


@dataclass(frozen=True, slots=True)
class Polling:
    """How often to look while there is nobody to tell: full jitter under a growing ceiling. Times in seconds.

    The ceiling starts low when somebody has moved up in the queue, and lower the nearer to its head.
    """

    shortest: float = 0.02
    longest: float = 1.0

    def pause(self, looks: int, place: int) -> float:
        """How long to wait after so many *looks* from this *place* in the queue."""
        ceiling = min(self.longest, self.shortest * (place + 1) * 2 ** min(looks // 4, 16))
        return max(self.shortest / 4, random.uniform(0, ceiling))  # noqa: S311 - spreads load, guards nothing


def acquire(request: Request, wait: float | None, now: float, polling: Polling = Polling()) -> Protocol[Answer]:
    """Queue for the grant and wait until it is there. *wait*: at most so many seconds, 0 for a single try, None
    for as long as it takes. *now* is the time.

    Returns the answer that grants it for a whole lease. Raises LockNotAcquired if it was not granted in time; it
    is then not in the queue any more. After any other error its outcome is unknown: settle it (`abandon`).
    """
    started, deadline = now, float("inf") if wait is None else now + wait
    trial, looks, place = wait == 0, 0, -1
    action: Apply | Look = request.enter(trial)
    while True:
        answer = yield from _persistently(action, request, now, deadline)
        reply, now = answer.reply, answer.now
        if reply.held and not _is_whole(reply, request.terms):
            # Granted by somebody else's change, on a short first lease: take it for a whole one.
            action = request.confirm()
            continue
        if reply.held and not isinstance(action, Look):
            if now >= answer.sent + request.terms.lease:
                raise LockBackendError("the answer took longer than the lease that it grants", request.key)
            return answer
        if trial:
            raise LockNotAcquired(request.key, now - started, reply.holder, max(0.0, reply.first_end or 0.0))
        if isinstance(action, Apply) and action.step.add and reply.place is None:
            raise LockQueueFull(request.key, now - started, reply.holder)
        if reply.held:
            action = request.confirm()
        elif reply.place is None or reply.first_end is None or reply.first_end <= 0:
            # Not in the queue any more, or nobody holds the lock: an update prunes and grants.
            action = request.enter(trial)
        else:
            looks = looks + 1 if reply.place == place else 0
            place = reply.place
            pause = polling.pause(looks, place)
            if place == 0:
                pause = min(pause, reply.first_end)
            now = yield Pause(max(0.0, min(pause, deadline - now)), request.grant)
            trial = now >= deadline
            action = request.enter(trial) if trial else request.look()


def _is_whole(reply: Reply, terms: Terms) -> bool:
    return reply.left is not None and milliseconds(reply.left) >= milliseconds(terms.term)


def _persistently(action: Apply | Look, request: Request, now: float, deadline: float) -> Protocol[Answer]:
    """Send *action* again while that may help: once at any rate, and then until *deadline*."""
    failures = 0
    while True:
        try:
            answer: Answer = yield action
        except LockBackendError as error:
            failures += 1
            if not error.passing or (failures > 1 and now >= deadline):
                raise
        else:
            return answer
        now = yield Pause(random.uniform(0, min(1.0, 0.05 * 2 ** min(failures, 10))), request.grant)  # noqa: S311


def release(key: str, grant: str, bury: bool = False) -> Protocol[bool]:
    """Give the grant back; *bury* its id if a copy of its command may still arrive. Returns whether it was there."""
    was_there: bool = yield GiveBack(key, Step(remove=(grant,), bury=BURIAL if bury else 0))
    return was_there


def extend(key: str, grant: str, lease: int, term: int, beat: int) -> Protocol[Answer]:
    """Push the end of the grant to *lease* milliseconds from now, never nearer. The answer tells if it is held."""
    answer: Answer = yield Apply(key, Step(ask=grant, renew=(grant,), lease=lease, term=term, beat=beat))
    return answer


def settle(key: str, grant: str) -> Protocol[Answer]:
    """See to it that the grant is gone and stays so, whatever became of the commands that were sent for it."""
    answer: Answer = yield Apply(key, Step(ask=grant, remove=(grant,), force=True, bury=BURIAL))
    return answer
