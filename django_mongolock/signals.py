"""Django signals: what happens to the locks of this process, and what this process does to those of others.

A receiver that raises breaks no lock; Django logs its error. Receivers are plain functions, and quick ones: the thread
that acquires or releases calls them (`lock_lost` and `lock_release_requested` mostly come from the session's own).

Those about an acquisition of this process send, besides ``sender=MongoLock``:

key, template: the key as it is stored, and what it was made from (``"order:{order_id}"``; "" where that is unknown).
mode: "exclusive", "shared" or "semaphore". using: the DATABASES alias. token: the fencing token, 0 before there is
one. waited: seconds until it was acquired, or given up. held: seconds that it has been held. contended: had somebody
else the lock when it was asked for? reason: in words, for `lock_lost` why; for `lock_contended` who has it, as far as
that is known; for `lock_release_requested` who asks; for `lock_not_acquired` "busy", "queue full", "deadlock" or
"cancelled", or the name of another error.

An acquisition sends `lock_contended` at most, then either `lock_acquired` or `lock_not_acquired`. What was acquired
ends in either `lock_released` or `lock_lost`.
"""

from typing import Any, Final

from django.dispatch import Signal

from .engine.lock import MongoLock

lock_contended: Final = Signal()
lock_acquired: Final = Signal()
lock_not_acquired: Final = Signal()
lock_released: Final = Signal()
lock_lost: Final = Signal()
lock_release_requested: Final = Signal()
#: A call was left out, by ``on_contention="skip"``: key, template, reason (who has the lock).
lock_skipped: Final = Signal()
#: This process took a lock from its holders: key, using, by and reason (who did it and why, if that was said).
lock_forced: Final = Signal()
#: This process cleared stale locks: count, using.
stale_locks_cleared: Final = Signal()

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
    """Tell the receivers."""
    signal.send_robust(sender=MongoLock, **facts)
