"""The tests that do not apply, each with its reason. `test_foreign.py` expects them to exist, and to fail."""

from typing import Final

TEXT = "the text of a lock is ours: it names the key, the token and the seconds that are left"
PRIVATE = "a private method, which only threading itself calls"

EXEMPT: Final[dict[str, str]] = {
    "Lock.test_repr": TEXT,
    "Lock.test_locked_repr": TEXT,
    "Lock.test_at_fork_reinit": PRIVATE,
    "RLock.test_repr": TEXT,
    "RLock.test_locked_repr": TEXT,
    "RLock.test__is_owned": PRIVATE,
    "RLock.test_recursion_count": PRIVATE,
    "RLock.test_release_save_unacquired": PRIVATE,
    "Semaphore.test_repr": TEXT,
    "Semaphore.test_release_unacquired": "the number of permits is fixed: a release without an acquisition adds none",
    "BoundedSemaphore.test_repr": TEXT,
}

#: Tests that are not run, because their results would say nothing.
NOT_RUN: Final[dict[str, str]] = {
    "Lock.test_reacquire": "a thread that would wait for itself gets LockReentry, if another one has not released the "
    "lock by then",
}
