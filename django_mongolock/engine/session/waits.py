"""How the waiters of a session sleep, and what wakes them: a bell, another of them, or the time."""

from __future__ import annotations

from typing import Final

from ...exceptions import LockMisused
from ..protocol.actions import FOREVER, Pause, WaitResult
from ..rule.replies import Bell
from .grant import Grant
from .listener import Listener
from .shared import Shared

#: How long to wait for the answer of a hand-over within the process, in seconds: a signal may have struck its giver.
LONGEST_HANDOVER: Final = 1.0
#: How soon a wait that is cancelled is to end, in seconds: what takes it out of the queue gets no more time.
CANCELLED_WITHIN: Final = 1.0
#: Why a wait has ended, or what was granted is not held.
CLOSED_WAITER: Final = "the session was closed while a waiter was in it"


class Waits:
    """Carries out the pauses of a session's protocols."""

    def __init__(self, session: Shared) -> None:
        self._session = session
        self.listener = Listener(session.store, session.id, self.hear, self._is_waited, self.look, now=session.now)
        session.store.hearers[session.id] = self.hear
        self._closed = False

    def pause(self, pause: Pause) -> WaitResult:
        """Wait in this thread."""
        grant = self._session.queue.waiting[pause.grant]
        self._session.notifications.contended(grant)
        grant.waiting.wait(self._seconds(pause, grant))
        return self.result(grant)

    async def apause(self, pause: Pause) -> WaitResult:
        """See pause()."""
        grant = self._session.queue.waiting[pause.grant]
        self._session.notifications.contended(grant)
        await grant.waiting.await_(self._seconds(pause, grant))
        return self.result(grant)

    def cancel(self, grant: Grant) -> None:
        """End the wait for *grant*, from any thread."""
        grant.waiting.back_by = min(grant.waiting.back_by, self._session.now() + CANCELLED_WITHIN)
        grant.waiting.cancelled = True
        grant.waiting.wake()

    def hear(self, bell: Bell) -> None:
        """Wake the waiter that was granted the lock; look at a lock that is to be released."""
        if bell.news is None:
            if (held := self._session.registry.grants.get(bell.grant)) is not None:
                held.lease.once_more = True  # one that is under way may have read before
                held.lease.renew_at = self._session.now()
                self._session.heartbeat.see_to(held.lease.renew_at)
        elif (grant := self._session.queue.waiting.get(bell.grant)) is not None:
            known = grant.waiting.news
            grant.waiting.news = bell.news if known is None or known.token < bell.news.token else known
            grant.waiting.wake()

    def look(self) -> None:
        """Have every waiter look: bells may have passed unheard."""
        for grant in list(self._session.queue.waiting.values()):
            grant.waiting.wake()

    def listen(self) -> None:
        """Have the bells heard from now on."""
        if not self.listener.want():
            self._session.heartbeat.elsewhere(self.listener.start)

    def close(self) -> None:
        """Every wait ends at its next look."""
        self._closed = True
        self.listener.close()

    def _is_waited(self) -> bool:
        """Whether bells may concern this session."""
        grants = list(self._session.registry.grants.values())
        return bool(self._session.queue.waiting) or any(
            "on_release_requested" in user.calls for grant in grants for user in grant.users
        )

    def _seconds(self, pause: Pause, grant: Grant) -> float:
        if pause.poll == FOREVER:
            return pause.timer
        self.listen()
        timer = min(pause.timer, LONGEST_HANDOVER) if grant.waiting.handover_reserved else pause.timer
        return timer if self.listener.listening else min(timer, pause.poll)

    def result(self, grant: Grant) -> WaitResult:
        """What is known after a pause."""
        if self._closed:
            raise LockMisused(CLOSED_WAITER)
        waiting = grant.waiting
        answer, waiting.answer = waiting.answer, None
        turn, first = self._session.queue.turn(grant)
        holder = (grant if first is None else first).reporting.held_by
        # In this order: who notes a new end has noted before what the key's token was then.
        queued_until, last_token = grant.lease.until, waiting.last_token
        return WaitResult(
            self._session.now(), waiting.news, answer, queued_until, last_token, turn, waiting.cancelled, holder
        )
