"""Django signals about the locks of this process, and about acts of this process on the locks of others.

If a receiver raises, the lock is not disturbed, and Django logs the error. (If Celery's soft time limit strikes
inside a receiver, Django catches that too, and the task runs on.) Receivers must be plain functions, and fast,
because the thread that acquires or releases calls them. Events that the session notices itself, such as a loss, come
from a thread for such calls.

The signals about an acquisition of this process send ``sender=MongoLock``, and:

- key: key as it is stored.
- template: template of the key (``"order:{order_id}"``; "" if unknown).
- mode: "exclusive", "shared" or "semaphore".
- using: DATABASES alias.
- token: fencing token, 0 before there is one.
- waited: seconds until the lock was acquired or the wait abandoned.
- held: seconds that the lock has been held.
- contended: whether another holder had the lock when it was requested.
- reason: text. For `lock_lost` the cause. For `lock_contended` the holder, as far as known. For
  `lock_release_requested` the requester. For `lock_not_acquired` "busy", "queue full", "deadlock", "cancelled", or the
  name of another error.

An acquisition sends at most one `lock_contended`. After that, it sends either `lock_acquired` or `lock_not_acquired`.
An acquired lock ends in either `lock_released` or `lock_lost`.
"""

from collections.abc import Callable
from typing import Any, Final

from django.dispatch import Signal

from .engine.lock.lock import MongoLock
from .engine.logs import log_exception
from .engine.session.grant import Grant

#: Another holder has the lock. A wait begins, or a single attempt has failed. `reason` is the holder. The arguments of
#: this and the next five: `key`, `template`, `mode`, `using`, `token`, `waited`, `held`, `contended`, `reason`.
lock_contended: Final = Signal()
#: The lock was acquired.
lock_acquired: Final = Signal()
#: The lock was not acquired. `reason`: "busy", "queue full", "deadlock", "cancelled", or the name of an error.
lock_not_acquired: Final = Signal()
#: The lock was released.
lock_released: Final = Signal()
#: The lock was lost. `reason` says why.
lock_lost: Final = Signal()
#: The release of the lock was requested. `reason` says by whom.
lock_release_requested: Final = Signal()
#: A call was skipped, by `on_contention="skip"` or `once_per`. `key`, `template`, `reason` (the holder).
lock_skipped: Final = Signal()
#: This process forced a release. `key`, `using`, `by`, `reason`.
lock_forced: Final = Signal()
#: This process cleared stale locks. `count`, `using`.
stale_locks_cleared: Final = Signal()

#: A write was refused because its row or document was changed since it was read. `what` is the model or collection.
version_conflict: Final = Signal()
#: `retry_on_conflict` makes another attempt. `what`, `error` (its class), `attempt` (the number of the failed one).
conflict_retried: Final = Signal()

#: The signals by the names of the engine's events.
EVENTS: Final = {
    "contended": lock_contended,
    "acquired": lock_acquired,
    "not_acquired": lock_not_acquired,
    "released": lock_released,
    "lost": lock_lost,
    "release_requested": lock_release_requested,
}


def send(signal: Signal, **facts: Any) -> None:
    """Call the receivers with these facts."""
    try:
        signal.send_robust(sender=MongoLock, **facts)
    except RuntimeError:  # from Django, if a receiver is async and this thread runs an event loop
        log_exception("signal not sent", key=facts.get("key"))


def signal_sender(alias: str) -> Callable[[str, Grant], None]:
    """Return an observer that sends the events of a session as signals."""

    def observe(event: str, grant: Grant) -> None:
        reporting = grant.reporting
        reasons = {"release_requested": reporting.release_requested_by, "contended": reporting.held_by}
        send(
            EVENTS[event],
            key=grant.key,
            template=reporting.template,
            mode=grant.terms.mode,
            using=alias,
            token=grant.token,
            waited=reporting.waited,
            held=reporting.held_for,
            contended=reporting.contended,
            reason=reasons.get(event, grant.reason) or "",
        )

    return observe
