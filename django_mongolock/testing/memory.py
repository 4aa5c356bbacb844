"""Locks in the memory of one process, for tests without a MongoDB."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

from django.core import mail

from ..backends import Backend
from ..conf import LockSettings
from ..engine.logs import WARNING, log
from ..engine.session.notifications import Observer
from ..signals import signal_sender
from .memory_server import MemoryServer, MemorySession, MemoryStore

#: The servers, by process and alias. A server outlives its backend, as MongoDB does, because a test may change the
#: settings.
_servers: Final[dict[tuple[int, str], MemoryServer]] = {}


class MemoryLockBackend(Backend[MemorySession]):
    """Locks that only this process knows.

    Never use them in production, because two processes would both get the same lock.

    Leases, queues, modes, fencing tokens, owners and minimum holds work as in MongoDB. There is no document that
    another process could read. The model `Lock`, the admin and the commands do not show these locks.
    """

    def __init__(self, alias: str, settings: LockSettings) -> None:
        super().__init__(alias, settings)
        if not hasattr(mail, "outbox"):  # Django's test environment has one
            log(WARNING, "locks are kept in the memory of this process, which is for tests only", alias=alias)

    @property
    def server(self) -> MemoryServer:
        """The locks of this process. A forked child has its own, since it shares no memory with its parent."""
        return _servers.setdefault((os.getpid(), self.alias), MemoryServer())

    def new_session(self) -> MemorySession:
        """See Backend.new_session()."""
        return self._open(signal_sender(self.alias))

    def read_here(self, key: str) -> tuple[Mapping[str, object] | None, datetime]:
        """See Backend.read_here(). Raises the error of a MongoDB that does not answer."""
        self.session().store.read(key, "", self.settings.COMMAND_TIMEOUT)
        return self.server.documents.get(key), self.server.time

    def other_process(self) -> MemorySession:
        """Return a session on the same locks for a simulated other process.

        The events of that session are not reported.
        """
        return self._open(None, threading.current_thread())

    def _open(self, observer: Observer | None, played_by: threading.Thread | None = None) -> MemorySession:
        return MemorySession(MemoryStore(self.server, self.limits), observer, played_by)


def own_sessions() -> Iterator[MemorySession]:
    """Yield the sessions of this process, without those that a test has as other processes."""
    for (pid, _), server in _servers.copy().items():
        if pid == os.getpid():
            yield from (session for session in list(server.sessions) if session.played_by is None)


def exchange_servers(servers: Mapping[tuple[int, str], MemoryServer]) -> dict[tuple[int, str], MemoryServer]:
    """Use *servers* from now on. Return the servers that were used before."""
    before = dict(_servers)
    _servers.clear()
    _servers.update(servers)
    return before
