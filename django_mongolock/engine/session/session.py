"""The session: one object for each process and store, with all that the process does with locks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar, Final, Generic, ParamSpec, TypeVar

from ...exceptions import LockMisused
from .. import clock
from ..logs import log_exception
from ..protocol import actions
from ..protocol.actions import Granted, Protocol
from ..store.base import Store
from .background import Background
from .commands import Commands
from .core import MOST_THREADS, SessionCore
from .ending import Cleanup, Ending, EndReason, Orphans
from .grant import CLOSED, Grant, State, User
from .heartbeat import Heartbeat
from .lanes import REQUEST, SHARES
from .notifications import Observer
from .renewals import Renewals
from .waits import CLOSED_WAITER, Waits
from .worker_threads import WorkerThreads

T = TypeVar("T")
P = ParamSpec("P")

#: Threads for the main thread's calls outside any session.
APART_THREADS: Final = 4
#: The exit priority in a `multiprocessing` child: after everything that a program ends there.
LAST: Final = -1_000


class Session(SessionCore):
    """The parts that keep the locks of one process, each with one job, and the path of a grant from one to the next.

    A daemon thread, the heartbeat, starts with the first grant. The heartbeat finds the work that is due: renewals in
    bulk, removals of leftovers, reports of losses. Other threads send those commands (`threads`), and call the program
    (`notifications.threads`). A forked child does not use its parent's session: see `PerProcess`.

    - now: clock of the deadlines, in seconds. Code that moves the clock calls `wake`.
    """

    def __init__(
        self,
        store: Store,
        command_timeout: float = 5.0,
        observer: Observer | None = None,
        now: Callable[[], float] = clock.now,
    ) -> None:
        super().__init__(store, observer, now)
        self.waits = Waits(self)
        self.commands = Commands(self, self.waits, command_timeout)
        self.cleanup = Cleanup(self, self.commands)
        self.ending = Ending(self, self.cleanup)
        self.renewals = Renewals(self, self.commands, self.ending)
        self.orphans = Orphans(self, self.ending)
        self.heartbeat.set_tasks((self.orphans, self.renewals, self.cleanup, self.background), self.orphans.adopt)
        self._closed = False
        self._ended: list[Grant] = []

    def __repr__(self) -> str:
        return f"<Session {self.id}, pid {self.pid}, {len(self.registry.grants)} grants>"

    @property
    def known(self) -> int:
        """The number of grants that are held, waited for, or still to be removed."""
        queue, registry = self.queue, self.registry
        held = len(registry.grants) + len(registry.by_line)
        return held + len(queue.waiting) + len(queue.lines) + len(self.background.pending)

    # Running protocols

    def run(self, steps: Protocol[T]) -> T:
        """Run a protocol, blocking."""
        return actions.run(steps, self.commands.perform)

    def arun(self, steps: Protocol[T]) -> Coroutine[Any, Any, T]:
        """See run(). A waiting coroutine holds no thread. Only a command on its way does."""
        return actions.arun(steps, self.commands.aperform)

    def register_grant(self, grant: Grant, granted: Granted) -> None:
        """Record that *grant* is held, and report it. Raises LockMisused if the session was closed meanwhile."""
        seen_to = grant.lease.renew_at
        if not grant.mark_held(granted):
            raise LockMisused(CLOSED_WAITER)
        # Register the grant before it leaves the queue. Otherwise the next local waiter could send a request of its own
        # at the same time.
        self.registry.add_held(grant)
        self.queue.leave(grant)
        if (due := grant.lease.renew_at) < seen_to:
            self.heartbeat.schedule(due)
        for user in grant.users:
            if "on_release_requested" in user.calls:
                self.waits.ensure_listening()
        self.notifications.report_acquired(grant)
        if grant.id not in self.registry.grants:  # it has ended meanwhile, when there was nothing to report yet
            self.ending.end(grant, EndReason.RELEASED)

    def share(self, grant: Grant, user: User) -> bool:
        """Share with *user* a grant that its worker holds already. Return whether the grant is still held."""
        if "on_release_requested" in user.calls:
            self.waits.ensure_listening()
        if not grant.add_user(user):
            return False
        if grant.reporting.release_requested_by is not None:
            self.notifications.call("on_release_requested", grant, user)
        return True

    # The end

    def wake(self) -> None:
        """Wake every sleeper, because the clock was moved."""
        self.heartbeat.wake()
        self.waits.wake_all()

    def close(self, timeout: float = 2.0) -> None:
        """Release all grants, remove leftovers, and close the client. A second call does nothing."""
        self.begin_to_close(timeout)
        self.finish_closing()

    def begin_to_close(self, timeout: float = 2.0) -> None:
        """Send the last commands, and wait for nothing."""
        if self._closed:
            return
        self.waits.close()
        self.heartbeat.close()
        self.cleanup.repeat_releases()
        self.commands.close(timeout)
        # Include the grants that are being asked for or released, because their own commands may never be sent.
        self._ended = list(self.registry.grants.values())
        for grant in self._ended:
            if not grant.mark_lost(CLOSED) and grant.state is State.RELEASED:
                grant.reason = CLOSED  # its own release may find no grant
            self.cleanup.ensure_removed(grant, stays=grant.token > 0, at_exit=True)
        self.background.begin_to_finish(timeout)

    def finish_closing(self) -> None:
        """Wait for the last commands within the given timeout, and close the client."""
        if self._closed:
            return
        self.cleanup.finish()
        for grant in self._ended:
            self.ending.end(grant, EndReason.RELEASED)
        self.waits.wake_all()
        for part in (self.threads, self.notifications, self.store):
            part.close()
        self._closed = True


S = TypeVar("S", bound=Session)


class PerProcess(Generic[T]):
    """A value for each process. A forked child makes its own, and does not use its parent's."""

    _all: ClassVar[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()
    _mutex = threading.Lock()
    #: The values of the parent. The child keeps them, so that they are not finalized there.
    _inherited: ClassVar[list[Any]] = []

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None
        with PerProcess._mutex:
            PerProcess._all.add(self)

    def current(self) -> T:
        """Return the value of this process."""
        made = self._made
        if made is not None and made[0] == os.getpid():
            return made[1]
        # Make the value without the mutex. An import on the way may start a program, and under gevent that is a fork.
        made = os.getpid(), self._make()
        with PerProcess._mutex:
            if self._made is None or self._made[0] != os.getpid():
                self._made = made
            return self._made[1]

    @classmethod
    def _before_fork(cls) -> None:
        PerProcess._mutex.acquire()

    @classmethod
    def _after_fork_in_parent(cls) -> None:
        PerProcess._mutex.release()

    @classmethod
    def _after_fork_in_child(cls) -> None:
        PerProcess._mutex = threading.Lock()
        for each in list(cls._all):
            if each._made is not None:
                cls._inherited.append(each._made[1])
                each._made = None


class Sessions(PerProcess[S]):
    """The session of each process, since the parent's locks are not the child's. Closed at exit."""

    #: The process whose exit hooks have run. No session is opened there any more, because nobody would close it.
    _ended: ClassVar[int | None] = None

    def __init__(self, make: Callable[[], S]) -> None:
        super().__init__(functools.partial(self._open, make))

    @classmethod
    def _open(cls, make: Callable[[], S]) -> S:
        if cls._ended == os.getpid():
            raise LockMisused("this process ends: its locks were released, and it gets no more")
        if multiprocessing.parent_process() is not None:
            # A forked child of `multiprocessing` ends by os._exit(). The child runs these finalizers instead of
            # `atexit`.
            multiprocessing.util.Finalize(None, cls._close_in_child, exitpriority=LAST)
        return make()

    def close(self) -> None:
        """Close the session of this process. The next `current` opens another one."""
        if (session := self._take()) is not None:
            session.close()

    def _take(self) -> S | None:
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] == os.getpid() else None

    @classmethod
    def _close_in_child(cls) -> None:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()  # as the interpreter does before it runs the `atexit` hooks
        cls.close_all()

    @classmethod
    def close_all(cls) -> None:
        """Close all sessions of this process for good. All of them send first, and are waited for together.

        No second Ctrl-C interrupts this. The call takes no longer than the timeout of `Session.close`.
        """
        with _uninterrupted():
            Sessions._ended = os.getpid()
            taken = [each._take() for each in list(cls._all) if isinstance(each, Sessions)]
            sessions = [session for session in taken if session is not None]
            for step in ("begin_to_close", "finish_closing"):
                for session in sessions:
                    try:
                        getattr(session, step)()
                    except Exception:  # noqa: BLE001 - it is logged, and costs the others nothing
                        log_exception("a session was not closed")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore signals whose handlers raise in the main thread."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for ignored, handler in handlers.items():
            signal.signal(ignored, handler)


class OutsideSession:
    """The threads and the background tasks of a process without a session."""

    def __init__(self) -> None:
        self.threads = WorkerThreads(APART_THREADS, MOST_THREADS, shares=SHARES)
        heartbeat = Heartbeat(self.threads, clock.now)
        self.background = Background(heartbeat)
        heartbeat.set_tasks([self.background], lambda _: None)


outside_session: Final = PerProcess(OutsideSession)


def off_main_thread(call: Callable[P, T]) -> Callable[P, T]:
    """Have another thread make the calls of the main thread, see `WorkerThreads.off_main_thread`.

    Use this for single commands only. If a signal interrupts the main thread, the command still completes.
    """

    @functools.wraps(call)
    def send(*arguments: P.args, **options: P.kwargs) -> T:
        return outside_session.current().threads.off_main_thread(
            lambda _: call(*arguments, **options), priority=REQUEST
        )

    return send


os.register_at_fork(
    before=PerProcess._before_fork,
    after_in_parent=PerProcess._after_fork_in_parent,
    after_in_child=PerProcess._after_fork_in_child,
)
atexit.register(Sessions.close_all)
