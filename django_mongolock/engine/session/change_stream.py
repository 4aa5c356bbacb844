"""The change stream of a session, which reports what was granted to it.

It is opened while there are waiters, and closed when there have been none for a while. The server sends only what
concerns this session. Nothing here does I/O in the stream's loop but read the stream: waking is left to `Wakeup`.

A stream that is being read is woken by the server for every change of the collection, also for those of other
sessions: with 128 of them that is most of what a hand-over costs. One that is not read costs nothing and misses
nothing, it only has to catch up. So a stream rests while no news is expected: there are no waiters, or their turn is
far.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Final

from pymongo.errors import PyMongoError

from ...exceptions import LockBackendFailed
from .. import clock
from ..logs import DEBUG, WARNING, log
from ..replies import News, read_news
from ..store import Store

#: How long the stream stays open after the last waiter, in seconds.
LINGER: Final = 30.0
#: How long after its opening everybody looks once more, in seconds: a grant from just before it may not have been
#: majority-committed when they looked, and the stream does not tell of it.
SECOND_LOOK: Final = 0.5
#: How long a stream rests at most, in seconds: what has happened meanwhile is to be read through afterwards.
LONGEST_REST: Final = 1.0
#: Bounds of the time between two attempts to open it, in seconds.
RETRY_FIRST, RETRY_LAST = 0.5, 30.0


class ChangeStream:
    """Reads the change stream of a session in a thread of its own.

    on_news: called with the news of each grant of the session. expected: when the next news may come, by the clock
    *now*. look: called when the stream has come up or gone down, with the seconds until the waiters must look, since
    news may have passed between.
    """

    def __init__(
        self,
        store: Store,
        session: str,
        on_news: Callable[[str, News], object],
        expected: Callable[[], float],
        look: Callable[[float], object],
        *,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self.listening = False
        self._store = store
        self._now = now
        self._session = session
        self._on_news = on_news
        self._expected = expected
        self._look = look
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._rests_until = 0.0
        self._wanted_until = 0.0
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._closed = False
        self._complained = False

    def want(self, since: float) -> bool:
        """A waiter expects news *since* then: keep the stream open. Return whether there is a thread for it; if not,
        `start` one."""
        self._wanted_until = self._now() + LINGER
        if since < self._rests_until:
            self._wakeup.put(None)
        return self._closed or (self._thread is not None and self._thread.is_alive())

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if not self._closed and (self._thread is None or not self._thread.is_alive()):
                thread = threading.Thread(target=self._run, name="mongolock-stream", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        self._closed = True
        self._wakeup.put(None)

    def _is_wanted(self) -> bool:
        return not self._closed and self._now() < self._wanted_until

    def _run(self) -> None:
        pause = RETRY_FIRST
        while self._is_wanted():
            reason = self._listen()
            pause = RETRY_FIRST if self.listening else min(RETRY_LAST, pause * 2)
            if self.listening:
                self.listening = False
                self._look(0.0)
            if self._is_wanted():
                self._complain(reason)
                self._give_way(pause)

    def _listen(self) -> str:
        """Read the stream for as long as there are waiters and it lives. Returns why it ended."""
        try:
            with self._store.watch(self._session) as stream:
                self.listening, self._complained = True, False
                self._look(0.0)
                self._look(SECOND_LOOK)
                while True:
                    self._rest()
                    if not self._is_wanted():
                        break
                    change = stream.try_next()
                    if change is not None:
                        for grant, news in read_news(_granted_field(change)).items():
                            self._on_news(grant, news)
                    elif not stream.alive:  # invalidated; it says nothing more, and raises nothing
                        break
        except (PyMongoError, LockBackendFailed) as error:
            return f"{type(error).__name__}, code {getattr(error, 'code', None)}"
        return "it ended"

    def _rest(self) -> None:
        """Wait until news may be expected, at most LONGEST_REST."""
        end = self._now() + LONGEST_REST
        while not self._closed:
            # A waiter that comes from here on wakes this thread: what it expects may be too late for this look.
            self._rests_until = float("inf")
            self._rests_until = until = min(self._expected(), end)
            seconds = until - self._now()
            if seconds <= 0:
                break
            with contextlib.suppress(Empty):
                self._wakeup.get(timeout=seconds)
        self._rests_until = 0.0

    def _give_way(self, seconds: float) -> None:
        end = self._now() + seconds
        while self._is_wanted() and self._now() < end:
            time.sleep(0.1)

    def _complain(self, reason: str) -> None:
        """Say once that waiting goes on by polling."""
        log(DEBUG if self._complained else WARNING, "no change stream, waiting by polling", reason=reason)
        self._complained = True


def _granted_field(change: Mapping[str, Any]) -> object:
    """The field `granted` of a change, which comes as an update, or whole if the document was small."""
    whole: dict[str, Any] = change.get("fullDocument") or {}
    updated: dict[str, Any] = change.get("updateDescription") or {}
    return whole.get("granted") or updated.get("updatedFields", {}).get("granted")
