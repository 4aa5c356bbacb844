"""`lock.atomic()` on a DATABASES alias: a transaction that the ORM joins, and that commits only under the lock."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from ..engine.lock.lock import MongoLock
from ..engine.lock.transaction import Atomic, kept_in_mongodb
from ..exceptions import LockMisused


class DjangoAtomic(Atomic[ClientSession]):
    """See engine.lock.transaction.Atomic. In a blocking block, the ORM on the alias is part of the transaction."""

    def __init__(self, lock: MongoLock, alias: str) -> None:
        kept_in_mongodb(lock)
        if connections[alias].vendor != "mongodb":
            raise ImproperlyConfigured(
                f"the DATABASES alias {alias!r} is not MongoDB, so it shares no transaction with the lock: write there "
                'with fenced_update(), or in its own transaction under a lock with release="on_commit"'
            )
        self._lock = lock
        self._alias = alias
        self._session = None
        self._grants = ()

    def __enter__(self) -> ClientSession:
        from django_mongodb_backend import transaction

        connection: Any = connections[self._alias]
        if connection.in_atomic_block_mongo:
            raise LockMisused(
                f"a transaction is open on {self._alias!r} already and would be committed without checking the lock: "
                "open lock.atomic() outside of it"
            )
        self._client = self._find_client()
        session = super().__enter__()
        # The backend makes a session only where there is none, so the ORM uses this one.
        connection.session = session
        self._block = transaction.atomic(using=self._alias)
        self._block.__enter__()
        return session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        connection: Any = connections[self._alias]
        try:
            super().__exit__(kind, error, traceback)
        except BaseException as failure:
            connection.session = None
            self._block.__exit__(type(failure), failure, failure.__traceback__)
            raise
        # This leaves the backend its flags, and the functions given to transaction.on_commit().
        connection.session = None
        self._block.__exit__(kind, error, traceback)
        return False

    async def __aenter__(self) -> ClientSession:
        self._client = await sync_to_async(self._find_client)()
        return await super().__aenter__()

    def _find_client(self) -> MongoClient[Any]:
        connection: Any = connections[self._alias]
        connection.ensure_connection()
        client: MongoClient[Any] = connection.connection
        return client
