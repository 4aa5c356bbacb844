"""How the waiters of a session sleep, and what wakes them: news of the change stream, another of them, or the time."""

from __future__ import annotations

from typing import Final

from ...exceptions import LockMisused
from ..actions import FOREVER, Pause, WaitResult
from ..grant import Grant
from ..replies import News
from ..store import Store
from .change_stream import ChangeStream
from .heartbeat import Heartbeat
from .local_queue import LocalQueue
from .notifications import Notifications

#: How long to wait for the answer of a hand-over within the process, in seconds: a signal may have struck its giver.
LONGEST_HANDOVER: Final = 1.0
#: With more waiters than this in one process, its change stream does not rest: to ask all of them costs more.
CROWD: Final = 64


class Waits:
    """Carries out the pauses of a session's protocols."""

    def __init__(
        self, store: Store, session: str, heartbeat: Heartbeat, queue: LocalQueue, notifications: Notifications
    ) -> None:
        self._now = heartbeat.now
        self.stream = ChangeStream(store, session, self.hear, self._expected, self.look, now=self._now)
        self._store = store
        self._heartbeat = heartbeat
        self._queue = queue
        self._notifications = notifications
        self._look_at = FOREVER
        self._closed = False

    def pause(self, pause: Pause) -> WaitResult:
        """Wait in this thread."""
        grant = self._queue.waiting[pause.grant]
        self._notifications.contended(grant)
        grant.waiting.wait(self._seconds(pause, grant))
        return self.result(grant)

    async def apause(self, pause: Pause) -> WaitResult:
        """See pause()."""
        grant = self._queue.waiting[pause.grant]
        self._notifications.contended(grant)
        await grant.waiting.await_(self._seconds(pause, grant))
        return self.result(grant)

    def cancel(self, grant: Grant) -> None:
        """End the wait for *grant*, from any thread."""
        grant.waiting.cancelled = True
        grant.waiting.wake()

    def hear(self, grant_id: str, news: News) -> None:
        """The change stream says that a grant is held."""
        if (grant := self._queue.waiting.get(grant_id)) is not None:
            grant.waiting.news = news
            grant.waiting.listens_from = FOREVER  # at once: the stream must not be read on for it
            grant.waiting.wake()

    def look(self, after: float = 0.0) -> None:
        """Every waiter must look, *after* so many seconds: news may have passed unheard."""
        if after > 0:
            self._look_at = self._now() + after
            self._heartbeat.see_to(self._look_at)
            return
        for grant in list(self._queue.waiting.values()):
            grant.waiting.wake()

    def next_due(self) -> float:
        """See Chore."""
        return self._look_at

    def do_due(self, now: float) -> None:
        """See Chore."""
        if self._look_at <= now:
            self._look_at = FOREVER
            self.look()

    def close(self) -> None:
        """Every wait ends at its next look."""
        self._closed = True
        self.stream.close()

    def _expected(self) -> float:
        """When the next news from the change stream may come."""
        waiting = list(self._queue.waiting.values())
        if len(waiting) > CROWD:
            return 0.0
        return min((grant.waiting.listens_from for grant in waiting), default=FOREVER)

    def _seconds(self, pause: Pause, grant: Grant) -> float:
        if pause.poll == FOREVER:
            return pause.timer
        grant.waiting.listens_from = self._now() + pause.skip_stream_for
        if not self.stream.want(grant.waiting.listens_from):
            self._heartbeat.elsewhere(self.stream.start)
        timer = min(pause.timer, LONGEST_HANDOVER) if grant.waiting.handover_reserved else pause.timer
        return timer if self.stream.listening else min(timer, pause.poll)

    def result(self, grant: Grant) -> WaitResult:
        """What is known after a pause."""
        if self._closed:
            raise LockMisused("the session was closed while a waiter was in it")
        waiting = grant.waiting
        waiting.listens_from = FOREVER
        answer, waiting.answer = waiting.answer, None
        turn, first = self._queue.turn(grant)
        holder = (grant if first is None else first).reporting.held_by
        # Where the majority confirms by memory alone, news of a grant may be older than what the journals will tell.
        queued_until = grant.lease.until if self._store.is_journaled else 0.0
        return WaitResult(self._now(), waiting.news, answer, queued_until, turn, waiting.cancelled, holder)
