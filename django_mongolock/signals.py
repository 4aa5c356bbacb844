"""Django signals: what happens to the locks of this process, and what this process does to those of others.

A receiver that raises does not disturb the lock; Django logs its error. (If Celery's soft time limit strikes inside a
receiver, Django catches that too, and the task runs on.) Receivers are plain functions, and fast ones: the thread that
acquires or releases calls them. What the session notices itself, such as a loss, comes from a thread for such calls.

The signals about an acquisition of this process send, besides ``sender=MongoLock``:

key, template: the key as it is stored, and the template of the key (``"order:{order_id}"``; "" if unknown). mode:
"exclusive", "shared" or "semaphore". using: the DATABASES alias. token: the fencing token, 0 before there is one.
waited: seconds until it was acquired or abandoned. held: seconds that it has been held. contended: whether another
holder had the lock when it was requested. reason: as text; for `lock_lost` the cause; for `lock_contended` the holder,
as far as it is known; for `lock_release_requested` who requests it; for `lock_not_acquired` "busy", "queue full",
"deadlock" or "cancelled", or the name of another error.

An acquisition sends at most one `lock_contended`, then either `lock_acquired` or `lock_not_acquired`. What was acquired
ends in either `lock_released` or `lock_lost`.
"""

from collections.abc import Callable
from typing import Any, Final

from django.dispatch import Signal

from .engine.lock.lock import MongoLock
from .engine.logs import log_exception
from .engine.session.grant import Grant

#: Another holder has the lock: a wait begins, or a single attempt has failed. `reason` is the holder. The arguments of
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

#: A write was refused: its row or document was changed since it was read. `what`: the model or the collection.
version_conflict: Final = Signal()
#: `retry_on_conflict` makes another attempt. `what`, `error` (its class), `attempt` (the number of the failed one).
conflict_retried: Final = Signal()

#: The events of the engine.
EVENTS: Final = {
    "contended": lock_contended,
    "acquired": lock_acquired,
    "not_acquired": lock_not_acquired,
    "released": lock_released,
    "lost": lock_lost,
    "release_requested": lock_release_requested,
}


def send(signal: Signal, **facts: Any) -> None:
    """Call the receivers."""
    try:
        signal.send_robust(sender=MongoLock, **facts)
    except RuntimeError:  # of Django, where a receiver is async and this thread runs an event loop
        log_exception("signal not sent", key=facts.get("key"))


def signal_sender(alias: str) -> Callable[[str, Grant], None]:
    """An observer that sends the events of a session as signals."""

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
