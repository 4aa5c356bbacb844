"""The state that the parts of a session share."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from typing import Final

from ..protocol import processes
from ..store.base import Store
from .background import Background
from .grant_registry import GrantRegistry, LocalQueue
from .heartbeat import Heartbeat
from .lanes import SHARES
from .notifications import Notifications, Observer
from .worker_threads import WorkerThreads

#: The number of commands that the threads of a session send at a time, and that number including commands that have run
#: for half a second.
COMMAND_THREADS, MOST_THREADS = 24, 80
#: Connections for all other purposes: the bells, the history, commands of the admin.
SPARE_CONNECTIONS: Final = 4


def thread_limits(connections: int) -> tuple[int, float]:
    """Return how many threads may have a connection, and how many threads of the program may send by themselves.

    The program's threads leave the connections of the session's threads alone. `SHARES` keeps a quarter of the latter
    for renewals. A renewal therefore never waits for a connection behind another command.
    """
    if connections == 0:
        return MOST_THREADS, math.inf
    left = max(1, connections - SPARE_CONNECTIONS)
    return min(MOST_THREADS, left), max(0, left - MOST_THREADS)


class SessionCore:
    """The session as its parts know it: the store, the clock, the threads, the grants and the waiters."""

    def __init__(self, store: Store, observer: Observer | None, now: Callable[[], float]) -> None:
        self.id = secrets.token_hex(6)
        self.pid = os.getpid()
        self.store = store
        self.now = now
        most, own = thread_limits(store.connections)
        self.threads = WorkerThreads(min(COMMAND_THREADS, most), most, shares=SHARES, own=own)
        self.heartbeat = Heartbeat(self.threads, now)
        self.background = Background(self.heartbeat, store)
        self.registry = GrantRegistry(self.heartbeat)
        self.queue = LocalQueue(store.limits.waiters, self.registry)
        self.notifications = Notifications(observer)

    def name_process(self) -> str:
        """Return a name for this process, by which `fate` can tell that the process is gone."""
        return processes.this_process()

    def fate(self, process: str) -> processes.Fate:
        """Return what became of the process with that name."""
        return processes.fate(process)
