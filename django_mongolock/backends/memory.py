"""Locks in the memory of one process, for tests: the same meaning, without a MongoDB."""

from __future__ import annotations

import os

from ..conf import LockSettings
from ..engine.document import milliseconds
from ..engine.memory import MemoryServer, MemoryStore
from ..engine.session import Observer, Session, Sessions
from ..engine.step import Limits
from .base import sending


class MemoryLockBackend:
    """Locks that only this process knows of. Never for production: two processes would both get the same lock.

    Leases, queues, modes, fencing tokens, owners and minimum holds mean what they mean in MongoDB. There is no
    document that outlives the process, so neither the model `Lock` nor the admin nor a command sees them.
    """

    def __init__(self, alias: str, settings: LockSettings) -> None:
        self.alias = alias
        self.settings = settings
        self._server = MemoryServer()
        self._pid = os.getpid()
        self._sessions = Sessions(self._make_session)

    @property
    def server(self) -> MemoryServer:
        """The locks of this process: a forked child has its own, since it shares no memory with its parent."""
        if self._pid != os.getpid():
            self._server, self._pid = MemoryServer(), os.getpid()
        return self._server

    def session(self) -> Session:
        """See Backend.session()."""
        return self._sessions.current()

    def new_session(self) -> Session:
        """One more session on the same locks, as another process would have it. Its events are nobody's business."""
        return self._open(None)

    def close(self) -> None:
        """See Backend.close()."""
        self._sessions.close()

    def _make_session(self) -> Session:
        return self._open(sending(self.alias))

    def _open(self, observer: Observer | None) -> Session:
        limits = Limits(waiters=self.settings.MAX_WAITERS, retention=milliseconds(self.settings.RETENTION))
        server = self.server
        return Session(MemoryStore(server, limits), self.settings.COMMAND_TIMEOUT, observer, server.now)
