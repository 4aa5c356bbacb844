"""Locks in the memory of one process, for tests: the same rule on the same documents, with a movable clock.

`MemoryServer` stands in for a MongoDB, `MemoryStore` for a connection to it, and `MemorySession` for a process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from ..engine import clock
from ..engine.protocol import actions
from ..engine.protocol.actions import Action, Apply, Pause, Protocol, WaitResult
from ..engine.protocol.processes import Fate
from ..engine.rule.deadlock import Cycle, cycle_of
from ..engine.rule.document import Limits, Step
from ..engine.rule.in_python import NOTHING, Moment, apply_rule, is_free, is_held, is_there, is_uncontended, reply_of
from ..engine.rule.replies import Bell, Found, Reply, read_found
from ..engine.session.ending import Orphans
from ..engine.session.grant import Grant
from ..engine.session.heartbeat import PeriodicTask
from ..engine.session.notifications import Observer
from ..engine.session.session import Session
from ..engine.store.base import is_heard_here
from ..exceptions import LockBackendFailed, LockMisused

Document = dict[str, Any]
T = TypeVar("T")

#: The name of the memory's clock. There is no failover to another clock.
CLOCK: Final = "memory"
#: Seconds after which a test's wait for itself counts as a wait without end.
LONGEST_WAIT: Final = 14_400.0
#: The most seconds by which a waiter moves the clock at a time.
LONGEST_STEP: Final = 60.0


class MemoryServer:
    """The replacement for a MongoDB: documents, and the clock that decides on them.

    Nothing is shared with another process.

    - sessions: connected sessions.
    - away: thread that makes the server answer no command, like a server that cannot be reached.
    """

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        self.sessions: list[MemorySession] = []
        self.away: threading.Thread | None = None
        self.hearers: dict[str, Callable[[Bell], object]] = {}
        self.mutex = threading.Lock()
        #: Held while the clock is moved. The thread that moves the clock does the work that is due meanwhile.
        self.clock_mutex = threading.RLock()
        self._moved = 0.0
        self._origin = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=clock.now())

    def now(self) -> float:
        """Return the seconds on the common clock: `clock.now`, and the seconds by which it was moved."""
        return clock.now() + self._moved

    def advance(self, seconds: float) -> None:
        """Let time pass, as it does for living processes.

        Due work such as renewals is done meanwhile. Once each lease was renewed, the further renewals are skipped.
        """
        with self.clock_mutex:
            begin = self.now()
            end = begin + seconds
            while (now := self.now()) < end:
                due = {session: session.heartbeat.next_due() for session in list(self.sessions)}
                self._moved += max(0.001, min([end, *due.values()]) - now)
                for session, moment in due.items():
                    if moment <= self.now():
                        session.heartbeat.do_due()
                self._skip_renewals(begin, end)
        for session in list(self.sessions):
            session.wake()

    def _skip_renewals(self, begin: float, end: float) -> None:
        """Move the clock, together with all leases that would be renewed.

        The move ends at *end*, or when a lock has been held for its longest time.
        """
        grants = [grant for session in self.sessions for grant in list(session.registry.grants.values())]
        living = {grant.id: grant for grant in grants if grant.renewable and not grant.lease.failures}
        longest = max((grant.length for grant in living.values()), default=0.0)
        ahead = min([end, *(grant.lease.last - longest for grant in living.values())]) - self.now()
        if ahead <= 0 or self.now() < begin + longest:
            return
        with self.mutex:
            self._moved += ahead
            for document in self.documents.values():
                for entry in document["holders"] + document["waiters"]:
                    if entry["grant"] in living:
                        living[entry["grant"]].lease.put_off(ahead)
                        entry["until"] += timedelta(seconds=ahead)

    @property
    def time(self) -> datetime:
        """The time of day, in whole milliseconds as in documents."""
        moment = self._origin + timedelta(seconds=self.now())
        return moment.replace(microsecond=moment.microsecond // 1000 * 1000)

    def apply(
        self, key: str, step: Step, limits: Limits, given: Callable[[Document], bool] | None = None
    ) -> tuple[Document | None, datetime]:
        """Apply *step* to the document of *key*, if *given* accepts it. Return the new document, and the time."""
        with self.mutex:
            before, now = self.documents.get(key), self.time
            if given is not None and not given(before or NOTHING):
                return None, now
            after = apply_rule(before, step, limits, Moment(now, CLOCK))
            if after is not None:
                self.documents[key] = after
            return after, now

    def is_hopeless(self, key: str, thread: threading.Thread) -> bool:
        """Return whether *key* is certainly not released while *thread* waits.

        The wait is hopeless if *thread* has the server away. The wait is also hopeless if every holder is dead, is
        played by *thread*, or was released already and is only kept for a minimum hold.
        """
        if self.away is thread:
            return True
        others = {session.id for session in self.sessions if session.played_by is not thread}
        holders = self.documents.get(key, {}).get("holders", [])
        return bool(holders) and all(e["session"] not in others or "released" in e for e in holders)


class ClockTasks:
    """The periodic tasks of a session, never run while another thread moves the clock.

    Otherwise a renewal that had begun would be late.
    """

    def __init__(self, server: MemoryServer, tasks: Sequence[PeriodicTask]) -> None:
        self._server = server
        self._tasks = tasks

    def next_due(self) -> float:
        """See PeriodicTask."""
        with self._server.clock_mutex:
            return min(task.next_due() for task in self._tasks)

    def do_due(self, now: float) -> None:
        """See PeriodicTask."""
        with self._server.clock_mutex:
            for task in self._tasks:
                task.do_due(now)


class MemoryStore:
    """One process's connection to a `MemoryServer`. For the methods see `store.Store`."""

    def __init__(self, server: MemoryServer, limits: Limits) -> None:
        self.server = server
        self.hearers = server.hearers
        self.limits = limits
        self._closed = False

    @property
    def connections(self) -> int:
        return 0

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        self.answer(key)
        given = partial(is_held, grants=(step.given,)) if step.given else None
        document, now = self.server.apply(key, step, self.limits, given)
        reply = reply_of(key, document, step.ask, now, step.owner)
        self.ring(reply.bells)
        return reply

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        self.answer(key)
        document, now = self.server.apply(key, step, self.limits, partial(is_free, grant=step.ask))
        return None if document is None else reply_of(key, document, step.ask, now, step.owner)

    def release_uncontended(self, keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        left = set()
        for key, grant in zip(keys, grants, strict=True):
            self.answer(key)
            step = Step(remove=(grant,), force=True)  # the short form ignores minimum holds
            if self.server.apply(key, step, self.limits, partial(is_uncontended, grant=grant))[0] is None:
                left.add(key)
        return left

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        self.answer(key)
        return reply_of(key, self.server.documents.get(key), grant, self.server.time, owner)

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        self.answer()
        found: dict[str, Found] = {}
        for key in keys:
            self.server.apply(key, step, self.limits, partial(is_there, grants=step.renew or step.remove))
            if (document := self.server.documents.get(key)) is not None:
                found[key] = read_found(document)
                self.ring(reply_of(key, document, "", self.server.time).bells)
        return found

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        self.answer(key)
        documents = [{**document, "_id": key} for key, document in self.server.documents.copy().items()]
        return cycle_of(documents, grant, self.server.time)

    def ring(self, bells: Iterable[Bell]) -> None:
        for bell in bells:
            is_heard_here(self, bell)

    def listen(self, session: str) -> Generator[Bell | None, None, None]:
        """Yield no bells, because all sessions and their hearers are in this process."""
        self.answer()
        while True:
            yield None
            time.sleep(1.0)

    def sent_to(self) -> str:
        """See `primary`."""
        return ""

    def primary(self) -> str:
        """Return "", because there is only one server, and nothing is ever undone."""
        return ""

    def close(self) -> None:
        self._closed = True

    def answer(self, key: str | None = None) -> None:
        """Raise LockBackendFailed, like a MongoDB that does not answer."""
        if self._closed:
            raise LockBackendFailed("the session was closed", key, passing=False)
        if self.server.away:
            raise LockBackendFailed("MongoDB did not answer (a test says so)", key)


class Dropped(Orphans):
    """Orphans that remembers its releases. A test reports them at its end."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.told: deque[str] = deque(maxlen=100)

    def _release(self, grant: Grant, why: str) -> None:
        self.told.append(f"{grant.key!r} was not released, and no code could, acquired at {grant.acquired_from}")
        super()._release(grant, why)


class MemorySession(Session):
    """One process, real or simulated by a test.

    - played_by: thread that plays another process, and cannot release anything while it waits itself.
    """

    def __init__(
        self, store: MemoryStore, observer: Observer | None = None, played_by: threading.Thread | None = None
    ) -> None:
        super().__init__(store, observer=observer, now=store.server.now)
        self.renewals.in_threads = False  # the clock may be moved next
        self._server = store.server
        self._server.sessions.append(self)
        self.played_by = played_by
        self.dropped = Dropped(self, self.ending)
        tasks = (self.dropped, self.renewals, self.cleanup, self.background)
        self.heartbeat.set_tasks([ClockTasks(self._server, tasks)], self.dropped.adopt)

    def close(self, timeout: float = 2.0) -> None:
        """See Session.close()."""
        super().close(timeout)
        self._server.hearers.pop(self.id, None)
        with contextlib.suppress(ValueError):  # closed twice
            self._server.sessions.remove(self)

    def die(self) -> None:
        """End without releasing anything, like a process that is killed."""
        for grant in list(self.registry.grants.values()):
            grant.mark_lost("its process died")
            self.ending.forget(grant)
        self.close()

    def name_process(self) -> str:
        """See Session.name_process(). Each session stands for a process here."""
        return self.id

    def fate(self, process: str) -> Fate:
        """See Session.fate()."""
        return "alive" if any(session.id == process for session in self._server.sessions) else "gone"

    def lose(self, key: str) -> int:
        """Take the grants of *key* away, report the loss at once, and wait until `on_lost` has been called.

        Returns the number of grants.
        """
        grants = [grant for grant in list(self.registry.grants.values()) if grant.key == key and grant.held]
        self.commands.send(Apply(key, Step(remove=tuple(grant.id for grant in grants), force=True)))
        for grant in grants:
            reported: list[threading.Event] = []
            for user in grant.users:
                if user.lock() is not None and (call := user.calls.get("on_lost")) is not None:
                    reported.append(threading.Event())
                    user.calls["on_lost"] = partial(_call_and_set, call, reported[-1])
            if self.ending.not_found(grant):
                for each in reported:
                    each.wait(5.0)
        return len(grants)

    def run(self, steps: Protocol[T]) -> T:
        """See Session.run(). If only time can end a wait, let it pass at once."""
        return actions.run(steps, partial(self._perform, threading.current_thread()))

    def _perform(self, thread: threading.Thread, action: Action) -> Any:
        if isinstance(action, Pause):
            grant = self.queue.waiting[action.grant]
            if self._server.is_hopeless(grant.key, thread):
                return self._let_time_go_by(grant, action.timer)
        return self.commands.perform(action)

    def _let_time_go_by(self, grant: Grant, seconds: float) -> WaitResult:
        self.notifications.report_contended(grant)
        if self.now() - grant.waiting.began > LONGEST_WAIT:
            raise LockMisused(f"this would wait for {grant.key!r} for ever, since the test itself holds it")
        self._server.advance(min(seconds, LONGEST_STEP))
        return self.waits.result(grant)


def _call_and_set(callback: Callable[[Any], object], done: threading.Event, lock: object) -> None:
    try:
        callback(lock)
    finally:
        done.set()
