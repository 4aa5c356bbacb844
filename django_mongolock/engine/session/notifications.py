"""What is reported of the grants of a session: to the logs, to its observer, and to the callbacks of its locks."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..logs import DEBUG, INFO, WARNING, is_enabled_for, log, log_exception
from .grant import CLOSED, Grant, State, User
from .worker_threads import WorkerThreads

#: How many callbacks and observers are called at a time, and how many with those that have taken half a second.
CALLBACK_THREADS, MOST_CALLBACKS = 8, 64

#: Called with what happens to a grant: "contended" if it must wait, then "acquired" or "not_acquired"; after "acquired"
#: also "release_requested", and once either "released" or "lost". It must not raise. Nothing is caught here: what the
#: caller does is reported in the caller's thread, where what a signal handler raises must reach the caller. What the
#: session notices itself is reported in a thread of the callbacks.
Observer = Callable[[str, Grant], object]


class Notifications:
    """Reports each event of a grant once."""

    def __init__(self, observer: Observer | None) -> None:
        #: Whether what the session notices is reported in another thread.
        self.in_threads = True
        self._observer = observer
        #: What is the program's may take its time, and no command waits for it.
        self.threads = WorkerThreads(CALLBACK_THREADS, MOST_CALLBACKS)

    def report_contended(self, grant: Grant) -> None:
        """Report, once, that another grant has what *grant* is about to wait for, or was tried for."""
        reporting = grant.reporting
        if reporting.busy and not reporting.contended:
            reporting.contended = True
            self._report("contended", grant)

    def report_acquired(self, grant: Grant) -> None:
        """Report that it is held."""
        grant.reporting.reported = "acquired"
        self._report("acquired", grant)

    def report_not_acquired(self, grant: Grant, reason: str, waited: float) -> None:
        """Report that it is not asked for any more."""
        if grant.reporting.reported == "":
            self.report_contended(grant)
            grant.reporting.reported, grant.reason, grant.reporting.waited = "end", reason, waited
            self._report("not_acquired", grant)

    def report_end(self, grant: Grant, *, noticed: bool = False) -> None:
        """Report, once, that what was reported to be acquired is not held any more, however it ended.

        noticed: the session has noticed it, rather than the caller.
        """
        if grant.end_is_news():
            event = "lost" if grant.state is State.LOST else "released"
            self._report(event, grant, noticed=noticed)
            if event == "lost" and grant.reason != CLOSED:
                for user in grant.users:
                    self.call("on_lost", grant, user, last=True)

    def report_release_request(self, grant: Grant, requested_by: str) -> None:
        """Report, once, that its release was requested, while it is held."""
        reporting = grant.reporting
        if reporting.release_requested_by is None and reporting.reported == "acquired" and grant.held:
            reporting.release_requested_by, reporting.held_for = requested_by, grant.held_for
            log(INFO, "release requested", key=grant.key, by=requested_by)
            self._report("release_requested", grant, noticed=True)
            for user in grant.users:
                self.call("on_release_requested", grant, user)

    def call(self, name: str, grant: Grant, user: User, *, last: bool = False) -> None:
        """Have the program of one *user* called, in another thread. The lock object may be about to be collected: the
        call that is made of it here keeps it until it is over.

        last: not again for the same acquisition, which may be one of several keys.
        """
        lock, callback = user.lock(), user.calls.pop(name, None) if last else user.calls.get(name)
        if lock is not None and callback is not None:
            self.threads.submit(functools.partial(_call_safely, functools.partial(callback, lock), grant))

    def close(self) -> None:
        """End the threads, when they have made the calls that there are."""
        self.threads.close()

    def _report(self, event: str, grant: Grant, *, noticed: bool = False) -> None:
        level = WARNING if event == "lost" and grant.reason != CLOSED else DEBUG
        if is_enabled_for(level):
            log(level, f"lock {event.replace('_', ' ')}", **_facts(event, grant))
        if self._observer is not None:
            observe = functools.partial(self._observer, event, grant)
            if not (noticed and self.in_threads and self.threads.submit(observe)):
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
