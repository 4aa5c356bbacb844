"""Processes at a server in memory, by a clock that the test moves."""

from typing import Any

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Limits, Step, Terms
from django_mongolock.engine.session.grant import Grant
from django_mongolock.testing.memory_server import MemoryServer, MemorySession, MemoryStore
from tests.engine.conftest import make_lock
from tests.engine.waiters import InThread, Waiter

TIMEOUT = 5.0
#: Longer terms than any test lets time pass.
LONG = Terms(lease=6_000, margin=1, waiter_lease=6_000)


class Memory:
    """A server, and the processes at it.

    - events: reports about the grants of `session`, with their keys.
    """

    def __init__(self, in_thread: InThread) -> None:
        self.server, self.in_thread = MemoryServer(), in_thread
        self.events: list[tuple[str, str]] = []
        self._made: list[MemorySession] = []
        self.session = self.new_session(observer=self._note)

    def _note(self, event: str, grant: Grant) -> None:
        self.events.append((event, grant.key))

    def new_session(self, store: type[MemoryStore] = MemoryStore, **arguments: Any) -> MemorySession:
        """Return a session, as another process would have it."""
        self._made.append(MemorySession(store(self.server, Limits()), **arguments))
        return self._made[-1]

    def lock(self, *keys: str, **options: Any) -> MongoLock:
        """Return a lock of `session`, with LONG terms unless *options* say otherwise."""
        return make_lock(self.session, *keys, **{"terms": LONG, **options})

    def other(self, *keys: str, **options: Any) -> MongoLock:
        """Return a lock of another process."""
        return make_lock(self.new_session(), *keys, **{"terms": LONG, **options})

    def waiter(self, **options: Any) -> Waiter:
        """Return a thread of this process that waits for a lock without a limit."""
        return Waiter(self.in_thread, self.lock(**{"wait": None, **options}))

    def apply(self, **step: Any) -> None:
        """Send a step for the key "k"."""
        self.session.store.apply("k", Step(**step), TIMEOUT)

    def entries(self, key: str = "k") -> list[dict[str, Any]]:
        """Return the stored holders of a key."""
        return list(self.server.documents[key]["holders"])

    def holders(self, key: str = "k") -> list[str]:
        """Return the grants of the holders."""
        return [entry["grant"] for entry in self.entries(key)]

    def close(self) -> None:
        for session in self._made:
            session.close()
