"""Django signals of this process's own locks. A receiver that raises breaks no lock; its error is logged.

Every signal has `key`, `token` (the fencing token), `using` (the DATABASES alias) and `reason` (in words). They
are sent in the thread where the thing happens: `lock_lost` and `lock_release_requested` mostly in the session's own.
For `lock_release_requested`, `reason` says who asks.
"""

from typing import Final

from django.dispatch import Signal

lock_acquired: Final = Signal()
lock_released: Final = Signal()
lock_lost: Final = Signal()
lock_release_requested: Final = Signal()

EVENTS: Final = {
    "acquired": lock_acquired,
    "released": lock_released,
    "lost": lock_lost,
    "release_requested": lock_release_requested,
}
