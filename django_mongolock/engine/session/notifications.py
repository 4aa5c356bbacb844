"""The reports on the grants of a session: to the logs, to its observer, and to the callbacks of its locks."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..logs import DEBUG, INFO, WARNING, is_enabled_for, log, log_exception
from .grant import CLOSED, Grant, State, User
from .worker_threads import WorkerThreads

#: The number of callbacks and observers called at a time, and that number including calls that have run for half a
#: second.
CALLBACK_THREADS, MOST_CALLBACKS = 8, 64

#: A function called with each event of a grant. "contended" comes if the grant must wait, followed by "acquired" or
#: "not_acquired". After "acquired" may come "release_requested", and once either "released" or "lost". The function
#: must not raise. No exception is caught here: the acts of the caller are reported in the caller's thread, and an
#: exception of a signal handler must reach the caller. Events that the session notices itself are reported in a
#: callback thread.
Observer = Callable[[str, Grant], object]


class Notifications:
    """The reports of the events of grants. Each event is reported once."""

    def __init__(self, observer: Observer | None) -> None:
        #: Whether another thread reports the events that the session notices.
        self.in_threads = True
        self._observer = observer
        #: The threads for the program's own code. Slow callbacks delay no command.
        self.threads = WorkerThreads(CALLBACK_THREADS, MOST_CALLBACKS)

    def report_contended(self, grant: Grant) -> None:
        """Report, once, that another grant has the key that *grant* is about to wait for, or was tried for."""
        reporting = grant.reporting
        if reporting.busy and not reporting.contended:
            reporting.contended = True
            self._report("contended", grant)

    def report_acquired(self, grant: Grant) -> None:
        """Report that *grant* is held."""
        grant.reporting.reported = "acquired"
        self._report("acquired", grant)

    def report_not_acquired(self, grant: Grant, reason: str, waited: float) -> None:
        """Report that *grant* is no longer asked for."""
        if grant.reporting.reported == "":
            self.report_contended(grant)
            grant.reporting.reported, grant.reason, grant.reporting.waited = "end", reason, waited
            self._report("not_acquired", grant)

    def report_end(self, grant: Grant, *, noticed: bool = False) -> None:
        """Report, once, that a grant reported as acquired is no longer held, whatever the reason.

        - noticed: whether the session has noticed the end, rather than the caller.
        """
        if grant.end_is_news():
            event = "lost" if grant.state is State.LOST else "released"
            self._report(event, grant, noticed=noticed)
            if event == "lost" and grant.reason != CLOSED:
                for user in grant.users:
                    self.call("on_lost", grant, user, last=True)

    def report_release_request(self, grant: Grant, requested_by: str) -> None:
        """Report, once, that the release of *grant* was requested while it is held."""
        reporting = grant.reporting
        if reporting.release_requested_by is None and reporting.reported == "acquired" and grant.held:
            reporting.release_requested_by, reporting.held_for = requested_by, grant.held_for
            log(INFO, "release requested", key=grant.key, by=requested_by)
            self._report("release_requested", grant, noticed=True)
            for user in grant.users:
                self.call("on_release_requested", grant, user)

    def call(self, name: str, grant: Grant, user: User, *, last: bool = False) -> None:
        """Call the callback *name* of one *user* in another thread.

        The lock object may be about to be collected. The pending call keeps the lock object alive until the call is
        over.

        - last: whether no second call follows for this acquisition of one or several keys.
        """
        lock, callback = user.lock(), user.calls.pop(name, None) if last else user.calls.get(name)
        if lock is not None and callback is not None:
            call = functools.partial(_call_safely, functools.partial(callback, lock), grant)
            self.threads.submit(call, priority=0)

    def close(self) -> None:
        """End the threads after the pending calls."""
        self.threads.close()

    def _report(self, event: str, grant: Grant, *, noticed: bool = False) -> None:
        level = WARNING if event == "lost" and grant.reason != CLOSED else DEBUG
        if is_enabled_for(level):
            log(level, f"lock {event.replace('_', ' ')}", **_facts(event, grant))
        if self._observer is not None:
            observe = functools.partial(self._observer, event, grant)
            if not (noticed and self.in_threads and self.threads.submit(observe, priority=0)):
                observe()


def _facts(event: str, grant: Grant) -> dict[str, object]:
    facts: dict[str, object] = {"key": grant.key, "template": grant.reporting.template}
    if event in ("contended", "not_acquired"):
        facts["holder"] = grant.reporting.held_by
    else:
        facts["token"] = grant.token
    if event in ("lost", "not_acquired"):
        facts["reason"] = grant.reason
    return facts


def _call_safely(callback: Callable[[], object], grant: Grant) -> None:
    try:
        callback()
    except Exception:  # noqa: BLE001 - it is logged
        log_exception("callback failed", key=grant.key)
