"""The tests that do not apply, each with its reason. `test_foreign.py` expects them to exist, and to fail."""

from __future__ import annotations

import sys
from typing import Final

TEXT = "the text of a lock is ours: it names the key, the token and the seconds that are left"
PRIVATE = "a private method, which only threading itself calls"
FIXED = "the number of permits is fixed: a release without an acquisition adds none"
TURNS = "counts turns of the event loop: a hand-over takes a command, and so more turns"

EXEMPT: Final[dict[str, str]] = {
    "threading.Lock.test_repr": TEXT,
    "threading.Lock.test_locked_repr": TEXT,
    "threading.Lock.test_at_fork_reinit": PRIVATE,
    "threading.RLock.test_repr": TEXT,
    "threading.RLock.test_locked_repr": TEXT,
    "threading.RLock.test__is_owned": PRIVATE,
    "threading.RLock.test_recursion_count": PRIVATE,
    "threading.RLock.test_release_save_unacquired": PRIVATE,
    "threading.Semaphore.test_repr": TEXT,
    "threading.Semaphore.test_release_unacquired": FIXED,
    "threading.BoundedSemaphore.test_repr": TEXT,
    "asyncio.Lock.test_repr": TEXT,
    "asyncio.Lock.test_lock_doesnt_accept_loop_parameter": "is about the constructors of asyncio",
    "asyncio.Lock.test_cancel_release_race": TURNS,
    "asyncio.Semaphore.test_repr": TEXT,
    "asyncio.Semaphore.test_acquire": TURNS,
    "asyncio.Semaphore.test_acquire_fifo_order_2": FIXED,
    "asyncio.Semaphore.test_acquire_fifo_order_3": FIXED,
}
if sys.version_info >= (3, 12):
    EXEMPT["asyncio.Semaphore.test_acquire_fifo_order_4"] = FIXED

#: Those whose result would say nothing, which are not run.
NOT_RUN: Final[dict[str, str]] = {
    "threading.Lock.test_reacquire": "a thread that would wait for itself gets LockReentry, if another one has not "
    "released the lock by then",
}
