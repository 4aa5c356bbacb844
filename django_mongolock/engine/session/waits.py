"""The waits of a session. A waiter is woken by a bell, by another waiter, or by a timeout.

A thread hears the bells while anything is waited for.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from math import inf
from typing import Final

from pymongo.errors import PyMongoError

from ...exceptions import LockBackendFailed, LockMisused
from ..logs import DEBUG, WARNING, log
from ..protocol.actions import FOREVER, Pause, WaitResult
from ..rule.document import Step
from ..rule.replies import Bell
from .bulk import batches
from .core import SessionCore
from .grant import Grant
from .heartbeat import start_thread
from .lanes import REQUEST

#: Seconds that the listener goes on after the last wait, because the next wait may come soon.
LINGER: Final = 2.0
#: A listener that has heard nothing for this many seconds is deaf, because the server answers each second.
SILENCE: Final = 3.0
#: The first and the longest pause between two attempts to listen, in seconds.
RETRY_FIRST, RETRY_LAST = 0.5, 30.0
#: The bounds of the seconds between two reads of all queues while no bell can be heard. The time is short after a read
#: that has found news, and grows slowly after others.
LOOK_FIRST, LOOK_LAST = 0.02, 0.2
#: The longest pause of a waiter that neither hears a bell nor is looked for, in seconds.
LONGEST_POLL: Final = 1.0


class Listener:
    """The thread that passes each bell to *waits* while anything is waited for. While it is deaf, it reads the queues.

    A cursor begins with the bells that are there already. A bell that rings while the cursor is opened is therefore
    heard.
    """

    def __init__(self, session: SessionCore, waits: Waits) -> None:
        #: The time of the last sign of life from the server, and of the last read of all queues.
        self._heard_at = self._looked_at = -inf
        self._session = session
        self._waits = waits
        self._now = session.now
        self._lingers_until = 0.0
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._closed = False
        self._complained = False

    @property
    def listening(self) -> bool:
        """Whether a bell that rings now will be heard.

        A connection may be gone without a word, hence the limit `SILENCE`.
        """
        return self._now() - self._heard_at < SILENCE

    @property
    def serves(self) -> bool:
        """Whether a waiter learns of its grant, by a bell or by a read of all queues."""
        return self.listening or self._now() - self._looked_at < LONGEST_POLL

    def keep_listening(self) -> bool:
        """Go on listening. Return whether a thread does so. If none does, call `start`."""
        self._lingers_until = self._now() + LINGER
        return self._closed or (self._thread is not None and self._thread.is_alive())

    def start(self, _left: float = FOREVER) -> None:
        """Start the thread, unless it runs."""
        failure = ""
        with self._mutex:
            if not self._closed and (self._thread is None or not self._thread.is_alive()):
                self._thread, failure = start_thread(self._run, "mongolock-listener")
        if failure:
            self._complain(failure)

    def close(self) -> None:
        """Stop listening."""
        self._closed = True

    def _goes_on(self) -> bool:
        return not self._closed and (self._now() < self._lingers_until or self._waits.is_waited())

    def _run(self) -> None:
        pause = RETRY_FIRST
        while self._goes_on():
            reason = self._listen()
            pause = RETRY_FIRST if self.listening else min(RETRY_LAST, pause * 2)
            self._heard_at = -inf
            if self._goes_on():
                self._complain(reason)
                self._give_way(pause)
        self._thread = None
        if self._goes_on():  # a waiter that came just now has still seen this thread
            self.start()

    def _listen(self) -> str:
        """Listen as long as that is wanted and possible. Return the reason for the end."""
        try:
            with contextlib.closing(self._session.store.listen(self._session.id)) as bells:
                for bell in bells:
                    self._heard_at, self._complained = self._now(), False
                    if bell is not None:
                        self._waits.on_bell(bell)
                    if not self._goes_on():
                        break
        except (PyMongoError, LockBackendFailed) as error:
            return f"{type(error).__name__}, code {getattr(error, 'code', None)}"
        return "it ended"

    def _give_way(self, seconds: float) -> None:
        """Look at all queues for a while."""
        end, pause = self._now() + seconds, LOOK_FIRST
        while self._goes_on() and self._now() < end:
            news = self._waits.look_at_queues()
            if news is not None:
                self._looked_at = self._now()
            pause = LOOK_FIRST if news else min(LOOK_LAST, pause * 1.2)
            time.sleep(pause)

    def _complain(self, reason: str) -> None:
        """Warn once that waiters poll instead of hearing bells."""
        log(DEBUG if self._complained else WARNING, "no bells, waiting by polling", reason=reason)
        self._complained = True


#: The most seconds to wait for a hand-over within the process. A signal may have interrupted its sender.
LONGEST_HANDOVER: Final = 1.0
#: Seconds until a cancelled wait has ended. The command that takes the waiter out of the queue gets no more time.
CANCELLED_WITHIN: Final = 1.0
#: The reason why a wait has ended, or why a granted lock is not held.
CLOSED_WAITER: Final = "the session was closed while a waiter was in it"


class Waits:
    """The pauses of a session's protocols."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self.listener = Listener(session, self)
        session.store.hearers[session.id] = self.on_bell
        self._closed = False

    def pause(self, pause: Pause) -> WaitResult:
        """Wait in this thread."""
        grant = self._session.queue.waiting[pause.grant]
        self._session.notifications.report_contended(grant)
        grant.waiting.wait(self._seconds(pause, grant))
        return self.result(grant)

    async def apause(self, pause: Pause) -> WaitResult:
        """See pause()."""
        grant = self._session.queue.waiting[pause.grant]
        self._session.notifications.report_contended(grant)
        await grant.waiting.await_(self._seconds(pause, grant))
        return self.result(grant)

    def cancel(self, grant: Grant) -> None:
        """End the wait for *grant*, from any thread."""
        grant.waiting.back_by = min(grant.waiting.back_by, self._session.now() + CANCELLED_WITHIN)
        grant.waiting.cancelled = True
        grant.waiting.wake()

    def on_bell(self, bell: Bell) -> None:
        """Wake the waiter that was granted the lock. If the bell asks for a release, renew the holder at once."""
        if bell.news is None:
            if (held := self._session.registry.grants.get(bell.grant)) is not None:
                held.lease.once_more = True  # a renewal under way may have read before the request
                held.lease.renew_at = self._session.now()
                self._session.heartbeat.schedule(held.lease.renew_at)
        elif (grant := self._session.queue.waiting.get(bell.grant)) is not None:
            known = grant.waiting.news
            grant.waiting.news = bell.news if known is None or known.token < bell.news.token else known
            grant.waiting.wake()

    def wake_all(self) -> None:
        """Wake every waiter, because bells may have passed unheard."""
        for grant in list(self._session.queue.waiting.values()):
            grant.waiting.wake()

    def look_at_queues(self) -> bool | None:
        """Read the documents of all waiters, and wake those that were granted or have moved up.

        Return whether there are such waiters, or None if there was no answer.
        """
        sent, news, by_key = self._session.now(), False, dict[str, list[Grant]]()
        for grant in list(self._session.queue.waiting.values()):
            if 0.0 < grant.waiting.seen_at <= sent:
                by_key.setdefault(grant.key, []).append(grant)
        for keys in batches(list(by_key)):
            try:
                found = self._session.store.renew(keys, Step(), LONGEST_POLL)
            except LockBackendFailed:
                return None
            for key, queue in found.items():
                for grant in by_key[key]:
                    if grant.waiting.seen_at <= sent:  # no newer answer has come meanwhile
                        news |= grant.look_at_queue(queue)
        return news

    def ensure_listening(self) -> None:
        """Start or prolong the listening for bells."""
        if not self.listener.keep_listening():
            self._session.threads.off_main_thread(self.listener.start, priority=REQUEST)

    def close(self) -> None:
        """End every wait at its next look."""
        self._closed = True
        self.listener.close()

    def is_waited(self) -> bool:
        """Return whether bells may concern this session."""
        grants = list(self._session.registry.grants.values())
        return bool(self._session.queue.waiting) or any(
            "on_release_requested" in user.calls for grant in grants for user in grant.users
        )

    def _seconds(self, pause: Pause, grant: Grant) -> float:
        if not pause.in_queue:
            return pause.timer
        if grant.waiting.cancelled:
            return 0.0  # the wake-up may have been used up by an answer that came at the same time
        self.ensure_listening()
        timer = min(pause.timer, LONGEST_HANDOVER) if grant.waiting.handover_reserved else pause.timer
        if self.listener.serves:
            return timer
        # The listener may be opening its cursor just now. A pause is half as long as the wait so far.
        poll = min(LONGEST_POLL, max(LOOK_FIRST, (self._session.now() - grant.waiting.began) / 2))
        return min(timer, poll * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, guards nothing

    def result(self, grant: Grant) -> WaitResult:
        """Return what is known after a pause."""
        if self._closed:
            raise LockMisused(CLOSED_WAITER)
        waiting = grant.waiting
        answer, waiting.answer = waiting.answer, None
        turn, first = self._session.queue.turn(grant)
        holder = (grant if first is None else first).reporting.held_by
        # Read `until` before `last_token`. The writer of a new end has written the token before.
        queued_until, last_token = grant.lease.until, waiting.last_token
        return WaitResult(
            now=self._session.now(),
            news=waiting.news,
            answer=answer,
            queued_until=queued_until,
            last_token=last_token,
            turn=turn,
            cancelled=waiting.cancelled,
            place_gone=waiting.place_gone,
            holder=holder,
        )
