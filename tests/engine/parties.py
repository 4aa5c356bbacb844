"""Several processes, so to speak: sessions that the server can tell from one another."""

import uuid
from typing import Any

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import Options
from django_mongolock.engine.rule.step import Limits
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from tests.engine.waiters import InThread, Waiter
from tests.support import DATABASE


class Party:
    """One process, which the server knows by its `appname`. *client* are more arguments of MongoClient."""

    def __init__(self, uri: str, collection: str, timeout: float = 5.0, **client: Any) -> None:
        self.appname = f"test-{uuid.uuid4().hex}"
        arguments = {"host": uri, "appname": self.appname, "heartbeatFrequencyMS": 500, **client}
        self.session = Session(
            MongoStore(StoreConfig(arguments, DATABASE, collection, Limits(waiters=20_000))), timeout
        )

    def lock(self, terms: Terms, key: str = "k", *, wait: float = 60, renew: bool = True) -> MongoLock:
        return MongoLock(lambda: self.session, (key,), Options(terms, wait, auto_renew=renew))


class Parties:
    """Makes such processes, which all use one collection, and threads that wait in them; ends all of them."""

    def __init__(self, uri: str, collection: str, in_thread: InThread, timeout: float = 5.0, **client: Any) -> None:
        self._uri = uri
        self.collection = collection
        self._in_thread = in_thread
        self._options = {"timeout": timeout, **client}
        self._made: list[Party] = []
        self._waiters: list[Waiter] = []

    def new(self, **options: Any) -> Party:
        """One more process."""
        self._made.append(Party(self._uri, self.collection, **{**self._options, **options}))
        return self._made[-1]

    def waiter(self, lock: MongoLock) -> Waiter:
        """A thread that waits for *lock*, and then keeps it until it is told to let go, at the latest in the end."""
        self._waiters.append(Waiter(self._in_thread, lock))
        return self._waiters[-1]

    def close(self) -> None:
        """End all of them. Those that still wait get an error."""
        for waiter in self._waiters:
            waiter.let_go()
        for party in self._made:
            party.session.close()
